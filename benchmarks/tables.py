"""Fill the tables of README.md and of pages under docs/ from the files under results/, and draw their figure.

    python benchmarks/tables.py

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is a key of TABLES.
The figure is docs/figures/energy_and_time.svg.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from record import figures_of

from ecoformer.report.tables import STATUSES, printed_rows

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MECHANISMS = ("native", "softmax", "eco", "sharp_eco")
COLOURS = ("#555555", "#d55e00", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#0072b2")
SHAPE = "batch, heads, tokens, channels"
CONTESTANTS = {
    ("explicit", "N x N matrix"): "softmax, N × N matrix",
    ("softmax", "sdpa"): "softmax, SDPA",
    ("performer", "eager"): "performer",
    ("eco", "eager"): "eco, eager",
    ("eco", "triton"): "eco, Triton",
}
Row = dict[str, Any]
Table = list[list[str]]


def filled(page: str) -> str:
    """A page with all its tables as the result files have them."""

    def table(found: re.Match[str]) -> str:
        head, *rows = TABLES[found[2]]()
        lines = [" ".join(f"| {' | '.join(cells)} |".split()) for cells in (head, *rows)]
        lines.insert(1, "|" + "---|" * len(head))
        return "\n".join([found[1], *lines, found[3]])

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end of table -->)", table, page, flags=re.DOTALL)


# README and choosing


def gains() -> Table:
    """What sharp_eco takes of the model as it is; worth it below 0.85 of the energy, and faster."""
    speeds = [_fastest(size["rows"]) for size in figures_of("gpu_models_sharp").values()]
    table = [["your model", "its input", "energy", "time, CPU", "time, H200", "for you?"]]
    for row in figures_of("gains"):
        energy, seconds = (row[key]["sharp_eco"] / row[key]["native"] for key in ("energy_pj", "cpu_seconds"))
        gpu = speeds.pop(0) if row["model"] == "PVTv2-B0" else None
        cells = [row["model"], f"{row['size']:,} {row['unit']}", f"{energy:.2f}", f"{seconds:.2f}"]
        cells.append(f"{gpu['native'] / gpu['sharp_eco']:.2f}" if gpu else "")
        table.append([*cells, "yes" if energy < 0.85 and seconds < 1 else "no"])
    return table


def accuracies() -> Table:
    """Accuracy after equal training; the mean over seeds, and how many. Texts have softmax as native."""
    images, reviews, lists = (_accuracies(name) for name in ("cifar100_sharp", "imdb_sharp", "listops_sharp"))
    lists["eco"] = _accuracies("listops")["eco"]
    recalled: dict[str, list[float]] = {}
    for run in figures_of("recall_sharp")["runs"]:
        for row in run["rows"] if run["pairs"] == 128 and not run["soft_start"] else ():
            recalled.setdefault(row["mechanism"], []).append(row["accuracy"])
    for found in (reviews, lists, recalled):
        found["native"] = found["softmax"]
    named = {"CIFAR-100, PVTv2-B0, 128 pixels": images, "IMDb, 4,096 bytes": reviews, "ListOps": lists}
    named["recall among 128 pairs, 16 bits"] = recalled
    rows = [[name, *(_of_seeds(found[m]) for m in MECHANISMS)] for name, found in named.items()]
    long_codes = _of_seeds(recalled["sharp_eco:bits=48,groups=8"])
    return [["accuracy", *MECHANISMS], *rows, ["the same, 48 bits", "", "", "", long_codes]]


def sharp_cifar100() -> Table:
    """CIFAR-100 by sharp_eco and what it is compared with."""
    rows = {row["label"]: row for row in _rows("cifar100_sharp")}
    head = ["CIFAR-100, 30 epochs", "accuracy, seed by seed", "mean", "energy, paper's accounting"]
    table = [head]
    for label, found in _accuracies("cifar100_sharp").items():
        seeds = ", ".join(map(_percent, found))
        table.append([label, seeds, _percent(mean(found)), _energy(rows[label])])
    return table


def sharp_recall() -> Table:
    """Recall by sharp_eco, softmax and eco."""
    found: dict[tuple[int, str], list[str]] = {}
    for run in figures_of("recall_sharp")["runs"]:
        for row in run["rows"] if not run["soft_start"] else ():
            found.setdefault((run["pairs"], _name(row["mechanism"])), []).append(_percent(row["accuracy"]))
    rows = [[str(pairs), label, ", ".join(seeds)] for (pairs, label), seeds in sorted(found.items())]
    return [["pairs", "attention", "accuracy, seed by seed"], *rows]


def by_seed(name: str, title: str) -> Table:
    """Each mechanism's accuracies on all seeds."""
    rows = [[label, ", ".join(map(_percent, found))] for label, found in _accuracies(name).items()]
    return [[title, "accuracy, seed by seed"], *rows]


