"""Pictures: shares of a model's parts, cost against size, energy against accuracy, BitFusion's bars.

Each function takes plain rows and returns a matplotlib figure; `style.save` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecoformer.bitfusion import Total
from ecoformer.report.labels import label_ends, label_points
from ecoformer.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    RED,
    SKY,
    colour_of,
    drawing,
    new_figure,
    quiet_grid,
    readable,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {"attention": ("Attention", BLUE), "ffn": ("FFN", ORANGE), "other": ("Other", GREY)}
QUANTITIES = {
    "energy_pj": ("Energy", "mJ", " mJ", 1e-9),
    "mul": ("Multiplications", "10⁹", "·10⁹", 1e-9),
    "add": ("Additions", "10⁹", "·10⁹", 1e-9),
}
"""Name, unit on an axis and behind a number, and factor of what the ledger's figures show."""
_AXES = {
    "resolution": "Resolution (pixels a side)",
    "tokens": "Tokens",
    "bits": "Bits of a code",
    "support": "Support samples m",
    "batch": "Batch size",
}


def shares_figure(rows: Sequence[Mapping[str, Any]], quantity: str = "energy_pj") -> Figure:
    """Attention, FFN and the rest as shares of each model, one panel a mechanism.

    A row holds `model`, `mechanism`, and `attention`, `ffn` and `other` in the quantity's own unit (pJ, or a
    number of operations). The whole stands above its bar.
    """
    _need(rows, ("model", "mechanism", *PARTS), "shares")
    name, _, unit, factor = _quantity(quantity)
    mechanisms = _distinct(row["mechanism"] for row in rows)
    with drawing():
        models = max(len([r for r in rows if r["mechanism"] == m]) for m in mechanisms)
        figure = new_figure(max(3.4, 0.68 * models * len(mechanisms) + 1.0), 3.1)
        panels = figure.subplots(1, len(mechanisms), sharey=True, squeeze=False)[0]
        for axes, mechanism in zip(panels, mechanisms, strict=True):
            own = [row for row in rows if row["mechanism"] == mechanism]
            _share_bars(axes, own, factor, unit)
            axes.set_title(readable(mechanism), pad=18)
        panels[0].set_ylabel(f"Share of {name.lower()} (%)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS))
    return figure


def _share_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], factor: float, unit: str) -> None:
    positions = range(len(rows))
    wholes = [sum(row[part] for part in PARTS) for row in rows]
    bottom = [0.0] * len(rows)
    for part, (label, colour) in PARTS.items():
        heights = [100 * row[part] / (whole or 1) for row, whole in zip(rows, wholes, strict=True)]
        axes.bar(positions, heights, 0.72, bottom=bottom, color=colour, label=label, edgecolor="white")
        for x, height, low in zip(positions, heights, bottom, strict=True):
            if height >= 8:
                axes.text(
                    x,
                    low + height / 2,
                    f"{height:.0f}",
                    ha="center",
                    va="center",
                    color=_on(colour),
                    size=8.5,
                )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, whole in zip(positions, wholes, strict=True):
        axes.text(x, 101.5, f"{_three(whole * factor)}{unit}", ha="center", va="bottom", size=7.5)
    family, names = _family([readable(row["model"]) for row in rows])
    axes.set_xticks(list(positions), names)
    axes.set_xlabel(family)
    axes.set_ylim(0, 100)
    axes.tick_params(axis="x", length=0)


def _family(names: list[str]) -> tuple[str, list[str]]:
    """What all names start with goes under the axis: PVTv2, and B0 to B4."""
    families = {name.rpartition("-")[0] for name in names}
    if len(names) > 1 and len(families) == 1 and families != {""}:
        return families.pop(), [name.rpartition("-")[2] for name in names]
    return "", names


