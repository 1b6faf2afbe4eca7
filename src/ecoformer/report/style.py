"""How pictures look: one set of colours and fonts, and files by their suffix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
INK, FAINT = "#222222", "#d9d9d9"
# Okabe and Ito's colours, which stay apart for colour-blind readers; yellow is too pale for lines.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#999999",
)
MECHANISM_COLOURS = {
    "softmax": INK,
    "eco": GREEN,
    "performer": BLUE,
    "linformer": ORANGE,
    "reformer": RED,
    "combiner": PURPLE,
    "fp_eco": SKY,
}
MARKERS = "osD^vPX*<>"
_SPARE = (SKY, PURPLE, GREY, BLUE, ORANGE, RED)
_SAME = {"transformer": "softmax", "msa": "softmax", "ecoformer": "eco"}
_NAMES = {
    "softmax": "Softmax",
    "msa": "MSA",
    "eco": "EcoFormer",
    "klsh_eco": "KLSH-EcoFormer",
    "lsh_eco": "LSH-EcoFormer",
    "bi_eco": "Bi-EcoFormer",
    "fp_eco": "FP-EcoFormer",
}
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "pdf.fonttype": 42,
    "svg.hashsalt": "ecoformer",
    "savefig.dpi": 200,
    "path.simplify": False,
    "text.parse_math": False,  # a name may hold dollars
}


def readable(name: str) -> str:
    """A mechanism's or a model's name as a caption has it."""
    key = name.lower()
    if key.startswith("pvt_v2_"):
        return f"PVTv2-{key.removeprefix('pvt_v2_').upper()}"
    return _NAMES.get(key, name if any(c.isupper() for c in name) else name.capitalize())


def colour_of(mechanism: str, position: int) -> str:
    """Always the same for a known mechanism, whatever else is in the picture."""
    return MECHANISM_COLOURS.get(
        _SAME.get(mechanism.lower(), mechanism.lower()), _SPARE[position % len(_SPARE)]
    )


def check_target(path: str | Path) -> Path:
    """A file that a picture can be written to; asked before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        got = f"got {target.suffix!r}" if target.suffix else "it has no suffix"
        raise ValueError(f"{target} must end in {', '.join(SUFFIXES)}, {got}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    _matplotlib()
    return target


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings for what is drawn within, and the user's again afterwards."""
    with _matplotlib().rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to nobody's window."""
    _matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF by the suffix; the same figure gives the same file."""
    target = check_target(path)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with drawing():
        figure.savefig(target, metadata=dates.get(target.suffix.lower()))
    return target


def quiet_grid(axes: Axes, axis: Any) -> None:
    """Faint lines behind the data, along one axis."""
    axes.grid(axis=axis, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'ecoformer[figures]'") from error
    return matplotlib
