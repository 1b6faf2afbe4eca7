"""Figures: shares of a model's parts, cost against size, accuracy against energy, BitFusion's bars.

Each function takes plain rows and returns a matplotlib figure; `style.save` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecoformer.bitfusion import Total
from ecoformer.report import style
from ecoformer.report.style import drawing, new_figure, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parts = Mapping[str, tuple[str, Sequence[float]]]
"""Colour and values of each part of a bar."""

QUANTITIES = {"energy_pj": ("Energy", "mJ"), "mul": ("Multiplications", "10⁹"), "add": ("Additions", "10⁹")}
"""Name and unit of 1e9 of what the ledger counts."""
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
    number of operations). The total stands above its bar.
    """
    name, unit = QUANTITIES[quantity]
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
                    [100 * row[part] / (total or 1) for row, total in zip(own, totals, strict=True)],
                )
                for part, label, colour in (
                    ("attention", "Attention", style.BLUE),
                    ("ffn", "FFN", style.ORANGE),
                    ("other", "Other", style.GREY),
                )
            }
            names = [readable(row["model"]) for row in own]
            _stacked(axes.bar, axes, names, parts, [f"{_three(total * 1e-9)} {unit}" for total in totals])
            axes.set_xticks(range(len(own)), names)
            axes.set_title(readable(mechanism), pad=18)
        panels[0].set_ylim(0, 100)
        panels[0].set_ylabel(f"Share of {name.lower()} (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def sweep_figure(
    rows: Sequence[Mapping[str, Any]], parameter: str = "resolution", quantity: str = "energy_pj"
) -> Figure:
    """A quantity against a parameter's value, both logarithmic, one line a mechanism.

    A row holds `mechanism`, `value`, and the quantity: `energy_pj`, `mul` or `add`.
    """
    name, unit = QUANTITIES[quantity]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["mechanism"], []).append((row["value"], row[quantity] * 1e-9))
    with drawing():
        from matplotlib.ticker import LogLocator

        figure = new_figure(5.6, 3.5)
        axes = figure.subplots()
        colours = {mechanism: style.colour_of(mechanism, i) for i, mechanism in enumerate(lines)}
        highest_first = sorted(lines, key=lambda mechanism: -max(lines[mechanism])[1])
        for i, mechanism in enumerate(highest_first):
            xs, ys = zip(*sorted(lines[mechanism]), strict=True)
            axes.plot(
                xs,
                ys,
                color=colours[mechanism],
                marker=style.MARKERS[i % len(style.MARKERS)],
                label=readable(mechanism),
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({row["value"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        low, high = axes.get_ylim()
        if high > 3 * max(low, 0.0):  # a shorter logarithmic axis has no round numbers
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axes.minorticks_off()
        axes.set_xlabel(_AXES.get(parameter, parameter))
        axes.set_ylabel(f"{name} ({unit})")
        axes.grid(axis="y")
        figure.legend(loc="outside right upper")
    return figure


def accuracy_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy against energy, one point a row: `label`, `energy_pj`, `accuracy` in per cent."""
    with drawing():
        figure = new_figure(5.4, 3.4)
        axes = figure.subplots()
        for i, row in enumerate(rows):
            axes.plot(
                [row["energy_pj"] * 1e-9],
                [row["accuracy"]],
                style.MARKERS[i % len(style.MARKERS)],
                color=style.colour_of(row["label"], i),
                markersize=7,
                label=readable(row["label"]),
            )
        axes.set_xlabel("Energy of a forward pass (mJ)")
        axes.set_ylabel("Accuracy (%)")
        axes.margins(0.1)
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure


def bitfusion_figure(bars: Mapping[str, Total], *, divide_by: int = 1) -> Figure:
    """Where time and energy go on BitFusion, one bar each for every name.

    `divide_by` is for the paper's table, whose latency is that of 16 rows divided by 16.
    """
    totals = bars.values()
    time = {
        "Compute": (style.BLUE, [t.compute_cycles / t.array.frequency_hz / divide_by for t in totals]),
        "Stalls": (style.SKY, [t.stall_cycles / t.array.frequency_hz / divide_by for t in totals]),
    }
    energy = {
        "Array": (style.GREEN, [t.energy.core * 1e-9 for t in totals]),
        "Buffers": (style.ORANGE, [t.energy.buffers * 1e-9 for t in totals]),
        "DRAM": (style.RED, [t.energy.dram * 1e-9 for t in totals]),
    }
    with drawing():
        figure = new_figure(7.2, 1.25 + 0.42 * len(bars))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, label, parts in ((panels[0], "Time ({}s)", time), (panels[1], "Energy ({}J)", energy)):
            sums = [sum(values) for values in zip(*(values for _, values in parts.values()), strict=True)]
            prefix, factor = _scale(max(sums))
            scaled = {
                name: (colour, [v * factor for v in values]) for name, (colour, values) in parts.items()
            }
            _stacked(axes.barh, axes, list(bars), scaled, [_three(total * factor) for total in sums])
            axes.set_xlabel(label.format(prefix))
            axes.set_xlim(0, 1.16 * max(sums) * factor)
            axes.grid(axis="x")
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, handlelength=1, borderpad=0)
        panels[0].set_yticks(range(len(bars)), list(bars))
        panels[0].invert_yaxis()
    return figure


def _stacked(draw: Any, axes: Axes, names: Sequence[str], parts: Parts, totals: Sequence[str]) -> None:
    """Bars of parts on each other, with shares in per cent on them and totals at their ends."""
    before = [0.0] * len(names)
    sums = [sum(values) for values in zip(*(values for _, values in parts.values()), strict=True)]
    start = "bottom" if draw == axes.bar else "left"
    for label, (colour, values) in parts.items():
        bars = draw(
            range(len(names)), values, 0.7, color=colour, label=label, edgecolor="white", **{start: before}
        )
        shares = [100 * value / (total or 1) for value, total in zip(values, sums, strict=True)]
        wide = [value > 0.08 * max(sums) for value in values]
        texts = [f"{share:.0f}%" if fits else "" for share, fits in zip(shares, wide, strict=True)]
        axes.bar_label(bars, texts, label_type="center", color=_on(colour), size=8)
        before = [low + value for low, value in zip(before, values, strict=True)]
    axes.bar_label(bars, totals, padding=3, size=8)


def _scale(largest: float) -> tuple[str, float]:
    """An SI prefix that leaves the largest number between 1 and 1000."""
    for prefix, factor in (("", 1.0), ("m", 1e3), ("µ", 1e6), ("n", 1e9)):
        if largest * factor >= 1:
            return prefix, factor
    return "p", 1e12


def _three(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def _on(colour: str) -> str:
    """Ink or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return style.INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
