"""How runs went: training loss and test accuracy over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecoformer.report.runs import Run
from ecoformer.report.style import colour_of, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves_figure(runs: Sequence[Run]) -> Figure:
    """Two panels, one line a run."""
    if not runs:
        raise ValueError("there is no run to draw")
    with drawing():
        figure = new_figure(7.6, 3.2)
        panels = figure.subplots(1, 2)
        wanted = (("train", "loss", "Training loss", 1.0), ("test", "accuracy", "Test accuracy (%)", 100.0))
        for axes, (split, name, label, factor) in zip(panels, wanted, strict=True):
            for i, run in enumerate(runs):
                course = run.course(split, name)
                steps, values = [step for step, _ in course], [factor * value for _, value in course]
                marker = "o" if len(course) < 12 else ""
                axes.plot(steps, values, color=colour_of(run.mechanism, i), marker=marker, label=run.name)
            axes.set_xlabel("Step")
            axes.set_ylabel(label)
            axes.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
