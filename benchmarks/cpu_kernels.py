"""The CPU kernels against SDPA and eager PyTorch, with two threads, in one run.

    python benchmarks/cpu_kernels.py [--backward]

Every contestant is checked against the reference first. Attention is timed twice. "in a row": in every round
a contestant is called several times, and all but its first calls count, as in a loop over one operator. "in
turns": one timed call after one that is not, round after round, as `ecoformer bench attention` measures. Then
models, and what each process pays once: compiling, or loading compiled code. "load" is the machine's load
average before each part. Writes results/cpu_kernels.json.

With --backward: forward and backward of eco (the paper's affinity) and sharp_eco (4 groups of 4 bits, codes
of queries and of keys, weights of keys) in a row, gradients of q, k and v: the median CPU time of one thread,
which depends less on what else the machine does than elapsed time. Writes results/cpu_backward.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import write_result

from ecoformer.backends.choice import use_backend
from ecoformer.benchmarking import Work
from ecoformer.benchmarking.attention import (
    Setting,
    bench_attention,
    build_layer,
    checked,
    contestants_of,
    draw_inputs,
    work_of,
)
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.models import Load, bench_models

SHAPES = [(1, 1, 3136, 32), (16, 1, 3136, 32), (1, 5, 196, 32), (1, 8, 49, 32), (1, 8, 16384, 64)]
THREADS = 2
MECHANISMS = ["softmax", "native", "explicit", "eco"]
CPU = torch.device("cpu")
Clock = Callable[[], float]
FIRST_CALL = """
import time, torch
from ecoformer.backends import cpu, fused, hashing
f = hashing.HashFunctions(torch.ones(1, 1, 8), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, 8))
x = torch.ones(1, 1, 1, 8)
start = time.perf_counter()
cpu.forward(fused.FusedCall.simple(x, x, f))
print(time.perf_counter() - start)
"""


def in_a_row(works: dict[str, Work], seconds: float, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Median milliseconds of each, called 2 + 8 times (fewer where that takes long) in every round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 2:
        for name, work in works.items():
            with use_backend(work.backend):
                first = milliseconds(work, clock)
                if first > 1e3:  # nothing to warm up
                    times[name].append(first)
                    continue
                work.call()
                times[name] += [milliseconds(work, clock) for _ in range(int(min(8, max(1, 200 / first))))]
    return {name: round(median(each), 4) for name, each in times.items()}


def milliseconds(work: Work, clock: Clock) -> float:
    start = clock()
    work.call()
    return (clock() - start) * 1e3


def attention(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 2)
    setting = Setting(shape, torch.float32, CPU)
    rows = bench_attention([setting], ["softmax", "eco"], Bench(CPU, 2.0, memory=False)).rows
    if any(row.failure for row in rows):
        raise RuntimeError(f"no times for a failure: {[row.failure for row in rows]}")
    softmax, eco = (build_layer(name, setting) for name in ("softmax", "eco"))
    inputs = draw_inputs(setting, [eco.hasher])  # type: ignore[list-item]
    contestants = contestants_of(softmax, setting) + contestants_of(eco, setting)
    works = {contestant.backend: work_of(contestant, inputs, False) for contestant in contestants}
    row = in_a_row(works, 4.0)
    turns = {each.backend: round(each.timing.median_ms, 4) for each in rows if each.timing}
    return {"shape": shape, "load": load, "in a row": with_ratios(row), "in turns": with_ratios(turns)}


def with_ratios(ms: dict[str, float]) -> dict[str, Any]:
    ratios = {f"{name} / cpu": round(ms[name] / ms["cpu"], 2) for name in ("sdpa", "eager")}
    return {"median_ms": ms, "ratios": ratios}


def training(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 2)
    setting = Setting(shape, torch.float32, CPU, backward=True)
    found: dict[str, Any] = {"shape": shape, "load": load}
    for name in ("eco", "sharp_eco"):
        layer = build_layer(name, setting)
        inputs = draw_inputs(setting, [layer.hasher])  # type: ignore[list-item]
        contestants = contestants_of(layer, setting)
        failures = [row.failure for each in contestants if (row := checked(each, inputs, setting)).failure]
        if failures:
            raise RuntimeError(f"no times for a failure: {failures}")
        works = {each.backend: work_of(each, inputs, True) for each in contestants}
        ms = in_a_row(works, 6.0, time.thread_time)
        found[name] = {"median_ms": ms, "eager / cpu": round(ms["eager"] / ms["cpu"], 2)}
    return found


def models() -> list[dict[str, Any]]:
    import timm

    def images(count: int) -> torch.Tensor:
        return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(count))

    model = timm.create_model("pvt_v2_b0").eval()
    rows = []
    for last in (False, True):  # which is faster depends on the batch
        about = {"model": "pvt_v2_b0", "resolution": 224, "channels_last": last}
        load = Load(images, about, channels_last=last)
        rows += bench_models(model, MECHANISMS, load, [1, 16], Bench(CPU, 4.0)).rows
    return [row.to_dict() for row in rows]


def first_calls() -> dict[str, float]:
    """Seconds of the first call in a process, numba's import included."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST_CALL]
        found = [subprocess.run(command, env=environment, capture_output=True, check=True) for _ in range(3)]
    compiled, *read = (round(float(run.stdout), 2) for run in found)
    return {"compiling": compiled, "reading what was compiled": min(read)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    options = parser.parse_args()
    threads = 1 if options.backward else THREADS
    torch.set_num_threads(threads)
    figures: dict[str, Any] = {"threads": threads, "dtype": "fp32", "attention": []}
    if options.backward:
        figures["clock"] = "CPU time of the thread"
        for shape in SHAPES:
            figures["attention"].append(training(shape))
            print(figures["attention"][-1], flush=True)
        print(write_result("cpu_backward", figures))
        return
    for shape in SHAPES:
        figures["attention"].append(attention(shape))
        print(figures["attention"][-1], flush=True)
    figures["load before models"] = round(os.getloadavg()[0], 2)
    figures["models"] = models()
    figures["first call, seconds"] = first_calls()
    for row in figures["models"]:
        print(*(row[key] for key in ("mechanism", "backend", "channels_last", "batch", "median_ms")))
    print(figures["first call, seconds"])
    print(write_result("cpu_kernels", figures))


if __name__ == "__main__":
    main()
