"""Draw the figures of README.md and docs/choosing.md from result files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from record import figures_of

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"native": "#555555", "softmax": "#d55e00", "eco": "#56b4e9", "sharp_eco": "#009e73"}
TIMED = {
    ("softmax", "sdpa"): "softmax (SDPA)",
    ("performer", "eager"): "performer",
    ("linformer", "eager"): "linformer",
    ("eco", "eager"): "eco, plain PyTorch",
    ("eco", "cpu"): "eco, CPU kernels",
}


OTHERS = "#999999"


def main() -> None:
    draw("energy_and_time", (energy, times), yscale="log")
    draw("accuracy_and_energy", (pictures, lists))


def draw(name: str, panels: tuple[Callable[[Any], None], ...], **scales: str) -> None:
    """Write docs/figures/NAME.svg with one panel beside the other; the x axis is logarithmic."""
    with rc_context({"svg.hashsalt": "ecoformer", "font.size": 10}):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            axes.set(xscale="log", **scales)
            panel(axes)
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        path = ROOT / "docs" / "figures" / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path.relative_to(ROOT)}")


def energy(axes: Any) -> None:
    rows = [row for row in figures_of("gains") if row["model"] == "PVTv2-B0"]
    sizes = [row["size"] for row in rows]
    for name, colour in COLOURS.items():
        joules = [row["energy_pj"][name] / 1e9 for row in rows]
        axes.plot(sizes, joules, marker="o", color=colour)
        up = {"eco": 3, "sharp_eco": -10}.get(name, -3)  # the two lie on top of each other
        axes.annotate(name, (sizes[-1], joules[-1]), (6, up), textcoords="offset points", color=colour)
    axes.set(title="Energy of an image, PVTv2-B0, mJ", xlabel="pixels a side", xlim=(205, 1750))
    axes.set_xticks(sizes, list(map(str, sizes)))


def times(axes: Any) -> None:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in figures_of("lengths_cpu")["lengths"]:
        found.setdefault((row["mechanism"], row["backend"]), {})[row["shape"][2]] = row["median_ms"]
    for (key, label), colour in zip(
        TIMED.items(), ("#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2"), strict=True
    ):
        lengths = sorted(found[key])
        ms = [found[key][tokens] for tokens in lengths]
        axes.plot(lengths, ms, marker="o", markersize=4, color=colour)
        axes.annotate(label, (lengths[-1], ms[-1]), (6, -3), textcoords="offset points", color=colour)
    axes.set(title="Attention on two CPU threads, 8 heads, ms", xlabel="tokens", xlim=(50, 90_000))
    axes.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])


def pictures(axes: Any) -> None:
    """CIFAR-100: points behind softmax on the same seed and data, so that runs on different data compare."""
    found: dict[str, list[tuple[float, float]]] = {}
    for file, base in (("cifar100_sharp", None), ("cifar100", None), ("cifar100_others", "cifar100")):
        softmax = {
            r["seed"]: r["accuracy"] for r in figures_of(base or file)["rows"] if r["label"] == "softmax"
        }
        rows = figures_of(file)["rows"]
        known = {row["label"] for row in rows} & set(found)
        for row in rows:
            if row["label"] not in known:
                point = (row["energy_pj"] / 1e9, 100 * (row["accuracy"] - softmax[row["seed"]]))
                found.setdefault(row["label"], []).append(point)
    del found["eco:bias=tight"]
    places = {"lsh_eco": (-6, 8), "klsh_eco": (8, -6), "sharp_eco": (-40, 34), "eco": (8, -2)}
    places |= {"native": (6, -10), "reformer": (6, -3), "bi_eco": (3, 6), "combiner": (6, -3)}
    _scatter(axes, found, places)
    axes.set(
        title="CIFAR-100: points to softmax",
        xlabel="energy of an image, mJ",
        xlim=(0.62, 2.3),
        ylim=(-2, 0.5),
    )
    axes.set_xticks([0.8, 1, 1.2, 1.6], ["0.8", "1.0", "1.2", "1.6"])


def lists(axes: Any) -> None:
    """ListOps: accuracy over energy."""
    found: dict[str, list[tuple[float, float]]] = {}
    sharp = figures_of("listops_sharp")["rows"]
    others = [row for row in figures_of("listops")["rows"] if row["label"] not in ("softmax", "eco:local=7")]
    for row in (*sharp, *others):
        point = (row["energy_pj"] / 1e9, 100 * row["accuracy"])
        found.setdefault(row["label"], []).append(point)
    _scatter(axes, found, {"sharp_eco": (-14, 8), "reformer": (-20, 8), "linformer": (-20, -14)})
    axes.set(title="ListOps: accuracy, %", xlabel="energy of a sample, mJ", xlim=(0.45, 16), ylim=(0, 42))
    axes.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])


def _scatter(
    axes: Any, found: dict[str, list[tuple[float, float]]], moved: dict[str, tuple[int, int]]
) -> None:
    """The mean over seeds of each mechanism, and a line from the lowest to the highest."""
    for label, points in found.items():
        colour = COLOURS.get(label, OTHERS)
        x, ys = points[0][0], [y for _, y in points]
        axes.plot([x, x], [min(ys), max(ys)], color=colour, linewidth=1)
        axes.plot([x], [mean(ys)], marker="o", color=colour)
        name = f"{label} ({len(ys)} seeds)" if len(ys) > 1 else label
        offset = moved.get(label, (6, -3))
        axes.annotate(name, (x, mean(ys)), offset, textcoords="offset points", color=colour, fontsize=9)


if __name__ == "__main__":
    main()
