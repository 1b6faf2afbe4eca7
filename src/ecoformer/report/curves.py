"""How runs went: training loss and test accuracy over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecoformer.report.labels import label_ends
from ecoformer.report.runs import Run
from ecoformer.report.style import colour_of, drawing, new_figure, quiet_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves_figure(runs: Sequence[Run]) -> Figure:
    """Two panels, one line a run; a run's name stands at the end of its line."""
    if not runs:
        raise ValueError("there is no run to draw")
    with drawing():
        figure = new_figure(7.6, 3.0)
        panels = figure.subplots(1, 2)
        wanted = (("train", "loss", "Training loss", 1.0), ("test", "accuracy", "Test accuracy (%)", 100.0))
        for axes, (split, name, label, factor) in zip(panels, wanted, strict=True):
            ends = []
            for i, run in enumerate(runs):
                points = [(step, value * factor) for step, value in run.course(split, name)]
                if not points:
                    continue
                colour = colour_of(run.mechanism, i)
                marker = "o" if len(points) < 12 else ""
                axes.plot(
                    *zip(*points, strict=True), color=colour, linewidth=1.6, marker=marker, markersize=4
                )
                ends.append((*points[-1], run.name, colour))
            axes.set_xlabel("Step")
            axes.set_ylabel(label)
            quiet_grid(axes, "y")
            label_ends(axes, ends)
    return figure
