"""The paper's figure 2: attention, FFN and the rest as shares of each model's energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.files import replacing
from ecoformer.third_party import import_library

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
SUFFIXES = (".png", ".svg", ".pdf")
PARTS = ("attention", "ffn", "other")
_SETTINGS: Any = {
    "axes.prop_cycle": "cycler('color', ['#8a8f98', '#e69f00', '#009e73'])",
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "ecoformer",
}


def check_target(path: Path) -> None:
    """Refuse a file that cannot be drawn, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES)}, got {path.suffix!r}")
    import_library("matplotlib.style")


def save_shares(rows: Rows, path: Path) -> None:
    """Draw the shares into a PNG, SVG or PDF file; the same rows give the same file."""
    check_target(path)
    kind = path.suffix.lower()
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with import_library("matplotlib.style").context(_SETTINGS), replacing(path) as temporary:
        shares_figure(rows).savefig(temporary, format=kind[1:], metadata=dates.get(kind))


def shares_figure(rows: Rows) -> Figure:
    """Shares of attention, FFN and the rest in each model's energy, one panel a mechanism.

    A row holds `model`, `mechanism`, and `attention`, `ffn` and `other` in pJ. The total is above its bar.
    """
    from matplotlib.figure import Figure

    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    figure = Figure(figsize=(max(3.4, 0.8 * len(rows) + 1.0), 3.1), layout="constrained")
    panels = figure.subplots(1, len(mechanisms), sharey=True, squeeze=False)[0]
    for axes, mechanism in zip(panels, mechanisms, strict=True):
        own = [row for row in rows if row["mechanism"] == mechanism]
        totals = [sum(row[part] for part in PARTS) for row in own]
        names, before = [row["model"] for row in own], [0.0] * len(own)
        for part in PARTS:
            shares = [100 * row[part] / total for row, total in zip(own, totals, strict=True)]
            bars = axes.bar(names, shares, 0.7, bottom=before, label=part)
            texts = [f"{share:.0f}%" if share > 8 else "" for share in shares]
            axes.bar_label(bars, texts, label_type="center", size=8)
            before = [low + share for low, share in zip(before, shares, strict=True)]
        axes.bar_label(bars, [f"{total * 1e-9:.3g} mJ" for total in totals], padding=3, size=8)
        axes.set_title(mechanism, pad=18)
    panels[0].set(ylim=(0, 100), ylabel="Share of energy (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
