"""The tables of README.md, docs/index.md and docs/conversion.md; `result_tables.py` fills them in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from record import Table, figures_of

WORTH_IT = 0.85
"""Energy must fall below this share of native's, and CPU time must fall."""


def gains() -> Table:
    """What sharp_eco takes of the model as it is, and whether that is worth a conversion."""
    speeds = {
        int(name.split(",")[0]): _images_per_s(part) for name, part in figures_of("gpu_models_sharp").items()
    }
    rows = []
    for row in figures_of("gains"):
        energy, seconds = (row[key]["sharp_eco"] / row[key]["native"] for key in ("energy_pj", "cpu_seconds"))
        gpu = speeds[row["size"]] if row["model"] == "PVTv2-B0" else None
        times = f"{gpu['native'] / gpu['sharp_eco']:.2f}" if gpu else ""
        worth = "yes" if energy < WORTH_IT and seconds < 1 else "no"
        cells = [
            row["model"],
            f"{row['size']:,} {row['unit']}",
            f"{energy:.2f}",
            f"{seconds:.2f}",
            times,
            worth,
        ]
        rows.append(cells)
    return [["your model", "its input", "energy", "time, CPU", "time, H200", "for you?"], *rows]


def accuracies() -> Table:
    """Accuracy after equal training; the mean over seeds, and how many."""
    images = _by_mechanism(figures_of("cifar100_sharp")["rows"])
    reviews = _by_mechanism(figures_of("imdb_sharp")["rows"])
    lists = _by_mechanism(figures_of("listops_sharp")["rows"])
    blunt = {row["label"]: row["accuracy"] for row in figures_of("listops")["rows"]}
    runs = [
        run for run in figures_of("recall_sharp")["runs"] if run["pairs"] == 128 and not run["soft_start"]
    ]
    found = _by_mechanism([row for run in runs for row in run["rows"]])
    return [
        ["accuracy", "native", "softmax", "eco", "sharp_eco"],
        [
            "CIFAR-100, PVTv2-B0, 128 pixels",
            *(_percent(images[name]) for name in ("native", "softmax", "eco", "sharp_eco")),
        ],
        [
            "IMDb, 4,096 bytes",
            *(_percent(reviews[name]) for name in ("softmax", "softmax", "eco", "sharp_eco")),
        ],
        [
            "ListOps",
            *[_percent(lists["softmax"])] * 2,
            _percent([blunt["eco"]]),
            _percent(lists["sharp_eco"]),
        ],
        [
            "recall among 128 pairs, 16 bits",
            *(_percent(found[name]) for name in ("softmax", "softmax", "eco", "sharp_eco")),
        ],
        ["the same, 48 bits", "", "", "", _percent(found["sharp_eco:bits=48,groups=8"])],
    ]


def million_tokens() -> Table:
    """Peak memory of a million tokens, forward and backward."""
    figures = figures_of("million_tokens")
    rows = [[order, f"{figures[order]['peak_rss_mb'] / 1024:.1f} GB"] for order in ("full", "causal")]
    return [["order", "peak memory of the process"], *rows]


def encoder(name: str) -> Table:
    """A sentence encoder after conversion, transfer and distillation; means over seeds."""
    names = ("spearman", "same nearest", "same ten nearest", "cosine to the original")
    rows = [
        [variant, stage, *(f"{mean(run[name] for run in runs):.3f}" for name in names), str(len(runs))]
        for variant, figures in figures_of(name)["variants"].items()
        for stage, runs in figures["stages"].items()
    ]
    header = ["mechanism", "stage", "Spearman", "same nearest", "same ten nearest", "cosine", "seeds"]
    return [header, ["native", "as it is", *["1.000"] * 4, ""], *rows]


def soft_start() -> Table:
    """What soft codes cost in training."""
    found = figures_of("soft_start")
    header = ["training", "signs, s a step", "soft, s a step", "ratio", f"a run, {found['soft']:.0%} soft"]
    rows = [
        [name, f"{row['signs']:.3f}", f"{row['soft']:.3f}", f"{row['ratio']:.2f}", f"{row['share']:.2f}"]
        for name, row in found["rows"].items()
    ]
    return [header, *rows]


def _images_per_s(part: dict[str, Any]) -> dict[str, float]:
    """By the fastest backend of each mechanism."""
    found: dict[str, float] = {}
    for row in part["rows"]:
        found[row["mechanism"]] = max(found.get(row["mechanism"], 0), row["images_per_s"])
    return found


def _by_mechanism(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["mechanism"], []).append(row["accuracy"])
    return found


def _percent(accuracies: list[float]) -> str:
    seeds = "1 seed" if len(accuracies) == 1 else f"{len(accuracies)} seeds"
    return f"{100 * mean(accuracies):.1f} % ({seeds})"


MAKERS: dict[str, Callable[[], Table]] = {
    "gains": gains,
    "accuracies": accuracies,
    "million_tokens": million_tokens,
    "minilm": partial(encoder, "minilm_sharp"),
    "minilm_local": partial(encoder, "minilm_local"),
    "soft_start": soft_start,
}
