"""Fill the tables of README.md and of pages under docs/ from the files under results/.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is a key of
TABLES here, or of MAKERS in cost_tables.py, deployment_tables.py, gpu_tables.py, hash_tables.py or
readme_tables.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import cost_tables
import deployment_tables
import gpu_tables
import hash_tables
import readme_tables
import torch
from record import Table, figures_of

from ecoformer.report.tables import printed_rows

ROOT = Path(__file__).resolve().parent.parent
DOCS = (
    "index",
    "results",
    "choosing",
    "conversion",
    "cost",
    "bitfusion",
    "kernels",
    "kernels_gpu",
    "hashing",
    "deployment",
    "quantization",
)
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))


def affinity_cpu() -> Table:
    """The CPU kernels: groups of bits next to the paper's affinity."""
    rows = figures_of("affinity_cpu")
    names = list(rows[0]["ms"])
    ratios = [f"{name}, times the paper's" for name in names[1:]]
    return [
        ["batch, heads, tokens, channels", *(f"{name}, ms" for name in names), *ratios],
        *(
            [
                _shape(row["shape"]),
                *(f"{row['ms'][name]:.3f}" for name in names),
                *(f"{row['times the paper'][name]:.2f}" for name in names[1:]),
            ]
            for row in rows
        ),
    ]


def cpu_attention() -> Table:
    """The CPU kernels against SDPA and eager: milliseconds, and how many times faster."""
    names = ("sdpa", "eager", "cpu")
    cells = []
    for row in figures_of("cpu_kernels")["attention"]:
        times, ratios = row["in a row"]["median_ms"], row["in a row"]["ratios"]
        cell = [_shape(row["shape"]), *(f"{times[name]:.2f}" for name in names)]
        cell += [f"{ratios[f'{name} / cpu']:.1f}" for name in names[:2]]
        cells.append([*cell, *(f"{row['in turns']['ratios'][f'{name} / cpu']:.1f}" for name in names[:2])])
    head = ["batch, heads, tokens, channels", "SDPA, ms", "eager, ms", "CPU backend, ms"]
    return [[*head, "× SDPA", "× eager", "× SDPA, in turns", "× eager, in turns"], *cells]


def cpu_backward() -> Table:
    """Forward and backward by the CPU kernels against eager."""
    names = ("eco", "sharp_eco")
    cells = []
    for row in figures_of("cpu_backward")["attention"]:
        times = [f"{row[name]['median_ms'][who]:.2f}" for name in names for who in ("eager", "cpu")]
        cells.append([_shape(row["shape"]), *times, *(f"{row[name]['eager / cpu']:.1f}" for name in names)])
    head = [f"{name}, {who}, ms" for name in names for who in ("eager", "CPU backend")]
    ratios = [f"{name}, × eager" for name in names]
    return [["batch, heads, tokens, channels", *head, *ratios], *cells]


def cpu_models() -> Table:
    """PVTv2-B0 on a CPU, images a second."""
    rows = figures_of("cpu_kernels")["models"]
    names = ("N x N matrix", "sdpa", "eager", "cpu")
    cells = []
    for batch, last in sorted({(row["batch"], row["channels_last"]) for row in rows}):
        here = {row["backend"]: row for row in rows if (row["batch"], row["channels_last"]) == (batch, last)}
        about = f"batch {batch}, channels {'last' if last else 'first'}"
        speeds = [f"{here[name]['images_per_s']:.1f}" for name in names]
        cells.append([about, *speeds, f"{here['cpu']['ratio_to_sdpa']:.2f}"])
    return [["", "N × N matrix", "SDPA", "eco, eager", "eco, CPU backend", "× SDPA"], *cells]


def cpu_crossover() -> Table:
    """From how many tokens on hashed attention is faster than SDPA."""
    found: dict[str, list[str]] = {}
    for row in sorted(figures_of("lengths_cpu")["crossover"], key=lambda row: row["backward"]):
        key = ", ".join(str(row[name]) for name in ("batch", "heads", "channels"))
        found.setdefault(key, []).append(str(row["tokens"]))
    head = ["batch, heads, channels", "forward", "forward and backward, eager"]
    return [head, *([shape, *tokens] for shape, tokens in found.items())]


