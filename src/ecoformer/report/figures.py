"""Figures: shares of a model's parts, energy against size, accuracy against energy, BitFusion's bars.

Each function takes plain rows and returns a matplotlib figure; `style.save` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.bitfusion import Total
from ecoformer.report import style
from ecoformer.report.style import drawing, new_figure, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
Parts = Mapping[str, tuple[str, Sequence[float]]]
"""Colour and values of each part of a bar."""

_AXES = {"resolution": "Resolution (pixels a side)", "bits": "Bits of a code", "support": "Support samples"}


def shares_figure(rows: Rows) -> Figure:
    """Attention, FFN and the rest as shares of each model's energy, one panel a mechanism.

    A row holds `model`, `mechanism`, and `attention`, `ffn` and `other` in pJ. The total is above its bar.
    """
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    with drawing():
        figure = new_figure(max(3.4, 0.68 * len(rows) + 1.0), 3.1)
        panels = figure.subplots(1, len(mechanisms), sharey=True, squeeze=False)[0]
        for axes, mechanism in zip(panels, mechanisms, strict=True):
            own = [row for row in rows if row["mechanism"] == mechanism]
            totals = [row["attention"] + row["ffn"] + row["other"] for row in own]
            parts = {
                label: (
                    colour,
                    [100 * row[label.lower()] / (total or 1) for row, total in zip(own, totals, strict=True)],
                )
                for label, colour in (("Attention", style.BLUE), ("FFN", style.ORANGE), ("Other", style.GREY))
            }
            _stacked(axes.bar, axes, parts, [f"{total * 1e-9:.3g} mJ" for total in totals])
            axes.set_xticks(range(len(own)), [readable(row["model"]) for row in own])
            axes.set_title(readable(mechanism), pad=18)
        panels[0].set_ylim(0, 100)
        panels[0].set_ylabel("Share of energy (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def sweep_figure(rows: Rows, parameter: str = "resolution") -> Figure:
    """Energy against a parameter, one line a mechanism; a row holds `mechanism`, `value` and `energy_pj`."""
    with drawing():
        figure = new_figure(5.6, 3.5)
        axes = figure.subplots()
        for i, mechanism in enumerate(dict.fromkeys(row["mechanism"] for row in rows)):
            points = sorted(
                (row["value"], row["energy_pj"] * 1e-9) for row in rows if row["mechanism"] == mechanism
            )
            axes.loglog(*zip(*points, strict=True), **_look(mechanism, i))
        ticks = sorted({row["value"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.minorticks_off()
        axes.set(xlabel=_AXES.get(parameter, parameter.capitalize()), ylabel="Energy (mJ)")
        axes.grid(axis="y")
        figure.legend(loc="outside right upper")
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
            axes.plot(*point, linestyle="", markersize=7, **_look(row["label"], i))
        axes.set(xlabel="Energy of a forward pass (mJ)", ylabel="Accuracy (%)")
        axes.margins(0.1)
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure


def bitfusion_figure(bars: Mapping[str, Total], *, divide_by: int = 1) -> Figure:
    """Where time and energy go on BitFusion, one bar each for every name.

    `divide_by` is for the paper's table, whose latency is that of 16 rows divided by 16.
    """
    totals = bars.values()
    seconds = [1 / total.array.frequency_hz / divide_by for total in totals]
    time = {
        "Compute": (style.BLUE, [t.compute_cycles * s for t, s in zip(totals, seconds, strict=True)]),
        "Stalls": (style.SKY, [t.stall_cycles * s for t, s in zip(totals, seconds, strict=True)]),
    }
    energy = {
        "Array": (style.GREEN, [t.energy.core * 1e-9 for t in totals]),
        "Buffers": (style.ORANGE, [t.energy.buffers * 1e-9 for t in totals]),
        "DRAM": (style.RED, [t.energy.dram * 1e-9 for t in totals]),
    }
    with drawing():
        from matplotlib.ticker import EngFormatter

        figure = new_figure(7.2, 1.25 + 0.42 * len(bars))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name, unit, parts in ((panels[0], "Time", "s", time), (panels[1], "Energy", "J", energy)):
            sums = _sums(parts)
            _stacked(axes.barh, axes, parts, [EngFormatter(unit, places=1)(total) for total in sums])
            axes.xaxis.set_major_formatter(EngFormatter(unit))
            axes.set(xlabel=name, xlim=(0, 1.25 * max(sums)))
            axes.grid(axis="x")
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, handlelength=1, borderpad=0)
        panels[0].set_yticks(range(len(bars)), list(bars))
        panels[0].invert_yaxis()
    return figure


def _look(name: str, position: int) -> dict[str, Any]:
    marker = style.MARKERS[position % len(style.MARKERS)]
    return {"color": style.colour_of(name, position), "marker": marker, "label": readable(name)}


def _sums(parts: Parts) -> list[float]:
    return [sum(values) for values in zip(*(values for _, values in parts.values()), strict=True)]


def _stacked(draw: Callable[..., Any], axes: Axes, parts: Parts, totals: Sequence[str]) -> None:
    """Bars of parts on each other, with shares in per cent on them and totals at their ends."""
    sums = _sums(parts)
    before = [0.0] * len(sums)
    start = "bottom" if draw == axes.bar else "left"
    for label, (colour, values) in parts.items():
        bars = draw(
            range(len(sums)), values, 0.7, color=colour, label=label, edgecolor="white", **{start: before}
        )
        shares = [value / (total or 1) for value, total in zip(values, sums, strict=True)]
        wide = [value > 0.08 * max(sums) for value in values]
        texts = [f"{share:.0%}" if fits else "" for share, fits in zip(shares, wide, strict=True)]
        axes.bar_label(bars, texts, label_type="center", color=style.INK, size=8)
        before = [low + value for low, value in zip(before, values, strict=True)]
    axes.bar_label(bars, totals, padding=3, size=8)
