"""The paper's accounting beside what is executed, for PVTv2-B0.

    python benchmarks/accounting.py

writes results/accounting.json: counts and energy of softmax and hashed attention, by both accountings and on
the CPU kernels, line by line and with three prices of memory; and how the cells of the paper's tables come
out; and the energy of native, softmax and hashed models at three resolutions, at 45 nm and 7 nm. Nothing is
timed, and nothing depends on the machine.
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
from ecoformer.accounting.cpu_kernels import hashing_counts
from ecoformer.accounting.layers import PARTS
from ecoformer.operations import paper_counts
from ecoformer.report.tables import list_tables, paper_table

IMAGE = (1, 3, 224, 224)
TABLES = ("fp32-45nm", "fp32-45nm-sram", "fp32-45nm-dram")
NEWER = ("fp32-7nm", "fp32-7nm-sram", "fp32-7nm-hbm", "fp32-7nm-dram")
HOW: dict[str, dict[str, Any]] = {
    "paper": {},
    "exact": {"accounting": "exact"},
    "cpu": {"accounting": "exact", "backend": "cpu"},
}
HASHING, CODES = "hashing", "sums over keys and read"
KINDS = {
    "LayerNorm": "norms",
    "GELU": "FFN: GELU",
    "Block": "residual sums",
    "softmax": "softmax attention",
    "Attention": "softmax attention",
    "eco": CODES,
    "KernelHasher": HASHING,
}


def line_of(kind: str, part: str) -> str:
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
        line = line_of(row.kind, row.part)
        lines[line] = lines.get(line, Counts()) + row.counts
    return lines


def hashing_of(model: nn.Module, how: str) -> Counts:
    """The hash functions' part in hashed attention, which the ledger does not list on its own."""
    total = Counts()
    for stage, side in enumerate((56, 28, 14)):
        for block in (0, 1):
            layer: Any = model.get_submodule(f"stages.{stage}.blocks.{block}.attn.attention")
            if how == "paper":
                total += paper_counts(layer.hasher.operations(1, side**2))
            else:
                total += hashing_counts(layer.hasher, 1, side**2)
    return total


def figures_of(mechanism: str) -> dict[str, Any]:
    """All accountings of one mechanism."""
    import timm

    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention=mechanism)
    found: dict[str, Any] = {}
    lines: dict[str, dict[str, Counts]] = {}
    for name, how in HOW.items():
        ledger = ecoformer.cost(model, IMAGE, **how)
        energies = {table: energy_table(table).energy_pj(ledger.total) for table in TABLES}
        parts = {part: ledger.of(part).to_dict() for part in PARTS}
        found[name] = {"total": ledger.total.to_dict(), "parts": parts, "energy_pj": energies}
        lines[name] = lines_of(ledger)
        if CODES in lines[name] and HASHING not in lines[name]:
            hashing = hashing_of(model, name)
            lines[name] |= {HASHING: hashing, CODES: lines[name][CODES] + hashing * -1}
    names = list(dict.fromkeys([*lines["exact"], *lines["paper"]]))
    found["lines"] = [
        {"line": name} | {how: lines[how].get(name, Counts()).to_dict() for how in lines} for name in names
    ]
    return found


def by_resolution(*sides: int) -> list[dict[str, Any]]:
    """Energy of the model as timm ships it, with softmax, and with hashed attention.

    By the paper's accounting and as the CPU kernels execute it; of the latter also attention with its
    projections, and hashed attention without them: hashing, weights of keys, sums over keys and output.
    """
    import timm

    rows = []
    for side in sides:
        for mechanism in ("native", "softmax", "eco", "sharp_eco"):
            with torch.device("meta"):
                model = timm.create_model("pvt_v2_b0")
            if mechanism != "native":
                ecoformer.convert(model, mechanism, example=torch.empty(1, 3, side, side, device="meta"))
            ledger = ecoformer.cost(model, (1, 3, side, side), accounting="exact", backend="cpu")
            energy = ledger.energy.energy_pj
            own = [row for row in ledger.rows if row.kind == mechanism or ".key_weights" in row.name]
            hashed = sum((row.counts for row in own), Counts())
            rows.append(
                {
                    "resolution": side,
                    "mechanism": mechanism,
                    "paper": ecoformer.cost(model, (1, 3, side, side)).energy_pj,
                    "cpu": ledger.energy_pj,
                    "attention": energy(ledger.of("attention")),
                    "hashed": energy(hashed) if "eco" in mechanism else None,
                    "total": ledger.total.to_dict(),
                    "energy_pj": {
                        table: energy_table(table).energy_pj(ledger.total) for table in (*TABLES, *NEWER)
                    },
                }
            )
    return rows


def saving(figures: dict[str, Any], how: str, table: str) -> float:
    eco_pj, softmax_pj = (figures[m][how]["energy_pj"][table] for m in ("eco", "softmax"))
    return float(1 - eco_pj / softmax_pj)


def attention_saving(figures: dict[str, Any], how: str) -> float:
    parts = [Counts(**figures[m][how]["parts"]["attention"]) for m in ("eco", "softmax")]
    eco_pj, softmax_pj = (energy_table(TABLES[0]).energy_pj(part) for part in parts)
    return 1 - eco_pj / softmax_pj


def main() -> None:
    figures: dict[str, Any] = {mechanism: figures_of(mechanism) for mechanism in ("softmax", "eco")}
    savings = {how: {table: saving(figures, how, table) for table in TABLES} for how in HOW}
    of_attention = {how: attention_saving(figures, how) for how in HOW}
    statuses = Counter(cell.status for name in list_tables() for cell in paper_table(name).cells)
    for how, row in savings.items():
        print(how, {table: f"{value:.1%}" for table, value in row.items()})
    more = {"savings": savings, "savings_of_attention": of_attention, "tables": dict(statuses)}
    more["native"] = by_resolution(224, 512, 1024)
    print(f"wrote {write_result('accounting', figures | more)}")


if __name__ == "__main__":
    main()