def gpu_affinity() -> Table:
    """The Triton kernels: groups of bits, and codes from projections, next to the paper's affinity."""

    def cells(row: dict[str, Any], kind: str) -> list[str]:
        return [f"{row['us'][kind]:.0f}", f"{row['ratio'][kind]:.2f}"] if kind in row["us"] else ["", ""]

    head = ["batch, heads, tokens, channels", "", "paper, µs", "4 groups of 4, µs", "times the paper's"]
    return [
        [*head, "projections, µs", "times the paper's"],
        *(
            [
                ", ".join(f"{size:,}" for size in row["shape"]),
                ("causal, " if row["causal"] else "")
                + ("forward and backward" if row["backward"] else "forward"),
                f"{row['us']['paper']:.0f}",
                *cells(row, "4x4"),
                *cells(row, "signs"),
            ]
            for row in figures_of("gpu_affinity")["time"]
        ),
    ]


def gpu_models() -> Table:
    """Images a second of PVTv2-B0 on the GPU, by the fastest backend of each mechanism, next to native."""
    sizes = figures_of("gpu_models_sharp")
    speeds: dict[str, list[float]] = {}
    for size in sizes.values():
        for name in ("native", "softmax", "eco", "sharp_eco"):
            rows = [row["images_per_s"] for row in size["rows"] if row["mechanism"] == name]
            speeds.setdefault(name, []).append(max(rows))
    native = speeds["native"]
    return [
        ["images a second", *(size.replace(",", " pixels,") for size in sizes)],
        *(
            [name, *(f"{each:,.0f} ({each / own:.2f})" for each, own in zip(found, native, strict=True))]
            for name, found in speeds.items()
        ),
    ]


def cifar100() -> Table:
    """From scratch: both seeds, and the paper's figures."""
    first, second, paper = _scratch(), _by_label("cifar100_second"), _printed_cifar100()
    softmax = first["softmax"]["accuracy"] + second["softmax"]["accuracy"]
    rows = []
    for row in _best_first(first.values()):
        label = row["label"]
        again, printed = second.get(label), paper.get(label)
        mean = (row["accuracy"] + again["accuracy"] - softmax) / 2 if again else None
        rows.append(
            [
                _name(label),
                _percent(row["accuracy"]),
                _percent(again["accuracy"]) if again else "",
                f"{100 * mean:+.2f}" if mean is not None else "",
                _energy(row),
                f"{float(printed['top1']):.2f} %" if printed else "",
                f"{float(printed['energy_bpj']):.2f} mJ" if printed else "",
            ]
        )
    head = ["mechanism", "accuracy", "second seed", "both seeds − softmax", "energy"]
    return [[*head, "accuracy, paper", "energy, paper (224 pixels)"], *rows]


def cifar100_speed() -> Table:
    """Images a second by the fastest backend of each mechanism."""
    best: dict[str, dict[str, float]] = {}
    for part, found in figures_of("cifar100_speed").items():
        for row in found["rows"]:
            if not row["checked"]["passed"]:
                raise ValueError(f"cifar100_speed: {row['mechanism']} failed its check")
            rates = best.setdefault(row["mechanism"], {})
            rates[part] = max(rates.get(part, 0), row["images_per_s"])
    fastest = sorted(best.items(), key=lambda item: -item[1]["inference"])
    rows = [[name, f"{rates['inference']:,.0f}", f"{rates['training']:,.0f}"] for name, rates in fastest]
    return [["mechanism", "inference", "training"], *rows]


def cifar100_finetuned() -> Table:
    """The paper's path at 128 pixels."""
    rows = _best_first(_rows("cifar100_finetuned"))
    softmax = _by_label("cifar100_finetuned")["softmax, 10 more epochs"]["accuracy"]
    cells = [
        [row["label"], _percent(row["accuracy"]), f"{100 * (row['accuracy'] - softmax):+.2f}"] for row in rows
    ]
    return [["", "accuracy", "− softmax"], *cells]


def cifar100_codes() -> Table:
    """Fewer bits or support samples."""
    runs = {("16", "25"): _by_label("cifar100_finetuned")["eco"]}
    for label, row in _by_label("cifar100_codes").items():
        options = dict(option.split("=") for option in label.partition(":")[2].split(","))
        if options.get("bits") != "32":  # trained with wrong gradients
            runs[options.get("bits", "16"), options.get("support", "25")] = row
    rows = [[*key, _percent(row["accuracy"]), _energy(row)] for key, row in runs.items()]
    return [["bits", "support samples", "accuracy", "energy"], *_best_first(rows, key=lambda row: row[2])]


