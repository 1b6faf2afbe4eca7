"""Figures: shares of a model's parts, and accuracy against energy.

Each function takes plain rows and returns a matplotlib figure; `style.save` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.report import style
from ecoformer.report.style import drawing, look_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_PARTS = {"attention": style.BLUE, "ffn": style.ORANGE, "other": style.GREY}


def shares_figure(rows: Rows) -> Figure:
    """Attention, FFN and the rest as shares of each model's energy, one panel a mechanism.

    A row holds `model`, `mechanism`, and `attention`, `ffn` and `other` in pJ. The total is above its bar.
    """
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    with drawing():
        figure = new_figure(max(3.4, 0.8 * len(rows) + 1.0), 3.1)
        panels = figure.subplots(1, len(mechanisms), sharey=True, squeeze=False)[0]
        for axes, mechanism in zip(panels, mechanisms, strict=True):
            own = [row for row in rows if row["mechanism"] == mechanism]
            totals = [sum(row[part] for part in _PARTS) for row in own]
            names, before = [row["model"] for row in own], [0.0] * len(own)
            for part, colour in _PARTS.items():
                shares = [100 * row[part] / (total or 1) for row, total in zip(own, totals, strict=True)]
                bars = axes.bar(names, shares, 0.7, bottom=before, color=colour, label=part)
                texts = [f"{share:.0f}%" if share > 8 else "" for share in shares]
                axes.bar_label(bars, texts, label_type="center", size=8)
                before = [low + share for low, share in zip(before, shares, strict=True)]
            axes.bar_label(bars, [f"{total * 1e-9:.3g} mJ" for total in totals], padding=3, size=8)
            axes.set_title(mechanism, pad=18)
        panels[0].set(ylim=(0, 100), ylabel="Share of energy (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def accuracy_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of `benchmarks/compare.py`, or of a JSON list of label, energy_pj and accuracy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content if isinstance(content, list) else content["figures"]["rows"]
        numbers = ("energy_pj", "accuracy")
        return [{"label": str(row["label"])} | {name: float(row[name]) for name in numbers} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        needs = "rows with label, energy_pj and accuracy, 0 to 1"
        raise ValueError(f"{path} does not hold {needs}: {type(error).__name__} {error}") from error


def accuracy_figure(rows: Rows) -> Figure:
    """Accuracy against energy, one point a row: `label`, `energy_pj`, `accuracy` from 0 to 1."""
    with drawing():
        figure = new_figure(5.4, 3.4)
        axes = figure.subplots()
        for i, row in enumerate(rows):
            point = ([row["energy_pj"] * 1e-9], [100 * row["accuracy"]])
            axes.plot(*point, linestyle="", markersize=7, **look_of(row["label"], i))
        axes.set(xlabel="Energy of a forward pass (mJ)", ylabel="Accuracy (%)")
        axes.margins(0.1)
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure
