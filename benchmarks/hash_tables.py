"""The tables of docs/hashing.md; `result_tables.py` fills them in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from record import Table, figures_of


def quality(tokens: str) -> Table:
    """Quality of all hashers on one kind of tokens."""
    names = ("objective", "recall", "correlation")
    rows = next(part["rows"] for part in figures_of("hash_quality") if part["tokens"] == tokens)
    return [
        ["hasher", "objective", "recall of top 10", "correlation"],
        *([row["method"], *(_spread(row, name) for name in names)] for row in rows),
    ]


def fit_speed() -> Table:
    """Seconds to learn hash functions."""
    figures = figures_of("fit_speed")
    rows, long = figures["rows"], figures["long"]
    methods = dict.fromkeys(name for row in rows for name in row["seconds"])
    table = [
        ["", *(f"N = {row['tokens']}" for row in rows), f"N = {long['tokens']:,}, batch {long['batch']}"]
    ]
    for method in methods:
        cells = [f"{row['seconds'][method]:.2f} s" if method in row["seconds"] else "" for row in rows]
        last = f"{long['seconds']:.1f} s, {long['peak_rss_mb']:.0f} MB at the peak"
        table.append([method, *cells, last if method == "ours, default" else ""])
    return table


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.3f} ± {row[f'{name}_std']:.3f}"


MAKERS: dict[str, Callable[[], Table]] = {
    "quality_images": partial(quality, "image patches"),
    "quality_raw_images": partial(quality, "image patches, not normalised"),
    "quality_texts": partial(quality, "text bytes"),
    "fit_speed": fit_speed,
}
