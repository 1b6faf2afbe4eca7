"""The look of our figures: colours, fonts and names, and saving to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
INK = "#222222"
# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for lines.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
RED, SKY, PURPLE, GREY = "#D55E00", "#56B4E9", "#CC79A7", "#999999"
MARKERS = "osD^vPX*<>"
_COLOURS = {"eco": GREEN, "ecoformer": GREEN, "fp_eco": SKY}
_COLOURS |= dict.fromkeys(("softmax", "transformer", "msa"), INK)
_COLOURS |= {"performer": BLUE, "linformer": ORANGE, "reformer": RED, "combiner": PURPLE}
_OTHER_COLOURS = (SKY, GREY, PURPLE, BLUE, ORANGE, RED)
_NAMES = {
    "msa": "MSA",
    "eco": "EcoFormer",
    "klsh_eco": "KLSH-EcoFormer",
    "lsh_eco": "LSH-EcoFormer",
    "bi_eco": "Bi-EcoFormer",
    "fp_eco": "FP-EcoFormer",
}
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "ecoformer",
    "savefig.dpi": 200,
    "text.parse_math": False,  # names are not formulas, whatever dollar signs they hold
}


def readable(name: str) -> str:
    """A mechanism's or a model's name for a caption."""
    key = name.lower()
    if key.startswith("pvt_v2_"):
        return f"PVTv2-{key.removeprefix('pvt_v2_').upper()}"
    return _NAMES.get(key, name if any(c.isupper() for c in name) else name.capitalize())


def colour_of(mechanism: str, position: int) -> str:
    """The same colour for a known mechanism in every figure."""
    return _COLOURS.get(mechanism.lower(), _OTHER_COLOURS[position % len(_OTHER_COLOURS)])


def check_target(path: str | Path) -> Path:
    """Check that a figure can be written to `path`, before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{target} must end in {', '.join(SUFFIXES)}, got {target.suffix!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    with drawing():
        return target


@contextmanager
def drawing() -> Iterator[None]:
    """Our matplotlib settings inside the block, the user's own afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'ecoformer[figures]'") from error
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF by its suffix; the same figure gives the same file."""
    target = check_target(path)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with drawing():
        figure.savefig(target, metadata=dates.get(target.suffix.lower()))
    return target
