"""The tables of docs/kernels_gpu.md; `result_tables.py` fills them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from record import Table, figures_of

CONTESTANTS = {
    ("explicit", "N x N matrix"): "softmax, N × N matrix",
    ("softmax", "sdpa"): "softmax, SDPA",
    ("performer", "eager"): "performer",
    ("eco", "eager"): "eco, eager",
    ("eco", "triton"): "eco, Triton",
}


def gpu_times() -> Table:
    """Attention from tokens to output: CUDA graphs, and in brackets calls from Python."""
    kernels, names = figures_of("gpu_kernels"), ("triton", "sdpa", "compiled", "eager")
    bandwidth = kernels["ceilings"]["rows"][0]["copy_tb_per_s"]

    def cells(row: dict[str, Any]) -> list[str]:
        ms, called = row["ms"], row["called_ms"]
        times = [f"{1e3 * ms[name]:.0f} ({1e3 * called[name]:.0f})" if name in ms else "" for name in names]
        floor = row["floor_bytes"] / bandwidth / 1e6
        ratios = [f"{ms[name] / ms['triton']:.1f}" if name in ms else "" for name in ("sdpa", "compiled")]
        return [_shape(row), _passes(row), *times, f"{floor:.1f}" if floor < 10 else f"{floor:.0f}", *ratios]

    head = ["B, H, N, D", "", "Triton", "SDPA", "eager, compiled", "eager", "floor", "SDPA / Triton"]
    return [[*head, "compiled / Triton"], *map(cells, kernels["time"]["rows"])]


def gpu_growth() -> Table:
    """Time and memory against the number of tokens."""
    rows = {(row["shape"][2], row["backward"]): row for row in figures_of("gpu_kernels")["growth"]["rows"]}
    table = [["tokens", "forward", "forward and backward", "peak memory"]]
    for tokens in sorted({tokens for tokens, _ in rows}):
        times = [f"{1e3 * rows[tokens, backward]['ms']['triton']:.0f} µs" for backward in (False, True)]
        table.append([f"{tokens:,}", *times, f"{rows[tokens, True]['peak_gb']:.1f} GB"])
    return table


def gpu_causal() -> Table:
    """Causal order against causal SDPA."""
    rows = figures_of("gpu_kernels")["causal"]["rows"]
    times = ([f"{1e3 * row['ms'][name]:.0f}" for name in ("triton", "sdpa")] for row in rows)
    found = [[_shape(row), _passes(row), *cells] for row, cells in zip(rows, times, strict=True)]
    return [["B, H, N, D", "", "Triton, causal", "SDPA, causal"], *found]


def gpu_crossover() -> Table:
    """From how many tokens on hashed attention is faster than SDPA."""
    figures, found = figures_of("lengths_gpu"), dict[str, list[str]]()
    for row in (*figures["crossover"], *figures["crossover_of_graphs_beside_other_work"]):
        key = ", ".join(str(row[name]) for name in ("batch", "heads", "channels"))
        found.setdefault(key, []).append("-" if row["slower_at"] is None else f"{row['tokens']:,}")
    head = [f"{how}, {what}" for how in ("calls", "graphs") for what in ("forward", "with backward")]
    return [["batch, heads, channels", *head], *([key, *cells] for key, cells in found.items())]


def gpu_compiled() -> Table:
    """Compiled models, images a second."""
    return _models({part: facts["rows"] for part, facts in figures_of("gpu_models_compiled").items()})


def gpu_uncompiled() -> Table:
    """Models without the compiler, images a second."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, facts in figures_of("gpu_models").items():
        size, more = ("224", ", training") if part == "train" else (part, "")
        for row in facts["rows"]:
            parts.setdefault(f"{size}, batch {row['batch']}{more}", []).append(row)
    return _models(parts)


def gpu_energy() -> Table:
    """Energy of attention at the first shape, and of a compiled model for one image."""
    attention = {(row["mechanism"], row["backend"]): row for row in figures_of("gpu_energy")["rows"]}
    model = _by_contestant(figures_of("gpu_models_compiled")["224, batch 256"]["rows"])
    cells: list[list[str]] = [["attention, mJ"], ["compiled model, mJ an image"]]
    for key in CONTESTANTS:
        cells[0].append(f"{1e3 * attention[key]['energy']['joules']:.0f}" if key in attention else "")
        joules = model[key].get("energy", {}).get("per_item_joules") if key in model else None
        cells[1].append("" if joules is None else f"{1e3 * joules:.1f}")
    return [["", *CONTESTANTS.values()], *cells]


def _models(parts: dict[str, list[dict[str, Any]]]) -> Table:
    table = [["pixels, batch", *CONTESTANTS.values(), "to SDPA"]]
    for part, rows in parts.items():
        here = _by_contestant(rows)
        cells = ["not run" if key not in here else _speed(here[key]) for key in CONTESTANTS]
        table.append([part, *cells, f"{here['eco', 'triton']['ratio_to_sdpa']:.2f}"])
    return table


def _by_contestant(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["mechanism"], row["backend"].removesuffix(", compiled")): row for row in rows}


def _speed(row: dict[str, Any]) -> str:
    if row.get("images_per_s"):
        return f"{row['images_per_s']:.0f}"
    return "out of memory" if "memory" in str(row.get("failure")) else "withdrawn"


def _shape(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row["shape"]))


def _passes(row: dict[str, Any]) -> str:
    return "forward and backward" if row["backward"] else "forward"


MAKERS: dict[str, Callable[[], Table]] = {
    "gpu_times": gpu_times,
    "gpu_growth": gpu_growth,
    "gpu_causal": gpu_causal,
    "gpu_crossover": gpu_crossover,
    "gpu_compiled": gpu_compiled,
    "gpu_uncompiled": gpu_uncompiled,
    "gpu_energy": gpu_energy,
}
