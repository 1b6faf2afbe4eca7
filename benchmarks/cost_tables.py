"""The tables of docs/cost.md and docs/bitfusion.md; `result_tables.py` fills them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from record import Table, figures_of

from ecoformer.accounting import energy_table
from ecoformer.report.tables import STATUSES

KINDS = {"paper": ("mul", "add"), "exact": ("mul", "add", "exp", "bytes"), "cpu": ("mul", "add", "lookup")}
HOW = tuple(KINDS)
LINES = (
    "patch embeddings",
    "projections",
    "hashing",
    "sums over keys and read",
    "softmax attention",
    "FFN: linear layers",
    "FFN: depth-wise convolution",
    "FFN: GELU",
    "norms",
    "residual sums",
    "head",
    "copies, mean over tokens",
)


def cost_totals() -> Table:
    """Counts and energy of PVTv2-B0 by every accounting."""
    figures, rows = figures_of("accounting"), []
    for mechanism, how in (("softmax", "paper"), ("softmax", "exact"), *(("eco", how) for how in HOW)):
        found = figures[mechanism][how]
        counts = _millions(*(found["total"][kind] for kind in ("mul", "add", "lookup", "exp", "bytes")))
        energies = [f"{energy / 1e9:.2f}" for energy in found["energy_pj"].values()]
        rows.append([mechanism, how, *counts, *energies])
    head = ["attention", "accounting", "mul", "add", "lookup", "exp", "bytes"]
    return [[*head, "energy", "+ SRAM", "+ DRAM"], *rows]


def cost_savings() -> Table:
    """What hashed attention saves of softmax's energy."""
    figures = figures_of("accounting")
    shares = {how: (figures["savings_of_attention"][how], *figures["savings"][how].values()) for how in HOW}
    rows = [[how, *(f"{share:.1%}" for share in found)] for how, found in shares.items()]
    return [["accounting", "attention alone", "model", "+ SRAM", "+ DRAM"], *rows]


def cost_lines() -> Table:
    """Hashed attention line by line."""
    figures = figures_of("accounting")["eco"]
    lines = {line["line"]: line for line in figures["lines"]}
    if set(lines) != set(LINES):
        raise ValueError(f"results/accounting.json has other lines than the table: {set(lines) ^ set(LINES)}")
    lines["total"] = {how: figures[how]["total"] for how in HOW}
    rows = [
        [name, *_millions(*(lines[name][how][kind] for how in HOW for kind in KINDS[how]))]
        for name in (*LINES, "total")
    ]
    head = ["line", *(f"{how} {kind}" if kind == "mul" else kind for how in HOW for kind in KINDS[how])]
    return [head, *rows]


def cost_native() -> Table:
    """The model as timm ships it beside softmax and hashed attention."""
    found: dict[int, dict[str, Any]] = {}
    for row in figures_of("accounting")["native"]:
        found.setdefault(row["resolution"], {})[row["mechanism"]] = row
    rows = []
    for side, models in found.items():
        native = models["native"]["cpu"]
        for name, row in models.items():
            hashed = "" if row["hashed"] is None else f"{row['hashed'] / 1e9:.3f}"
            times = f"{row['cpu'] / native:.2f}"
            energies = [f"{row[part] / 1e9:.2f}" for part in ("paper", "cpu", "attention")]
            rows.append([str(side), name, *energies, hashed, times])
    head = ["resolution", "attention", "paper", "executed", "attention layers"]
    return [[*head, "hashing, key weights, sums, read", "times native"], *rows]


def cost_processes() -> Table:
    """Energy at 45 nm and 7 nm, operations alone and with each memory; in brackets, times native."""
    return _energies(figures_of("accounting")["native"], ["resolution"])


def cost_integers() -> Table:
    """The same in fp32 and int8; in brackets, times native in the same numbers."""
    return _energies(figures_of("integer_energy"), ["resolution", "numbers"])


def cost_widths() -> Table:
    """Where the energy of an int8 model goes, by width, at 224 pixels."""
    prices = energy_table("45nm").widths
    rows: Table = []
    for row in figures_of("integer_energy"):
        if (row["resolution"], row["numbers"]) != (224, "int8"):
            continue
        for width, counts in row["widths"].items():
            pj = sum(prices[width].get(kind, 0.0) * number for kind, number in counts.items())
            numbers = _millions(counts.get("mul", 0), counts.get("add", 0))
            if any(numbers):
                rows.append([row["mechanism"], width, *numbers, f"{pj / row['energy_pj']['45nm']:.0%}"])
    return [["attention", "width", "mul", "add", "share of energy"], *rows]


