"""Time and memory against the number of tokens, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ecoformer.benchmarking.results import Row, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X"


def plot_lengths(run: Run, path: Path) -> None:
    """Draw time and peak memory of every contestant against N, both axes logarithmic."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'ecoformer[figures]'") from error

    labels = list(dict.fromkeys(row.label for row in run.rows if row.timing))
    if not labels:
        raise ValueError("there is no time to draw: every contestant failed")
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2)
    for index, label in enumerate(labels):
        rows = sorted((r for r in run.rows if r.label == label and r.timing), key=_tokens)
        style = {"marker": _MARKERS[index % len(_MARKERS)], "color": f"C{index % 10}", "label": label}
        _draw_times(times, rows, style)
        weighed = [r for r in rows if r.peak_mb]
        memory.plot([_tokens(r) for r in weighed], [r.peak_mb for r in weighed], **style)
    batch, heads, _, dim = run.rows[0].setting["shape"]
    what = "forward and backward" if run.rows[0].setting["backward"] else "forward"
    order = ", causal" if run.rows[0].setting["causal"] else ""
    figure.suptitle(
        f"B = {batch}, H = {heads}, D = {dim}, {run.rows[0].setting['dtype']}, {what}{order}; {run.device}"
    )
    for axes, title in ((times, "milliseconds a call (quartiles shaded)"), (memory, "peak memory, MB")):
        _dress(axes, title, sorted({_tokens(row) for row in run.rows}))
    figure.legend(*times.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def _tokens(row: Row) -> int:
    return int(row.setting["shape"][2])


def _draw_times(axes: Axes, rows: list[Row], style: dict[str, str]) -> None:
    timed = [(_tokens(row), row.timing) for row in rows if row.timing]
    x = [tokens for tokens, _ in timed]
    axes.plot(x, [t.median_ms for _, t in timed], **style)  # type: ignore[arg-type]
    low, high = [t.low_ms for _, t in timed], [t.high_ms for _, t in timed]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _dress(axes: Axes, title: str, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens N")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