def taught(name: str, title: str, before: str) -> Table:
    """A model as it was, and what it became with the same number of epochs and the same teacher."""
    figures = figures_of(name)
    named = [(before, figures["start"]), *((f"{row['label']}, taught", row) for row in figures["rows"])]
    rows = [[label, _percent(row["accuracy"]), _energy(row)] for label, row in named]
    return [[title, "accuracy", "energy, paper's accounting"], *rows]


def gpu_models() -> Table:
    """Images a second of PVTv2-B0 on the GPU, by the fastest backend of each mechanism, next to native."""
    sizes = {name: _fastest(size["rows"]) for name, size in figures_of("gpu_models_sharp").items()}
    rows = [
        [name, *(f"{found[name]:,.0f} ({found[name] / found['native']:.2f})" for found in sizes.values())]
        for name in MECHANISMS
    ]
    return [["images a second", *(size.replace(",", " pixels,") for size in sizes)], *rows]


def encoder(name: str) -> Table:
    """A sentence encoder after conversion, transfer and distillation; means over seeds."""
    names = ("spearman", "same nearest", "same ten nearest", "cosine to the original")
    rows = [
        [variant, stage, *(f"{mean(run[name] for run in runs):.3f}" for name in names), str(len(runs))]
        for variant, figures in figures_of(name)["variants"].items()
        for stage, runs in figures["stages"].items()
    ]
    head = ["mechanism", "stage", "Spearman", "same nearest", "same ten nearest", "cosine", "seeds"]
    return [head, ["native", "as it is", *["1.000"] * 4, ""], *rows]


# Results


def cifar100() -> Table:
    """From scratch: both seeds, and the paper's figures."""
    first = {row["label"]: row for row in (*_rows("cifar100"), *_rows("cifar100_others"))}
    second = {row["label"]: row for row in _rows("cifar100_second")}
    tables = ("cifar100_binarization", "cifar100_hash_functions", "cifar100_attentions")
    paper = {name: row for table in tables for name, row in _printed(table).items()}
    softmax = first["softmax"]["accuracy"] + second["softmax"]["accuracy"]
    head = ["mechanism", "accuracy", "second seed", "both seeds − softmax", "energy"]
    table = [[*head, "accuracy, paper", "energy, paper (224 pixels)"]]
    for row in _best_first(first.values()):
        again, printed = second.get(row["label"]), paper.get(row["label"])
        difference = (row["accuracy"] + again["accuracy"] - softmax) / 2 if again else 0.0
        cells = [_name(row["label"]), _percent(row["accuracy"])]
        cells += [_percent(again["accuracy"]), f"{100 * difference:+.2f}"] if again else ["", ""]
        cells.append(_energy(row))
        if printed:
            cells += [f"{float(printed['top1']):.2f} %", f"{float(printed['energy_bpj']):.2f} mJ"]
        table.append([*cells, *[""] * (len(table[0]) - len(cells))])
    return table


def cifar100_finetuned() -> Table:
    """The paper's path at 128 pixels."""
    rows = _best_first(_rows("cifar100_finetuned"))
    softmax = next(row["accuracy"] for row in rows if row["label"] == "softmax, 10 more epochs")
    cells = [[r["label"], _percent(r["accuracy"]), f"{100 * (r['accuracy'] - softmax):+.2f}"] for r in rows]
    return [["", "accuracy", "− softmax"], *cells]