def sweep_figure(
    rows: Sequence[Mapping[str, Any]], parameter: str = "resolution", quantity: str = "energy_pj"
) -> Figure:
    """A quantity against a parameter's value, both logarithmic, one line a mechanism.

    A row holds `mechanism`, `value`, and the quantity: `energy_pj`, `mul` or `add`.
    """
    _need(rows, ("mechanism", "value", quantity), "sweep")
    name, unit, _, factor = _quantity(quantity)
    with drawing():
        figure = new_figure(5.2, 3.5)
        axes = figure.subplots()
        ends = []
        for i, mechanism in enumerate(_distinct(row["mechanism"] for row in rows)):
            own = sorted(
                (row["value"], row[quantity] * factor) for row in rows if row["mechanism"] == mechanism
            )
            xs, ys = [x for x, _ in own], [y for _, y in own]
            colour = colour_of(mechanism, i)
            axes.plot(xs, ys, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=4.5, linewidth=1.6)
            ends.append((xs[-1], ys[-1], readable(mechanism), colour))
        axes.set_xscale("log", base=2)
        wide = axes.get_ylim()[1] > 3 * max(axes.get_ylim()[0], 0.0)
        axes.set_yscale("log" if wide else "linear")  # a short logarithmic axis has no round numbers
        ticks = sorted({row["value"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(_AXES.get(parameter, parameter))
        axes.set_ylabel(f"{name} ({unit})")
        if wide:
            _plain_numbers(axes)
        quiet_grid(axes, "y")
        label_ends(axes, ends)
    return figure


def accuracy_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy against energy, one point a row: `label`, `energy_pj`, `accuracy` in per cent."""
    _need(rows, ("label", "energy_pj", "accuracy"), "accuracy")
    with drawing():
        figure = new_figure(4.8, 3.4)
        axes = figure.subplots()
        points = []
        for i, row in enumerate(rows):
            x, y = row["energy_pj"] * 1e-9, row["accuracy"]
            colour = colour_of(row["label"], i)
            axes.plot([x], [y], MARKERS[i % len(MARKERS)], color=colour, markersize=7)
            points.append((x, y, readable(row["label"]), colour))
        axes.set_xlabel("Energy of a forward pass (mJ)")
        axes.set_ylabel("Accuracy (%)")
        axes.margins(0.18, 0.2)
        low, high = axes.get_ylim()
        if max(row["accuracy"] for row in rows) <= 100:  # and no axis beyond what there can be
            axes.set_ylim(low, min(high, 100 + 0.04 * (100 - low)))
        quiet_grid(axes, "both")
        label_points(axes, points)
    return figure


def bitfusion_figure(bars: Mapping[str, Total], *, divide_by: int = 1) -> Figure:
    """Where time and energy go on BitFusion, one bar each for every name.

    `divide_by` is for the paper's table, whose latency is that of 16 rows divided by 16.
    """
    if not bars:
        raise ValueError("bars must hold at least one result")
    time = {
        "Compute": (BLUE, [t.compute_cycles / t.array.frequency_hz / divide_by for t in bars.values()]),
        "Stalls": (SKY, [t.stall_cycles / t.array.frequency_hz / divide_by for t in bars.values()]),
    }
    energy = {
        "Array": (GREEN, [t.energy.core * 1e-9 for t in bars.values()]),
        "Buffers": (ORANGE, [t.energy.buffers * 1e-9 for t in bars.values()]),
        "DRAM": (RED, [t.energy.dram * 1e-9 for t in bars.values()]),
    }
    with drawing():
        figure = new_figure(7.2, 1.25 + 0.42 * len(bars))
        panels = figure.subplots(1, 2, sharey=True)
        _stack(panels[0], list(bars), time, "Time", "s")
        _stack(panels[1], list(bars), energy, "Energy", "J")
    return figure


def _stack(
    axes: Axes, names: list[str], parts: Mapping[str, tuple[str, list[float]]], title: str, unit: str
) -> None:
    totals = [sum(values) for values in zip(*(values for _, values in parts.values()), strict=True)]
    prefix, factor = _scale(max(totals))
    edge: Any = {"edgecolor": "white", "linewidth": 0.5}
    left, longest = [0.0] * len(names), max(totals) * factor
    for label, (colour, values) in parts.items():
        widths = [value * factor for value in values]
        axes.barh(range(len(names)), widths, 0.66, left=left, color=colour, label=label, **edge)
        for y, (width, start, total) in enumerate(zip(widths, left, totals, strict=True)):
            if width > 0.11 * longest:
                share = f"{width / (total * factor):.0%}"
                axes.text(start + width / 2, y, share, ha="center", va="center", color=_on(colour), size=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, total in enumerate(totals):
        axes.text(total * factor + 0.015 * longest, y, _three(total * factor), va="center", size=8.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.16 * longest)
    axes.set_xlabel(f"{title} ({prefix}{unit})")
    quiet_grid(axes, "x")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=len(parts), handlelength=1, borderpad=0)


def _scale(largest: float) -> tuple[str, float]:
    """An SI prefix that leaves the largest number between 1 and 1000."""
    for prefix, factor in (("", 1.0), ("m", 1e3), ("µ", 1e6), ("n", 1e9)):
        if largest * factor >= 1:
            return prefix, factor
    return "p", 1e12


def _three(value: float) -> str:
    """Three digits, the zeros among them too."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def _on(colour: str) -> str:
    """Ink or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    if high / low < 100:  # powers of ten alone would leave one or two ticks
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _quantity(name: str) -> tuple[str, str, str, float]:
    if name not in QUANTITIES:
        raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {name!r}")
    return QUANTITIES[name]


def _need(rows: Sequence[Mapping[str, Any]], fields: Iterable[str], what: str) -> None:
    if not rows:
        raise ValueError(f"the {what} figure has no rows to draw")
    for i, row in enumerate(rows):
        missing = [field for field in fields if field not in row]
        if missing:
            raise ValueError(
                f"row {i} of the {what} figure lacks {', '.join(missing)}; it has {', '.join(row)}"
            )


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