def cifar100_224() -> Table:
    """The paper's path at 224 pixels."""
    figures, rows = figures_of("cifar100_224"), _by_label("cifar100_224")
    unfinished = figures["unfinished"]["eco, teacher.weight=0"]["4"]
    saved = 1 - rows["eco"]["energy_pj"] / rows["softmax"]["energy_pj"]
    return [
        ["224 pixels", "accuracy", "energy of a picture"],
        ["softmax, before", _percent(figures["start"]["accuracy"]), _energy(rows["softmax"])],
        ["softmax, 5 epochs, taught", _percent(rows["softmax"]["accuracy"]), _energy(rows["softmax"])],
        [
            "eco, 5 epochs, taught",
            _percent(rows["eco"]["accuracy"]),
            f"{_energy(rows['eco'])} (-{saved:.0%})",
        ],
        ["eco, not taught, cut short after 4 epochs", _percent(unfinished), _energy(rows["eco"])],
    ]


def imdb() -> Table:
    """Long Range Arena, text, beside the paper's figures."""
    paper = _printed("long_range_arena")
    rows = []
    for row in _best_first(_rows("imdb")):
        printed = paper.get(row["label"])
        cells = [_name(row["label"]), _percent(row["accuracy"]), _percent(row["best_accuracy"]), _energy(row)]
        rows.append(
            [*cells, *([f"{printed['text_4k']} %", f"{printed['energy_bpj']} mJ"] if printed else ["", ""])]
        )
    head = ["mechanism", "accuracy at the end", "at its best", "energy"]
    return [[*head, "accuracy, paper", "energy, paper"], *rows]


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
    rows = []
    for label, accuracies in _best_first(found.items(), key=lambda item: item[1][max(pairs)]):
        name, _, settings = label.partition(":")
        options = dict(setting.split("=") for setting in settings.split(",") if settings)
        if name == "eco":
            name += f", {options.get('bits', 16)} bits, {options.get('support', 25)} support samples"
        rows.append([name, *(_percent(accuracies[n], 1) if n in accuracies else "not run" for n in pairs)])
    guesses = [_percent(_most_frequent(count), 0) for count in pairs]
    return [["pairs", *map(str, pairs)], *rows, ["the list's most frequent value", *guesses]]


def masked_bytes() -> Table:
    """Bits a byte and accuracy."""
    rows = [*_rows("masked_bytes"), *_rows("masked_bytes_hashed")]
    cells = [
        [_name(row["label"]), f"{row['test_loss'] / math.log(2):.2f}", _percent(row["accuracy"], 1)]
        for row in _best_first(rows)
    ]
    return [["", "bits a byte", "accuracy"], *cells]


def sharp_recall() -> Table:
    """Recall by sharp_eco, softmax and eco."""
    found: dict[tuple[int, str], list[str]] = {}
    for run in figures_of("recall_sharp")["runs"]:
        for row in run["rows"]:
            label = _name(row["mechanism"]) + (", soft start" if run["soft_start"] else "")
            found.setdefault((run["pairs"], label), []).append(_percent(row["accuracy"]))
    rows = [[str(pairs), label, ", ".join(seeds)] for (pairs, label), seeds in sorted(found.items())]
    return [["pairs", "attention", "accuracy, seed by seed"], *rows]


def sharp_cifar100() -> Table:
    """CIFAR-100 by sharp_eco and what it is compared with."""
    accuracies: dict[str, list[float]] = {}
    for row in _rows("cifar100_sharp"):
        accuracies.setdefault(row["label"], []).append(row["accuracy"])
    rows = _by_label("cifar100_sharp")
    header = ["CIFAR-100, 30 epochs", "accuracy, seed by seed", "mean", "energy, paper's accounting"]
    return [
        header,
        *(
            [label, ", ".join(map(_percent, found)), _percent(mean(found)), _energy(rows[label])]
            for label, found in accuracies.items()
        ),
    ]