def cifar100_codes() -> Table:
    """Fewer bits or support samples."""
    runs = {("16", "25"): next(row for row in _rows("cifar100_finetuned") if row["label"] == "eco")}
    for row in _rows("cifar100_codes"):
        options = _options(row["label"])
        if options.get("bits") != "32":  # trained with wrong gradients
            runs[options.get("bits", "16"), options.get("support", "25")] = row
    rows = sorted(runs.items(), key=lambda item: -item[1]["accuracy"])
    cells = [[*key, _percent(row["accuracy"]), _energy(row)] for key, row in rows]
    return [["bits", "support samples", "accuracy", "energy"], *cells]


def cifar100_224() -> Table:
    """The paper's path at 224 pixels."""
    figures = figures_of("cifar100_224")
    rows = {row["label"]: row for row in figures["rows"]}
    unfinished = figures["unfinished"]["eco, teacher.weight=0"]["4"]
    softmax, eco = (_energy(rows[name]) for name in ("softmax", "eco"))
    saved = f"{eco} (-{1 - rows['eco']['energy_pj'] / rows['softmax']['energy_pj']:.0%})"
    return [
        ["224 pixels", "accuracy", "energy of a picture"],
        ["softmax, before", _percent(figures["start"]["accuracy"]), softmax],
        ["softmax, 5 epochs, taught", _percent(rows["softmax"]["accuracy"]), softmax],
        ["eco, 5 epochs, taught", _percent(rows["eco"]["accuracy"]), saved],
        ["eco, not taught, cut short after 4 epochs", _percent(unfinished), eco],
    ]


def imdb() -> Table:
    """Long Range Arena, text, beside the paper's figures."""
    paper = _printed("long_range_arena")
    head = ["mechanism", "accuracy at the end", "at its best", "energy"]
    table = [[*head, "accuracy, paper", "energy, paper"]]
    for row in _best_first(_rows("imdb")):
        printed = paper.get(row["label"])
        cells = [_name(row["label"]), _percent(row["accuracy"]), _percent(row["best_accuracy"]), _energy(row)]
        cells += [f"{printed['text_4k']} %", f"{printed['energy_bpj']} mJ"] if printed else ["", ""]
        table.append(cells)
    return table


def listops() -> Table:
    """Long Range Arena, ListOps."""
    rows = _best_first(_rows("listops"))
    cells = [[_name(row["label"]), _percent(row["accuracy"], 1), _energy(row)] for row in rows]
    return [["mechanism", "accuracy", "energy of a list"], *cells]


def recall() -> Table:
    """Accuracy by the number of pairs, and of who answers with a list's most frequent value."""
    found: dict[str, dict[int, float]] = {}
    for row in _rows("recall"):
        found.setdefault(row["label"], {})[int(row["point"]["data.options.pairs"])] = row["accuracy"]
    pairs = sorted({count for accuracies in found.values() for count in accuracies})
    table = [["pairs", *map(str, pairs)]]
    for label, accuracies in sorted(found.items(), key=lambda item: -item[1][max(pairs)]):
        name, options = label.partition(":")[0], _options(label)
        if name == "eco":
            name += f", {options.get('bits', 16)} bits, {options.get('support', 25)} support samples"
        table.append([name, *(_percent(accuracies[n], 1) if n in accuracies else "not run" for n in pairs)])
    guesses = [_percent(_most_frequent(count), 0) for count in pairs]
    return [*table, ["the list's most frequent value", *guesses]]


# Cost


def cost_cells() -> Table:
    """How the cells of the paper's tables come out."""
    counts = figures_of("accounting")["tables"]
    rows = [[name, str(counts.get(name, 0)), meaning] for name, meaning in STATUSES.items()]
    return [["status", "cells", "meaning"], *rows]


def cost_savings() -> Table:
    """What hashed attention saves of softmax's energy."""
    figures = figures_of("accounting")
    attention = figures["savings_of_attention"]
    rows = [
        [how, f"{attention[how]:.1%}", *(f"{share:.1%}" for share in shares.values())]
        for how, shares in figures["savings"].items()
    ]
    return [["accounting", "attention alone", "model", "+ SRAM", "+ DRAM"], *rows]


