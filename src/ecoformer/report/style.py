"""The look of our figures: colours, fonts and names, and saving to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for lines.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
INK, GREY = "#222222", "#999999"
_COLOURS = {"eco": GREEN, "softmax": INK, "performer": BLUE, "linformer": ORANGE, "reformer": RED}
_OTHER_COLOURS = ("#56B4E9", "#CC79A7", GREY)
_MARKERS = "osD^vPX*<>"
_SETTINGS: Any = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d9d9d9",
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "ecoformer",
    "savefig.dpi": 200,
    "text.parse_math": False,  # names are not formulas, whatever dollar signs they hold
}


def look_of(name: str, position: int) -> dict[str, Any]:
    """Colour, marker and label of a line; known mechanisms have the same colour in every figure."""
    colour = _COLOURS.get(name.lower(), _OTHER_COLOURS[position % len(_OTHER_COLOURS)])
    return {"color": colour, "marker": _MARKERS[position % len(_MARKERS)], "label": name}


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
