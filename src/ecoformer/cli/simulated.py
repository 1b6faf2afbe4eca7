"""What `ecoformer simulate` prints and draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from torch import nn

from ecoformer.bitfusion import Total
from ecoformer.cli.console import plain_console
from ecoformer.cli.sources import open_model
from ecoformer.conversion import convert
from ecoformer.report.rows import printed_rows
from ecoformer.report.style import check_target, readable, save

_PARTS = ("attention", "ffn", "other")


@dataclass(frozen=True)
class Run:
    """One simulation: what tells it from the others, its total, and everything about it."""

    about: dict[str, Any]
    total: Total
    facts: dict[str, Any]

    @property
    def label(self) -> str:
        """A name in a table or a picture."""
        counted = ("tokens", "rows", "inputs", "outputs")
        words = []
        for name, value in self.about.items():
            number = f"{value:,} {name}" if name in counted else f"{name} {value}"
            words.append(readable(value) if isinstance(value, str) else number)
        return ", ".join(words)


def swept(text: str | None, sizes: dict[str, int]) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """`tokens=196,784` as what changes, and all sizes with it; the sizes alone where nothing is swept."""
    if text is None:
        return [({}, sizes)]
    name, equals, values = (part.strip() for part in text.partition("="))
    numbers = [value.strip() for value in values.split(",")]
    if name not in sizes or not equals or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
        known = " or ".join(f"{size}=1,2,4" for size in sizes)
        raise ValueError(f"--sweep takes {known}, whole numbers from 1, got {text!r}")
    return [({name: int(n)}, sizes | {name: int(n)}) for n in numbers]


def built_model(
    name: str, attention: str | None, batch: int, resolution: int | None = None, tokens: int | None = None
) -> tuple[nn.Module, Any]:
    """The model, converted where a mechanism is named, and an input for it."""
    example = torch.zeros(batch, tokens or 1, dtype=torch.long, device="meta")
    if resolution is not None:
        example = torch.zeros(batch, 3, resolution, resolution, device="meta")
    # A name has no weights worth having; files and folders have.
    with nullcontext() if Path(name).exists() else torch.device("meta"):
        model = open_model(name, image_size=resolution).model
    if attention is not None:
        convert(model, attention, example=example)
    return model, example


def target(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """A picture's file, checked before anything is computed."""
    try:
        return None if path is None else check_target(path)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{option.opts[0]}: {error}") from error


def draw(runs: Sequence[Run], figure: Path | None, divide_by: int = 1) -> None:
    """The stacked bars, where they were asked for."""
    if figure is None:
        return
    from ecoformer.report.figures import bitfusion_figure

    bars = {run.label or "Operation": run.total for run in runs}
    save(bitfusion_figure(bars, divide_by=divide_by), figure)
    typer.echo(f"wrote {figure}", err=True)


def show(runs: Sequence[Run], as_json: bool, *, many: bool) -> None:
    """One result in full, or several as a table; in JSON mechanisms by name, sweeps as a list."""
    if as_json:
        facts: Any = [run.about | run.facts for run in runs]
        if not many:
            facts = facts[0]
        elif list(runs[0].about) == ["attention"]:
            facts = {run.about["attention"]: run.facts for run in runs}
        typer.echo(json.dumps(facts, indent=2))
    elif many:
        _side_by_side(runs)
    else:
        _one(runs[0].facts)


def _one(facts: dict[str, Any]) -> None:
    stalls = facts["stall_cycles"]
    typer.echo(f"{facts['cycles']:,} cycles ({stalls:,} of them stalls), {facts['latency_s'] * 1e3:.4g} ms")
    typer.echo(f"{facts['energy_nj']:,.2f} nJ")
    for part, energy in facts["energy_parts_nj"].items():
        typer.echo(f"  {part:<18} {energy:>16,.2f}")


def _side_by_side(runs: Sequence[Run]) -> None:
    columns = list(runs[0].about)
    table = Table(*columns)
    for head in ("cycles", "of them stalls", "ms", "energy (mJ)", "of it DRAM"):
        table.add_column(head, justify="right")
    for run in runs:
        total = run.total
        about = [value if isinstance(value, str) else f"{value:,}" for value in run.about.values()]
        time = (
            f"{total.cycles:,}",
            f"{total.stall_cycles / total.cycles:.0%}",
            f"{total.latency_s * 1e3:.4g}",
        )
        energy = (f"{total.energy_nj / 1e6:.4g}", f"{total.energy.dram / total.energy_nj:.0%}")
        table.add_row(*about, *time, *energy)
    plain_console().print(table)
    _left_out(runs)


def _left_out(runs: Sequence[Run]) -> None:
    """What is in none of a model's figures, so that they are not taken for the whole."""
    if "not_simulated" not in runs[0].facts:
        return
    typer.echo(f"in no figure: {runs[0].facts['not_simulated']}")
    for label, layers in {run.label: run.facts["uncounted"] for run in runs}.items():
        if layers:
            typer.echo(f"not counted ({label}): {', '.join(layers)}")


def show_model(run: Run) -> None:
    """One model: the whole, its parts, and what is left out."""
    _one(run.facts)
    whole = run.total
    for part in _PARTS:
        cycles, energy = run.facts["parts"][part]["cycles"], run.facts["parts"][part]["energy_nj"]
        shares = f"{cycles / whole.cycles:>4.0%} of the time, {energy / whole.energy_nj:>4.0%} of the energy"
        typer.echo(f"{part:<10} {shares}")
    _left_out([run])


def show_table(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """The paper's table, ours beside the printed figures."""
    printed = {row["method"]: row for row in printed_rows("bitfusion")}
    if as_json:
        joined = [
            row | {f"printed_{key}": float(printed[row["method"]][key]) for key in ("latency_ms", "energy")}
            for row in rows
        ]
        typer.echo(json.dumps(joined, indent=2))
        return
    table = Table("method")
    for head in ("ms", "printed", "energy (nJ)", "printed", "difference"):
        table.add_column(head, justify="right")
    table.add_column("decomposition")
    for row in rows:
        theirs = printed[row["method"]]
        difference = row["energy_nj"] / float(theirs["energy"]) - 1
        numbers = (f"{row['latency_ms']:.4f}", theirs["latency_ms"], f"{row['energy_nj']:,.2f}")
        how = "the paper's" if row["reading"] == "printed" else "ours"
        table.add_row(
            row["method"],
            *numbers,
            f"{float(theirs['energy']):,.2f}",
            f"{difference:+.1%}".replace("-0.0%", "+0.0%"),
            how,
        )
    plain_console().print(table)
    typer.echo("The printed unit is pJ; the figures are nJ, of 16 query rows. docs/bitfusion.md says more.")