def cost_native() -> Table:
    """The model as timm ships it beside softmax and hashed attention."""
    head = ["resolution", "attention", "paper", "executed", "attention layers"]
    table = [[*head, "hashing, key weights, sums, read", "times native"]]
    rows = figures_of("accounting")["native"]
    native = {row["resolution"]: row["exact"] for row in rows if row["mechanism"] == "native"}
    for row in rows:
        hashed = "" if row["hashed"] is None else f"{row['hashed'] / 1e9:.3f}"
        energies = [f"{row[part] / 1e9:.2f}" for part in ("paper", "exact", "attention")]
        times = f"{row['exact'] / native[row['resolution']]:.2f}"
        table.append([str(row["resolution"]), row["mechanism"], *energies, hashed, times])
    return table


def energies(rows: list[Row], keys: list[str]) -> Table:
    """Energy at 45 nm and 7 nm, operations alone and with each memory; in brackets, times native."""
    table: Table = []
    native: dict[str, float] = {}
    for row in rows:
        energies = row["energy_pj"]
        native = energies if row["mechanism"] == "native" else native
        cells = (f"{_mj(energy)} ({energy / native[name]:.2f})" for name, energy in energies.items())
        table.append([*(str(row[key]) for key in (*keys, "mechanism")), *cells])
    heads = ["45 nm", "+ SRAM", "+ DRAM", "7 nm", "+ SRAM", "+ HBM", "+ DRAM"]
    return [[*keys, "attention", *heads[: len(native)]], *table]


def bitfusion_table() -> Table:
    """The paper's hardware table."""
    rows = []
    for row in figures_of("bitfusion")["table"]:
        difference = f"{row['energy_nj'] / row['printed_energy'] - 1:+.1%}".replace("-0.0%", "+0.0%")
        latencies = (f"{row[key]:.4f}" for key in ("latency_ms", "printed_latency_ms"))
        numbers = (f"{row[key]:,.2f}" for key in ("energy_nj", "printed_energy"))
        how = "the paper's" if row["reading"] == "printed" else "ours"
        rows.append([row["method"], *latencies, *numbers, difference, how])
    return [["method", "ms", "printed", "nJ", "printed", "difference", "decomposition"], *rows]


def bitfusion_models() -> Table:
    """PVTv2-B0 with each mechanism."""
    rows = []
    for name, row in figures_of("bitfusion")["models"].items():
        numbers = (f"{row['macs'] / 1e6:,.1f}", f"{row['ms']:.2f}", f"{row['mj']:.2f}")
        rows.append([name, *numbers, f"{row['attention']:.0%}"])
    return [["attention", "10⁶ products", "ms", "mJ", "share of attention"], *rows]


# Kernels, int8 and deployment


def operator_cpu() -> Table:
    """Milliseconds by the CPU kernels; in brackets, how many times as fast as SDPA and as plain PyTorch."""
    names = {"forward": "forward", "backward": "forward and backward", "causal": "causal"}
    names |= {"eco": "`eco`, hashing included", "integer": "int8"}
    found: dict[str, dict[str, str]] = {}
    for row in figures_of("operator")["rows"]:
        ms = row["ms"]
        numbers = (ms["kernels"], ms["sdpa"] / ms["kernels"], ms["eager"] / ms["kernels"])
        cell = "{} ({}, {})".format(*(f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in numbers))
        found.setdefault(_shape(row["shape"]), {})[row["kind"]] = cell
    rows = [[shape, *(cells[kind] for kind in names)] for shape, cells in found.items() if "forward" in cells]
    return [[SHAPE, *names.values()], *rows]