def cost_cells() -> Table:
    """How the cells of the paper's tables come out."""
    counts = figures_of("accounting")["tables"]
    rows = [[name, str(counts.get(name, 0)), meaning] for name, meaning in STATUSES.items()]
    return [["status", "cells", "meaning"], *rows]


def bitfusion_table() -> Table:
    """The paper's hardware table."""
    rows = []
    for row in figures_of("bitfusion")["table"]:
        difference = f"{row['energy_nj'] / row['printed_energy'] - 1:+.1%}".replace("-0.0%", "+0.0%")
        latencies = (f"{row[key]:.4f}" for key in ("latency_ms", "printed_latency_ms"))
        energies = (f"{row[key]:,.2f}" for key in ("energy_nj", "printed_energy"))
        how = "the paper's" if row["reading"] == "printed" else "ours"
        rows.append([row["method"], *latencies, *energies, difference, how])
    return [["method", "ms", "printed", "nJ", "printed", "difference", "decomposition"], *rows]


def bitfusion_layer() -> Table:
    """The layer with all of its queries."""
    rows = []
    for name, row in figures_of("bitfusion")["layer"].items():
        shares = (f"{row[key]:.0%}" for key in ("stalls", "dram", "buffers", "array"))
        rows.append([name, f"{row['cycles']:,}", f"{row['ms']:.2f}", f"{row['mj']:.2f}", *shares])
    head = ["layer", "cycles", "ms", "mJ", "stalls"]
    return [[*head, "energy in DRAM", "in buffers", "in the array"], *rows]


def bitfusion_models() -> Table:
    """PVTv2-B0 with each mechanism."""
    rows = []
    for name, row in figures_of("bitfusion")["models"].items():
        numbers = (f"{row['macs'] / 1e6:,.1f}", f"{row['ms']:.2f}", f"{row['mj']:.2f}")
        rows.append([name, *numbers, f"{row['attention']:.0%}"])
    return [["attention", "10⁶ products", "ms", "mJ", "share of attention"], *rows]


def bitfusion_codes() -> Table:
    """Products with codes, and the model with hashed attention, by the bits that move a code's bit."""
    figures, rows = figures_of("bitfusion"), []
    for name, found in figures["codes"].items():
        cells = (f"{found[bits]['cycles']:,} | {found[bits]['uj'] / 1e3:.4g}" for bits in ("1", "2", "8"))
        rows.append([name, *cells])
    whole = (figures["eco_by_code_bits"][bits] for bits in ("1", "2", "8"))
    rows.append(["PVTv2-B0", *(f"{row['cycles']:,} | {row['mj']:.4g}" for row in whole)])
    return [["product", "1 bit: cycles", "mJ", "2 bits: cycles", "mJ", "8 bits: cycles", "mJ"], *rows]


def _energies(rows: list[dict[str, Any]], keys: list[str]) -> Table:
    table: Table = []
    native: dict[str, float] = {}
    for row in rows:
        energies = row["energy_pj"]
        native = energies if row["mechanism"] == "native" else native
        cells = (f"{_mj(energy)} ({energy / native[name]:.2f})" for name, energy in energies.items())
        table.append([*(str(row[key]) for key in (*keys, "mechanism")), *cells])
    heads = ["45 nm", "+ SRAM", "+ DRAM", "7 nm", "+ SRAM", "+ HBM", "+ DRAM"]
    return [[*keys, "attention", *heads[: len(native)]], *table]


def _mj(pj: float) -> str:
    return f"{pj / 1e9:,.2f}" if pj < 1e11 else f"{pj / 1e9:,.0f}"


def _millions(*numbers: int) -> list[str]:
    return [f"{x / 1e6:,.1f}" if x else "" for x in numbers]


MAKERS: dict[str, Callable[[], Table]] = {
    "cost_totals": cost_totals,
    "cost_savings": cost_savings,
    "cost_lines": cost_lines,
    "cost_native": cost_native,
    "cost_processes": cost_processes,
    "cost_integers": cost_integers,
    "cost_widths": cost_widths,
    "cost_cells": cost_cells,
    "bitfusion_table": bitfusion_table,
    "bitfusion_layer": bitfusion_layer,
    "bitfusion_models": bitfusion_models,
    "bitfusion_codes": bitfusion_codes,
}
