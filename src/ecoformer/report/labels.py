"""Labels that stand beside their lines and points, and not on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Mark = tuple[float, float, str, str]
"""x, y, text and colour."""

_GAP = 12.0
"""Least distance in points between the middles of two labels, one above the other."""
_PLACES = (
    (8, 0, "left", "center"),
    (-8, 0, "right", "center"),
    (0, 8, "center", "bottom"),
    (0, -8, "center", "top"),
    (7, 7, "left", "bottom"),
    (7, -7, "left", "top"),
    (-7, 7, "right", "bottom"),
    (-7, -7, "right", "top"),
)
"""Offsets in points, and how the text is aligned there."""


def label_ends(axes: Axes, ends: Sequence[Mark]) -> None:
    """Names at the right ends of lines, moved apart where lines end close to each other."""
    figure: Any = axes.get_figure()
    figure.draw_without_rendering()
    middles = [float(axes.transData.transform((x, y))[1]) * 72 / figure.dpi for x, y, _, _ in ends]
    places = spread(middles, _GAP)
    moved = any(abs(place - middle) > 3 for place, middle in zip(places, middles, strict=True))
    for (x, y, text, colour), middle, place in zip(ends, middles, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            text,
            (x, y),
            xytext=(20 if moved else 8, place - middle),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops=leader | {"relpos": (0.0, 0.5)} if moved else None,
        )


def spread(middles: Sequence[float], gap: float) -> list[float]:
    """The nearest places, in the same order, that are at least `gap` apart."""
    order = sorted(range(len(middles)), key=lambda i: middles[i])
    blocks: list[list[int]] = []
    for i in order:
        blocks.append([i])
        while len(blocks) > 1 and _start(blocks[-1], middles, gap) < _end(blocks[-2], middles, gap) + gap:
            last = blocks.pop()
            blocks[-1] += last
    places = [0.0] * len(middles)
    for block in blocks:
        first = _start(block, middles, gap)
        for position, i in enumerate(block):
            places[i] = first + position * gap
    return places


def _start(block: Sequence[int], middles: Sequence[float], gap: float) -> float:
    """The lowest place of a run of labels that is centred on what it labels."""
    return sum(middles[i] for i in block) / len(block) - gap * (len(block) - 1) / 2


def _end(block: Sequence[int], middles: Sequence[float], gap: float) -> float:
    return _start(block, middles, gap) + gap * (len(block) - 1)


def label_points(axes: Axes, points: Sequence[Mark]) -> None:
    """Names beside points, each at the first place where it meets no other name, no point and no border."""
    from matplotlib.transforms import Bbox

    figure: Any = axes.get_figure()
    figure.draw_without_rendering()
    taken = []
    for x, y, _, _ in points:
        px, py = axes.transData.transform((x, y))
        taken.append(Bbox.from_extents(px - 6, py - 6, px + 6, py + 6))
    inside = axes.get_window_extent()
    for x, y, text, colour in points:
        best: tuple[int, Any, Any] | None = None
        for dx, dy, ha, va in _PLACES:
            label = axes.annotate(
                text, (x, y), (dx, dy), textcoords="offset points", ha=ha, va=va, color=colour
            )
            box = label.get_window_extent()
            out = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and box.y0 >= inside.y0)
            bad = sum(box.overlaps(other) for other in taken) + out
            if best is None or bad < best[0]:
                if best is not None:
                    best[1].remove()
                best = (bad, label, box)
            else:
                label.remove()
            if bad == 0:
                break
        if best is not None:
            taken.append(best[2])