def by_seed(name: str, title: str) -> Table:
    """Each mechanism's accuracies on all seeds."""
    found: dict[str, list[str]] = {}
    for row in _rows(name):
        found.setdefault(_name(row["label"]), []).append(_percent(row["accuracy"]))
    return [[title, "accuracy, seed by seed"], *([label, ", ".join(seeds)] for label, seeds in found.items())]


def taught(name: str, title: str, before: str) -> Table:
    """A model as it was, and what it became with the same number of epochs and the same teacher."""
    figures = figures_of(name)
    named = [(before, figures["start"]), *((f"{row['label']}, taught", row) for row in figures["rows"])]
    return [
        [title, "accuracy", "energy, paper's accounting"],
        *([label, _percent(row["accuracy"]), _energy(row)] for label, row in named),
    ]


TABLES: dict[str, Callable[[], Table]] = {
    "cifar100": cifar100,
    "cifar100_speed": cifar100_speed,
    "cifar100_finetuned": cifar100_finetuned,
    "cifar100_codes": cifar100_codes,
    "cifar100_224": cifar100_224,
    "imdb": imdb,
    "listops": listops,
    "recall": recall,
    "masked_bytes": masked_bytes,
    "affinity_cpu": affinity_cpu,
    "cpu_attention": cpu_attention,
    "cpu_backward": cpu_backward,
    "cpu_models": cpu_models,
    "cpu_crossover": cpu_crossover,
    "gpu_affinity": gpu_affinity,
    "gpu_models": gpu_models,
    "sharp_recall": sharp_recall,
    "sharp_listops": partial(by_seed, "listops_sharp", "ListOps, 2,500 steps"),
    "sharp_imdb": partial(by_seed, "imdb_sharp", "IMDb, 3,000 steps"),
    "sharp_cifar100": sharp_cifar100,
    "sharp_cifar100_224": partial(taught, "cifar100_224_sharp", "CIFAR-100, 224 pixels", "softmax, before"),
    "vit_converted": partial(taught, "vit_converted", "CIFAR-100, DeiT-tiny's shape", "native, before"),
    **cost_tables.MAKERS,
    **gpu_tables.MAKERS,
    **readme_tables.MAKERS,
    **deployment_tables.MAKERS,
    **hash_tables.MAKERS,
}


def filled(page: str) -> str:
    """A page with all its tables as the result files have them."""

    def table(found: re.Match[str]) -> str:
        head, *rows = TABLES[found[2]]()
        lines = [" ".join(f"| {' | '.join(cells)} |".split()) for cells in (head, *rows)]
        lines.insert(1, "|" + "---|" * len(head))
        return "\n".join([found[1], *lines, found[3]])

    pattern = r"(<!-- table: (\w+) -->)\n.*?(<!-- end of table -->)"
    return re.sub(pattern, table, page, flags=re.DOTALL)


def _shape(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = figures_of(name)["rows"]
    return rows


def _by_label(name: str) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in _rows(name)}


def _scratch() -> dict[str, dict[str, Any]]:
    return _by_label("cifar100") | _by_label("cifar100_others")


def _printed(table: str) -> dict[str, dict[str, str]]:
    """Rows of one of the paper's tables by our names of the mechanisms."""
    rows = [row for row in printed_rows(table) if row.get("model", "pvt_v2_b0") == "pvt_v2_b0"]
    return {row["method"].replace("transformer", "softmax"): row for row in rows}


def _printed_cifar100() -> dict[str, dict[str, str]]:
    tables = ("cifar100_binarization", "cifar100_hash_functions", "cifar100_attentions")
    return {name: row for table in tables for name, row in _printed(table).items()}


def _best_first(rows: Iterable[Any], key: Callable[[Any], Any] = lambda row: row["accuracy"]) -> list[Any]:
    return sorted(rows, key=key, reverse=True)


def _most_frequent(pairs: int) -> float:
    """Mean share of a list's most frequent value among 16."""
    values = torch.randint(16, (20_000, pairs), generator=torch.Generator().manual_seed(0))
    counts = torch.nn.functional.one_hot(values, 16).sum(1)
    return float(counts.amax(1).double().mean()) / pairs


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _energy(row: dict[str, Any]) -> str:
    return f"{row['energy_pj'] / 1e9:.2f} mJ"


def _name(label: str) -> str:
    return label.replace(":", ", ")


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
