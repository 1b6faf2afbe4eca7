"""The ledger: what each layer of a model costs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from torch import nn

from ecoformer.accounting.energy import EnergyTable, energy_table
from ecoformer.accounting.exact import exact_rows
from ecoformer.accounting.layers import PARTS, Part, layers_of
from ecoformer.operations import KINDS, Counts, paper_counts
from ecoformer.running import NOT_TAKEN, not_taken

Accounting = Literal["paper", "exact"]
_WIDEST = 10
"""Characters of a layer's class in a printed ledger, which should fit in 80 columns."""


def short(value: float | None) -> str:
    """Three digits, and all of those before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def by_width(counts: Counts) -> dict[str, dict[str, int]]:
    """Numbers of operations by width, then by kind; those that are zero are left out."""
    return {
        width: {kind: n for kind, n in part.to_dict().items() if n} for width, part in counts.widths.items()
    }


def aligned(lines: list[list[str]]) -> list[str]:
    """Lines of a table as text: two columns of names on the left, figures aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [f"{{:<{width}}}" if i < 2 else f"{{:>{width}}}" for i, width in enumerate(widths)]
    return ["  ".join(cells).format(*line).rstrip() for line in lines]


@dataclass(frozen=True)
class Row:
    """One layer: its name, its class or mechanism, the part of the model it belongs to, and its counts."""

    name: str
    kind: str
    part: Part
    counts: Counts


@dataclass(frozen=True)
class Ledger:
    """What a model costs, layer by layer; `uncounted` are layers without a rule."""

    model: str
    accounting: str
    energy: EnergyTable
    rows: tuple[Row, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> Counts:
        """All layers together."""
        return sum((row.counts for row in self.rows), Counts())

    @property
    def energy_pj(self) -> float:
        """Energy of all layers together."""
        return self.energy.energy_pj(self.total)

    def of(self, part: Part) -> Counts:
        """All layers of a part."""
        return sum((row.counts for row in self.rows if row.part == part), Counts())

    def shares(self) -> dict[str, float]:
        """The share of each part in the energy."""
        total = self.energy_pj or 1.0
        return {part: self.energy.energy_pj(self.of(part)) / total for part in PARTS}

    def summary(self) -> dict[str, Any]:
        """Totals, energy, attention's share of it, and the number of layers not counted."""
        energy = {"energy_pj": self.energy_pj, "attention_share": self.shares()["attention"]}
        more = {"widths": by_width(self.total), "uncounted": len(self.uncounted)}
        return self.total.to_dict() | energy | more

    def to_dict(self) -> dict[str, Any]:
        """Totals, shares and layers, each also by width of the operands."""
        table = self.energy
        return {
            "model": self.model,
            "accounting": self.accounting,
            "energy": {
                "name": table.name,
                "pj": dict(table.pj),
                "widths": {width: dict(pj) for width, pj in table.widths.items()},
                "source": table.source,
            },
            "total": self.total.to_dict() | {"energy_pj": self.energy_pj},
            "widths": by_width(self.total),
            "shares": self.shares(),
            "layers": [self._flat(row) | {"widths": by_width(row.counts)} for row in self.rows],
            "uncounted": list(self.uncounted),
        }

    def to_json(self) -> str:
        """The content of `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_csv(self) -> str:
        """One line per layer."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["name", "kind", "part", *KINDS, "energy_pj"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(self._flat, self.rows))
        return text.getvalue()

    def __str__(self) -> str:
        total, by_bytes = self.total, self.total.bytes > 0
        lines = [["layer", "kind", "mul (M)", "add (M)", *["MB"] * by_bytes, "mJ"]]
        for row in (*self.rows, Row("total", "", "other", total)):
            counts = row.counts
            numbers = [counts.mul / 1e6, counts.add / 1e6, *[counts.bytes / 1e6] * by_bytes]
            kind = row.kind if len(row.kind) <= _WIDEST else f"{row.kind[: _WIDEST - 1]}…"
            lines.append([row.name, kind, *map(short, [*numbers, self.energy.energy_pj(counts) / 1e9])])
        counted = (f"{n:,} {kind}" for kind, n in total.to_dict().items() if n)
        shares = (f"{part} {share:.1%}" for part, share in self.shares().items())
        foot = [
            f"in total: {', '.join(counted)}",
            *self._widths(),
            f"energy ({self.energy.name}): {', '.join(shares)}",
        ]
        if self.uncounted:
            foot.append(f"not counted: {', '.join(self.uncounted)}")
        return "\n".join([f"{self.model}, {self.accounting} accounting", *aligned(lines), *foot])

    def _widths(self) -> list[str]:
        """How products and sums divide by width, where they have several."""
        found = {width: part for width, part in self.total.widths.items() if part.mul or part.add}
        lines = []
        for kind in ("mul", "add") if len(found) > 1 else ():
            numbers = {width: getattr(part, kind) / 1e6 for width, part in found.items()}
            lines.append(
                f"{kind} (M): " + ", ".join(f"{width} {short(n)}" for width, n in numbers.items() if n)
            )
        return lines

    def _flat(self, row: Row) -> dict[str, Any]:
        own = {"name": row.name, "kind": row.kind, "part": row.part}
        return own | row.counts.to_dict() | {"energy_pj": self.energy.energy_pj(row.counts)}


def cost(
    model: nn.Module,
    input_size: Any,
    *,
    accounting: Accounting = "paper",
    energy: str | PathLike[str] | dict[str, Any] | EnergyTable = "fp32-45nm",
) -> Ledger:
    """What one forward pass of `model` costs, layer by layer.

    Nothing is computed: the model runs on meta tensors, its weights stay where they are.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        input_size: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.
        accounting: "paper" counts what the paper's tables count; "exact" counts everything that is computed,
            memory traffic included, each operator under the module that calls it.
        energy: a table's name, a JSON file, or picojoules by kind of operation.
    """
    if accounting not in ("paper", "exact"):
        raise ValueError(f'accounting must be "paper" or "exact", got {accounting!r}')
    table = energy_table(energy)
    if accounting == "paper":
        layers = layers_of(model, input_size)
        rows = tuple(
            Row(layer.name, layer.kind, layer.part, paper_counts(layer.operations))
            for layer in layers
            if layer.operations is not None
        )
        unknown = dict.fromkeys(layer.label for layer in layers if layer.operations is None)
        return Ledger(type(model).__name__, accounting, table, rows, tuple(unknown))
    try:
        found, uncounted = exact_rows(model, input_size)
    except NOT_TAKEN as error:
        raise not_taken(model, input_size, error) from error
    rows = tuple(Row(*row) for row in found)
    return Ledger(type(model).__name__, accounting, table, rows, tuple(uncounted))
