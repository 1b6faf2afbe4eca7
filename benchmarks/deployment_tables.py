"""Tables about exported and quantised models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from record import Table, figures_of

NAMES = ("native", "softmax", "eco", "sharp_eco")


def deployment_latency() -> Table:
    """Milliseconds by runtime and size, and the size of the file."""
    figures = figures_of("deployment")
    files = [f"{figures['sizes'][name] / 1e6:.1f}" for name in NAMES]
    rows = [
        [row["runtime"], str(row["size"]), *(_number(row["median_ms"].get(name)) for name in NAMES)]
        for row in figures["latency"]
    ]
    first = ["", "", "", f"{min(figures['start_up_s']):.2f}"]
    start = ["seconds from starting Python to the first result, ONNX Runtime", "224", *first]
    return [["runtime", "pixels", *NAMES], *rows, ["ONNX file, MB", "any", *files], start]


def deployment_speed() -> Table:
    """How many times as fast as native and softmax."""
    pairs = [f"{name} over {other}" for name in ("eco", "sharp_eco") for other in ("native", "softmax")]
    rows = [
        [
            row["runtime"],
            str(row["size"]),
            *(f"{row['speed'][p]:.2f}" if p in row["speed"] else "" for p in pairs),
        ]
        for row in figures_of("deployment")["latency"]
    ]
    return [["runtime", "pixels", *pairs], *rows]


def deployment_checks() -> Table:
    """Errors of ONNX Runtime against PyTorch."""
    rows = [
        [
            row["model"],
            row["attention"],
            str(row["checked"]),
            f"{row['error']:.0e}",
            f"{row['same_top1']:.0%}",
        ]
        for row in figures_of("deployment_vit")["checks"] + figures_of("deployment")["checks"]
    ]
    return [["model", "attention", "batches", "largest error", "same top-1"], *rows]


def deployment_runtimes() -> Table:
    """What other runtimes computed by slower code, at 224 pixels."""
    rows = [
        [runtime, name, note]
        for runtime, sizes in figures_of("deployment")["notes"].items()
        for name, note in sizes.get("224", {}).items()
    ]
    return [["runtime", "attention", "what was left"], *rows]


def deployment_int8() -> Table:
    """Milliseconds in ONNX Runtime, in fp32 and int8, and how many times as fast as native in int8."""
    latency, own = figures_of("deployment_int8")["latency"], "native, by ONNX Runtime"
    head = [str(row["size"]) for row in latency]
    rows = []
    for label in (*(f"{name}, {numbers}" for numbers in ("fp32", "int8") for name in NAMES), own):
        cells = []
        for row in latency:
            speed = row["speed"].get(f"{label} over native, int8")
            times = "" if speed is None else f" ({speed:.2f})"
            cells.append(f"{row['median_ms'][label]:.1f}{times}" if label in row["median_ms"] else "")
        rows.append([label, *cells])
    return [["ms (times as fast as native, int8)", *(f"{size} pixels" for size in head)], *rows]


def cpu_integer() -> Table:
    """The integer kernels against the fp32 kernel: elapsed time on two threads, and CPU time of one."""
    head = ["batch, heads, tokens, channels", "fp32", "int8", "int8 with packing"]
    times = ["times as fast", "with packing", "times as fast, CPU time", "with packing, CPU time"]
    rows = []
    for row in figures_of("cpu_integer")["attention"]:
        found = [row[how]["median"] for how in ("2 threads, elapsed", "1 thread, CPU time")]
        shown = [f"{ms:.3g}" for ms in found[0]["ms"].values()]
        shown += [f"{ratio:.1f}" for each in found for ratio in each["ratios"].values()]
        rows.append([", ".join(map(str, row["shape"])), *shown])
    return [[*head, *times], *rows]


def accuracies(name: str) -> Table:
    """Accuracy in fp32 and int8."""
    keys = ("fp32", "int8", "agree", "resolves")
    rows = [[row["attention"]["name"], *(f"{row[key]:.2%}" for key in keys)] for row in figures_of(name)]
    return [["attention", "fp32", "int8", "same answer", "resolves"], *rows]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


MAKERS: dict[str, Callable[[], Table]] = {
    "deployment_latency": deployment_latency,
    "deployment_speed": deployment_speed,
    "deployment_checks": deployment_checks,
    "deployment_runtimes": deployment_runtimes,
    "deployment_int8": deployment_int8,
    "cpu_integer": cpu_integer,
    "int8_mosaic": partial(accuracies, "int8_mosaic"),
    "int8_cifar100": partial(accuracies, "int8_cifar100"),
    "int8_imdb": partial(accuracies, "int8_imdb"),
}