def gpu_energy() -> Table:
    """Energy of attention at the first shape, and of a compiled model for one image."""
    attention = _by_contestant(figures_of("gpu_energy")["rows"])
    model = _by_contestant(figures_of("gpu_models_compiled")["224, batch 256"]["rows"])
    table = [["", *CONTESTANTS.values()], ["attention, mJ"], ["compiled model, mJ an image"]]
    for key in CONTESTANTS:
        table[1].append(f"{1e3 * attention[key]['energy']['joules']:.0f}" if key in attention else "")
        joules = model[key].get("energy", {}).get("per_item_joules") if key in model else None
        table[2].append("" if joules is None else f"{1e3 * joules:.1f}")
    return table


def int8_accuracies(name: str) -> Table:
    """Accuracy in fp32 and int8."""
    keys = ("fp32", "int8", "agree", "resolves")
    rows = [[row["attention"]["name"], *(f"{row[key]:.2%}" for key in keys)] for row in figures_of(name)]
    return [["attention", "fp32", "int8", "same answer", "resolves"], *rows]


def deployment_latency() -> Table:
    """Milliseconds by runtime and size, and the size of the file."""
    figures = figures_of("deployment")
    table = [["runtime", "pixels", *MECHANISMS]]
    for row in figures["latency"]:
        times = [f"{row['median_ms'][m]:.1f}" if m in row["median_ms"] else "" for m in MECHANISMS]
        table.append([row["runtime"], str(row["size"]), *times])
    table.append(["ONNX file, MB", "any", *(f"{figures['sizes'][m] / 1e6:.1f}" for m in MECHANISMS)])
    start = "seconds from starting Python to the first result, ONNX Runtime"
    return [*table, [start, "224", "", "", "", f"{min(figures['start_up_s']):.2f}"]]


def deployment_int8() -> Table:
    """Milliseconds in ONNX Runtime, in fp32 and int8, and how many times as fast as native in int8."""
    latency = figures_of("deployment_int8")["latency"]
    labels = [f"{name}, {numbers}" for numbers in ("fp32", "int8") for name in MECHANISMS]
    sizes = (f"{row['size']} pixels" for row in latency)
    table = [["ms (times as fast as native, int8)", *sizes]]
    for label in (*labels, "native, by ONNX Runtime"):
        cells = []
        for row in latency:
            speed = row["speed"].get(f"{label} over native, int8")
            times = "" if speed is None else f" ({speed:.2f})"
            cells.append(f"{row['median_ms'][label]:.1f}{times}" if label in row["median_ms"] else "")
        table.append([label, *cells])
    return table


# What several tables need


def _rows(name: str) -> list[Row]:
    rows: list[Row] = figures_of(name)["rows"]
    return rows


def _accuracies(name: str) -> dict[str, list[float]]:
    """Of all seeds, by mechanism with its settings."""
    found: dict[str, list[float]] = {}
    for row in _rows(name):
        found.setdefault(_name(row["label"]), []).append(row["accuracy"])
    return found


def _fastest(rows: list[Row]) -> dict[str, float]:
    """Images a second by the fastest backend of each mechanism."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["mechanism"]] = max(found.get(row["mechanism"], 0), row["images_per_s"])
    return found


def _by_contestant(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row["mechanism"], row["backend"].removesuffix(", compiled")): row for row in rows}


def _printed(table: str) -> dict[str, dict[str, str]]:
    """Rows of one of the paper's tables by our names of the mechanisms."""
    rows = [row for row in printed_rows(table) if row.get("model", "pvt_v2_b0") == "pvt_v2_b0"]
    return {row["method"].replace("transformer", "softmax"): row for row in rows}


def _most_frequent(pairs: int) -> float:
    """Mean share of a list's most frequent value among 16."""
    values = torch.randint(16, (20_000, pairs), generator=torch.Generator().manual_seed(0))
    counts = torch.nn.functional.one_hot(values, 16).sum(1)
    return float(counts.amax(1).double().mean()) / pairs


def _best_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row["accuracy"])


def _options(label: str) -> dict[str, str]:
    return dict(option.split("=", 1) for option in label.partition(":")[2].split(",") if option)


def _name(label: str) -> str:
    return label.replace(":", ", ")


