"""Figures: shares of a model's parts, and accuracy against energy.

Each figure function takes plain rows and returns a matplotlib figure; `save` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.files import replacing
from ecoformer.third_party import import_library

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
SUFFIXES = (".png", ".svg", ".pdf")
_PARTS = ("attention", "ffn", "other")
_COLOURS = ["#8a8f98", "#e69f00", "#009e73", "#3f8fe0", "#cc79a7", "#d55e00", "#b3a400", "#7a6ff0"]
"""Readable on white and on black, also by the colour-blind."""
_SETTINGS: Any = {
    "axes.prop_cycle": f"cycler('color', {_COLOURS})",
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d9d9d9",
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "ecoformer",
    "text.parse_math": False,  # names are not formulas, whatever dollar signs they hold
}


@contextmanager
def drawing() -> Iterator[None]:
    """Our matplotlib settings inside the block, the user's own afterwards."""
    with import_library("matplotlib.style").context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def check_target(path: str | Path) -> Path:
    """Check that a figure can be written to `path`, before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{target} must end in {', '.join(SUFFIXES)}, got {target.suffix!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    with drawing():
        return target


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF by its suffix; the same figure gives the same file."""
    target = check_target(path)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    kind = target.suffix.lower()
    with replacing(target) as temporary, drawing():
        figure.savefig(temporary, format=kind[1:], metadata=dates.get(kind))
    return target


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
            for part in _PARTS:
                shares = [100 * row[part] / (total or 1) for row, total in zip(own, totals, strict=True)]
                bars = axes.bar(names, shares, 0.7, bottom=before, label=part)
                texts = [f"{share:.0f}%" if share > 8 else "" for share in shares]
                axes.bar_label(bars, texts, label_type="center", size=8)
                before = [low + share for low, share in zip(before, shares, strict=True)]
            axes.bar_label(bars, [f"{total * 1e-9:.3g} mJ" for total in totals], padding=3, size=8)
            axes.set_title(mechanism, pad=18)
        panels[0].set(ylim=(0, 100), ylabel="Share of energy (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def accuracy_figure(rows: Rows) -> Figure:
    """Accuracy against energy, one point a row: `label`, `energy_pj`, `accuracy` from 0 to 1."""
    with drawing():
        figure = new_figure(5.4, 3.4)
        axes = figure.subplots()
        for row in rows:
            axes.plot(row["energy_pj"] * 1e-9, 100 * row["accuracy"], "o", label=row["label"])
        axes.set(xlabel="Energy per sample (mJ)", ylabel="Accuracy (%)")
        axes.margins(0.1)
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure
