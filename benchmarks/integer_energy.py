"""Energy of PVTv2-B0 in fp32 and in int8: native, softmax, eco and sharp_eco.

    python benchmarks/integer_energy.py

writes results/integer_energy.json and docs/figures/integer_energy.svg: energy as kernels execute the model,
each operation at the price of its width, at 45 and 7 nm, operations alone and with memory, at three
resolutions. "int8" is what `ecoformer.quantize` makes. "int8 at best" is a bound: softmax attention
multiplies int8 numbers too, and every number that moves is int8. Nothing is timed, and nothing depends on
the machine.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from picture import COLOURS, ROOT
from record import write_result
from torch import nn

import ecoformer
from ecoformer.accounting import Counts, Ledger, energy_table
from ecoformer.accounting.ledger import by_width
from ecoformer.operations import mac

SIDES = (224, 512, 1024)
TABLES = {
    "45nm": "45 nm",
    "45nm-sram": "45 nm + SRAM",
    "45nm-dram": "45 nm + DRAM",
    "7nm": "7 nm",
    "7nm-sram": "7 nm + SRAM",
    "7nm-hbm": "7 nm + HBM",
}
SHOWN = ("45nm", "45nm-sram", "7nm", "7nm-hbm")
STYLES: dict[str, Any] = {"fp32": "-", "int8": "--", "int8 at best": ":"}


def built(mechanism: str) -> nn.Module:
    """PVTv2-B0 with random weights, which counting does not depend on."""
    import timm

    model: nn.Module = timm.create_model("pvt_v2_b0").eval()
    if mechanism != "native":
        ecoformer.convert(model, mechanism)
    return model


def quantized(model: nn.Module) -> nn.Module:
    """The model in int8, every layer that can be; counting does not depend on scales either."""
    ecoformer.quantize(model, [torch.randn(1, 3, 64, 64)], max_error=math.inf, progress=False)
    return model


def counted(model: nn.Module, side: int) -> Ledger:
    ledger = ecoformer.cost(model, (1, 3, side, side), accounting="exact", backend="cpu", energy="45nm")
    if ledger.uncounted or ledger.refused:
        raise ValueError(f"not counted: {ledger.uncounted}, {ledger.refused}")
    return ledger


def at_best(ledger: Ledger, moved: int) -> Counts:
    """A quantised model whose softmax attention multiplies int8 numbers too, and which moves this many bytes.

    Softmax attention has an exponential for every pair of tokens, one product to scale it and one to divide.
    """
    softmax = (row.counts for row in ledger.rows if row.kind in ("softmax", "Attention"))
    products = sum(counts.mul - 2 * counts.exp for counts in softmax)
    narrow = Counts(mul=products).of("int8") + Counts(add=products).of("int32")
    return replace(ledger.total + mac(-products) + narrow, bytes=moved)


def row_of(side: int, mechanism: str, numbers: str, counts: Counts) -> dict[str, Any]:
    energies = {table: energy_table(table).energy_pj(counts) for table in TABLES}
    about = {"resolution": side, "mechanism": mechanism, "numbers": numbers}
    return about | {"total": counts.to_dict(), "widths": by_width(counts), "energy_pj": energies}


def rows_of(mechanism: str) -> list[dict[str, Any]]:
    """One mechanism at all resolutions, in fp32, in int8 and at best."""
    model = built(mechanism)
    wide = {side: counted(model, side).total for side in SIDES}
    model, rows = quantized(model), []
    for side, counts in wide.items():
        ledger = counted(model, side)
        found = {"fp32": counts, "int8": ledger.total, "int8 at best": at_best(ledger, counts.bytes // 4)}
        rows += [row_of(side, mechanism, numbers, each) for numbers, each in found.items()]
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Energy over resolution: a panel for each table, a line for each mechanism and width."""
    with rc_context({"svg.hashsalt": "ecoformer", "font.size": 10}):
        figure = Figure(figsize=(9.6, 7.2), layout="constrained")
        for axes, table in zip(figure.subplots(2, 2).flat, SHOWN, strict=True):
            for mechanism, colour in COLOURS.items():
                for numbers, style in STYLES.items():
                    own = [r for r in rows if (r["mechanism"], r["numbers"]) == (mechanism, numbers)]
                    energies = [row["energy_pj"][table] / 1e9 for row in own]
                    axes.plot(SIDES, energies, style, marker="o", markersize=3, color=colour)
            axes.set(xscale="log", yscale="log", title=f"{TABLES[table]}, mJ", xlabel="pixels a side")
            axes.set_xticks(SIDES, list(map(str, SIDES)))
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        lines = [Line2D([], [], color=colour, label=name) for name, colour in COLOURS.items()]
        lines += [
            Line2D([], [], color="black", linestyle=style, label=name) for name, style in STYLES.items()
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
        path = ROOT / "docs" / "figures" / "integer_energy.svg"
        figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*hash functions.*")
    found = [row for mechanism in COLOURS for row in rows_of(mechanism)]
    rows = sorted(found, key=lambda row: (row["resolution"], list(STYLES).index(row["numbers"])))
    for row in rows:
        energies = (f"{energy / 1e9:8.3f}" for energy in row["energy_pj"].values())
        print(f"{row['resolution']:>5} {row['numbers']:<12} {row['mechanism']:<9}", *energies)
    draw(rows)
    print(f"wrote {write_result('integer_energy', rows)}")


if __name__ == "__main__":
    main()
