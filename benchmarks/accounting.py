"""The paper's accounting beside what is executed, for PVTv2-B0 at 224 x 224.

    python benchmarks/accounting.py

writes results/accounting.json: counts and energy of softmax and hashed attention, by both accountings, line
by line and with three prices of memory; and how the cells of the paper's tables come out. Nothing is timed,
and nothing depends on the machine.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from record import write_result
from torch import nn

import ecoformer
import ecoformer.models
from ecoformer.accounting import Counts, Ledger, energy_table
from ecoformer.accounting.mechanisms import eco
from ecoformer.accounting.mechanisms.parts import Heads, unit_length
from ecoformer.report.tables import list_tables, paper_table

IMAGE = (1, 3, 224, 224)
TABLES = ("fp32-45nm", "fp32-45nm-sram", "fp32-45nm-dram")
HASHED = "hashed attention"
KINDS = {
    "LayerNorm": "norms",
    "GELU": "FFN: GELU",
    "Block": "residual sums",
    "softmax": "softmax attention",
    "Attention": "softmax attention",
    "eco": HASHED,
    "KernelHasher": HASHED,
}


def line_of(name: str, kind: str, part: str) -> str:
    """The line of the page that a layer belongs to."""
    if kind in KINDS:
        return KINDS[kind]
    if part == "attention":
        return "projections"
    if part == "ffn":
        return "FFN: depth-wise convolution" if kind == "Conv2d" else "FFN: linear layers"
    return {"Conv2d": "patch embeddings", "Linear": "head"}.get(kind, "copies, mean over tokens")


def lines_of(ledger: Ledger) -> dict[str, Counts]:
    """A ledger's layers, summed by line."""
    lines: dict[str, Counts] = {}
    for row in ledger.rows:
        line = line_of(row.name, row.kind, row.part)
        lines[line] = lines.get(line, Counts()) + row.counts
    return lines


def hashed_lines(model: nn.Module, tokens: dict[str, int]) -> dict[str, tuple[Counts, Counts]]:
    """Steps of hashed attention, by the paper's accounting and by the formulas of what is executed."""
    lines: dict[str, tuple[Counts, Counts]] = {}
    for name, n in tokens.items():
        layer: Any = model.get_submodule(name)
        h, b, m, c = Heads.of(layer, 1, n), layer.hasher.bits, layer.hasher.support, layer.head_dim
        unit, mix = unit_length(h.rows, c), eco.shared_product(h, h.rows, m, b)
        kernel = eco.kernel(h, b, m, layer.hasher.sigma_from == "input") + (unit + mix) * -1
        steps = {
            "hashing: unit length": (Counts(), unit),
            "hashing: kernel": (Counts(mul=2 * m, add=2 * m * c), kernel),
            "hashing: hash functions, signs": (Counts(m * b, m * b), mix + eco.signs(h.rows * b)),
            "sums over keys": (Counts(add=b * c + b + c), eco.sums(h, b)),
            "read": (Counts(mul=b + 1 + c, add=b * c + b), eco.read(h, b, own_value=False)),
        }
        for step, (paper, exact) in steps.items():
            before = lines.get(step, (Counts(), Counts()))
            lines[step] = (before[0] + paper * h.rows, before[1] + exact)
    return lines


def with_steps(lines: dict[str, Counts], steps: dict[str, Counts], copies: bool) -> dict[str, Counts]:
    """The line of hashed attention replaced by its steps; only copies may be left over."""
    rest = lines.pop(HASHED) + sum(steps.values(), Counts()) * -1
    if (copies and rest != Counts(bytes=rest.bytes)) or (not copies and rest != Counts()):
        raise RuntimeError(f"steps do not add up to hashed attention: {rest} is left over")
    return lines | steps | ({"heads joined": rest} if copies else {})


def figures_of(mechanism: str) -> dict[str, Any]:
    """Both accountings of one mechanism."""
    import timm

    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention=mechanism)
    found: dict[str, Any] = {}
    lines: dict[str, dict[str, Counts]] = {}
    for accounting in ("paper", "exact"):
        ledger = ecoformer.cost(model, IMAGE, accounting=accounting)
        energies = {name: energy_table(name).energy_pj(ledger.total) for name in TABLES}
        parts = {part: ledger.of(part).to_dict() for part in ("attention", "ffn", "other")}
        found[accounting] = {"total": ledger.total.to_dict(), "parts": parts, "energy_pj": energies}
        lines[accounting] = lines_of(ledger)
    if mechanism == "eco":
        sizes = (56, 28, 14)
        tokens = {f"stages.{s}.blocks.{i}.attn.attention": n * n for s, n in enumerate(sizes) for i in (0, 1)}
        steps = hashed_lines(model, tokens)
        for i, accounting in enumerate(lines):
            chosen = {step: both[i] for step, both in steps.items()}
            lines[accounting] = with_steps(lines[accounting], chosen, copies=accounting == "exact")
    names = list(dict.fromkeys([*lines["exact"], *lines["paper"]]))
    found["lines"] = [
        {"line": name} | {a: lines[a].get(name, Counts()).to_dict() for a in lines} for name in names
    ]
    return found


def saving(figures: dict[str, Any], accounting: str, name: str) -> float:
    eco_pj, softmax_pj = (figures[m][accounting]["energy_pj"][name] for m in ("eco", "softmax"))
    return float(1 - eco_pj / softmax_pj)


def attention_saving(figures: dict[str, Any], accounting: str) -> float:
    parts = [Counts(**figures[m][accounting]["parts"]["attention"]) for m in ("eco", "softmax")]
    eco_pj, softmax_pj = (energy_table(TABLES[0]).energy_pj(part) for part in parts)
    return 1 - eco_pj / softmax_pj


def main() -> None:
    figures: dict[str, Any] = {mechanism: figures_of(mechanism) for mechanism in ("softmax", "eco")}
    accountings = ("paper", "exact")
    savings = {a: {name: saving(figures, a, name) for name in TABLES} for a in accountings}
    of_attention = {a: attention_saving(figures, a) for a in accountings}
    statuses = Counter(cell.status for name in list_tables() for cell in paper_table(name).cells)
    for accounting, row in savings.items():
        print(accounting, {name: f"{value:.1%}" for name, value in row.items()})
    more = {"savings": savings, "savings_of_attention": of_attention, "tables": dict(statuses)}
    print(f"wrote {write_result('accounting', figures | more)}")


if __name__ == "__main__":
    main()