def _shape(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _of_seeds(accuracies: list[float]) -> str:
    seeds = "1 seed" if len(accuracies) == 1 else f"{len(accuracies)} seeds"
    return f"{_percent(mean(accuracies), 1)} ({seeds})"


def _energy(row: Row) -> str:
    return f"{row['energy_pj'] / 1e9:.2f} mJ"


def _mj(pj: float) -> str:
    return f"{pj / 1e9:,.2f}" if pj < 1e11 else f"{pj / 1e9:,.0f}"


def draw(path: Path) -> None:
    """Energy of PVTv2-B0 over pixels, and time of attention over tokens."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = {"sdpa": "softmax (SDPA)", "eager": "hashed, plain PyTorch", "kernels": "hashed, CPU kernels"}
    measured = figures_of("operator")
    timed = {row["shape"][2]: row["ms"] for row in measured["rows"] if row["kind"] == "lengths"}
    rows = [row for row in figures_of("gains") if row["model"] == "PVTv2-B0"]
    sizes, lengths = [row["size"] for row in rows], sorted(timed)
    with rc_context({"svg.hashsalt": "ecoformer", "font.size": 10}):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
        for name, colour in zip(MECHANISMS, COLOURS, strict=False):
            joules = [row["energy_pj"][name] / 1e9 for row in rows]
            left.plot(sizes, joules, marker="o", color=colour)
            up = {"eco": 3, "sharp_eco": -10}.get(name, -3)  # the two lie on top of each other
            left.annotate(name, (sizes[-1], joules[-1]), (6, up), textcoords="offset points", color=colour)
        left.set(title="Energy of an image, PVTv2-B0, mJ", xlabel="pixels a side", xlim=(205, 1750))
        left.set_xticks(sizes, list(map(str, sizes)))
        for (key, label), colour in zip(names.items(), [COLOURS[i] for i in (1, 2, 6)], strict=True):
            ms = [timed[tokens][key] for tokens in lengths]
            right.plot(lengths, ms, marker="o", markersize=4, color=colour)
            right.annotate(label, (lengths[-1], ms[-1]), (6, -3), textcoords="offset points", color=colour)
        threads = "one CPU thread" if measured["threads"] == 1 else f"{measured['threads']} CPU threads"
        title = f"Attention of 8 heads, {threads}, ms"
        right.set(title=title, xlabel="tokens", xlim=(50, 300_000))
        right.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
        for axes in (left, right):
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


TABLES: dict[str, Callable[[], Table]] = {
    "gains": gains,
    "accuracies": accuracies,
    "sharp_cifar100": sharp_cifar100,
    "sharp_cifar100_224": partial(taught, "cifar100_224_sharp", "CIFAR-100, 224 pixels", "softmax, before"),
    "sharp_recall": sharp_recall,
    "sharp_listops": partial(by_seed, "listops_sharp", "ListOps, 2,500 steps"),
    "sharp_imdb": partial(by_seed, "imdb_sharp", "IMDb, 3,000 steps"),
    "gpu_models": gpu_models,
    "minilm": partial(encoder, "minilm_sharp"),
    "vit_converted": partial(taught, "vit_converted", "CIFAR-100, DeiT-tiny's shape", "native, before"),
    "cost_cells": cost_cells,
    "cost_savings": cost_savings,
    "cost_native": cost_native,
    "cost_processes": lambda: energies(figures_of("accounting")["native"], ["resolution"]),
    "cost_integers": lambda: energies(figures_of("integer_energy"), ["resolution", "numbers"]),
    "bitfusion_table": bitfusion_table,
    "bitfusion_models": bitfusion_models,
    "deployment_latency": deployment_latency,
    "operator_cpu": operator_cpu,
    "gpu_energy": gpu_energy,
    "int8_mosaic": partial(int8_accuracies, "int8_mosaic"),
    "int8_cifar100": partial(int8_accuracies, "int8_cifar100"),
    "deployment_int8": deployment_int8,
    "cifar100": cifar100,
    "cifar100_finetuned": cifar100_finetuned,
    "cifar100_codes": cifar100_codes,
    "cifar100_224": cifar100_224,
    "imdb": imdb,
    "listops": listops,
    "recall": recall,
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    draw(ROOT / "docs" / "figures" / "energy_and_time.svg")
