"""The Triton kernels on a CUDA device: right first, then how fast, against SDPA, eager and the copy floor.

    python benchmarks/gpu_kernels.py --out FOLDER [--seconds 560] [--phases ceilings,check,time,...]

Phases run in this order, each in a process of its own with a time limit, so that a hang or a crash ends only
one. results/gpu_kernels.json, copied to FOLDER, holds what all have found so far, FOLDER/PHASE.json what the
running one has.

    ceilings    bandwidth of a copy on the device
    check       outputs and gradients against fp64, bf16 / fp16 / fp32, both orders
    time        the shapes, with the block sizes in the package
    precision   products of fp32 matrices: "tf32x3" against "ieee", time and flipped bits
    growth      65,536 to 1,048,576 tokens x 8 heads x 64 channels
    causal      the same in causal order, shorter
    tests       pytest -m gpu on the kernels' tests

Once per release, for memory errors and races (slow, so with few cases; `memcheck`, then `racecheck`):

    compute-sanitizer --tool memcheck python -m pytest -q -m gpu tests/backends/test_triton_kernels.py \
        -k "test_output_and_gradients and (case1 or case3 or case8)"
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import write_result
from torch import Tensor

from ecoformer.backends import fused
from ecoformer.backends.hashing import HashFunctions, project
from ecoformer.benchmarking import Work, time_contestants
from ecoformer.benchmarking.attention import (
    Setting,
    build_layer,
    checked,
    contestants_of,
    draw_inputs,
    work_of,
)
from ecoformer.benchmarking.measuring import Bench, peak_memory_mb

GPU = torch.device("cuda")
BITS = 16
SHAPES = [(256, 1, 3136, 32), (32, 1, 3136, 32), (256, 5, 196, 64), (1, 8, 262144, 64)]
CHECKED = [
    ((3, 2, 500, 32), False),
    ((2, 5, 196, 64), False),
    ((256, 5, 196, 64), False),
    ((2, 1, 3137, 32), False),
    ((2, 2, 700, 64), True),
]
GROWTH = [65_536 << k for k in range(5)]
LIMITS = {
    "ceilings": 60, "check": 120, "time": 150, "precision": 60, "growth": 90,
    "causal": 90, "tests": 420,
}  # fmt: skip

Shape = tuple[int, int, int, int]
Figures = dict[str, Any]


def eco(setting: Setting) -> Any:
    """A layer with hash functions of the usual size; which ones has no influence on the time."""
    return build_layer("eco", setting)


def heads(setting: Setting, layer: Any) -> list[Tensor]:
    """q, k, v and a gradient as layers make them: heads of a projection (B, N, H, D)."""
    inputs = draw_inputs(setting, [layer.hasher])
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]


def ceilings() -> Iterator[Figures]:
    source = torch.randn(1 << 30, device=GPU)
    target = torch.empty_like(source)
    timing = time_contestants({"copy": Work(lambda: target.copy_(source))}, GPU, seconds=1.0)["copy"]
    yield {"copy_tb_per_s": 2 * source.numel() * 4 / timing.median_ms / 1e9}


def check() -> Iterator[Figures]:
    """Against fp64, at most twice the error of eager PyTorch, and the same in every run."""
    for shape, causal in CHECKED:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            setting = Setting(shape, dtype, GPU, causal, backward=True)
            layer = eco(setting)
            inputs = heads(setting, layer)
            contestants = {found.backend: found for found in contestants_of(layer, setting)}
            rows = {name: checked(found, inputs, setting) for name, found in contestants.items()}
            errors = {name: row.checked.error for name, row in rows.items() if row.checked}
            first, again = (work_of(contestants["triton"], inputs, True)() for _ in range(2))
            right = not any(row.failure for row in rows.values())
            yield {
                "shape": shape,
                "causal": causal,
                "dtype": str(dtype),
                "right": right and errors["triton"] <= 2 * errors["eager"] + 1e-6,
                "repeats_equal": all(map(torch.equal, first, again)),
                **errors,
            }


def time_shape(shape: Shape, causal: bool, names: tuple[str, ...], backward: bool) -> Figures:
    """Median milliseconds of each contestant at one shape, after its check.

    `ms` is the GPU's work, replayed from a graph; `called_ms` is a plain call from Python.
    """
    setting = Setting(shape, torch.bfloat16, GPU, causal, backward, compiled="compiled" in names)
    layer = eco(setting)
    inputs = heads(setting, layer)
    found = [*contestants_of(build_layer("softmax", setting), setting), *contestants_of(layer, setting)]
    contestants = {each.backend.removeprefix("eager, "): each for each in found}
    works = {name: work_of(contestants[name], inputs, backward) for name in names}
    right = {name: checked(contestants[name], inputs, setting) for name in names}
    row: Figures = {"shape": shape, "causal": causal, "backward": backward}
    for key, graphs in (("ms", True), ("called_ms", False)):
        bench = Bench(GPU, graphs=graphs, memory=False)
        rows = {name: replace(each) for name, each in right.items()}
        bench.measure(list(rows.values()), list(works.values()))
        timings = {name: each.timing for name, each in rows.items() if each.timing}
        row[key] = {name: timing.median_ms for name, timing in timings.items()}
        row[f"{key}_spread"] = {name: [timing.low_ms, timing.high_ms] for name, timing in timings.items()}
        row |= {f"{name}_error": each.checked.error for name, each in rows.items() if each.checked}
        row |= {f"{name}_failure": each.failure for name, each in rows.items() if each.failure}
    row["peak_gb"] = peak_memory_mb(works["triton"], GPU) / 1e3
    # Queries, values and output once; backward also reads them and the gradient and writes two gradients.
    row["floor_bytes"] = inputs[0].numel() * 2 * (3 + 5 * backward)
    return row


def time_shapes() -> Iterator[Figures]:
    for backward in (False, True):
        for shape in SHAPES:
            long = shape[2] > 100_000
            names = ("triton", "eager") if long else ("triton", "sdpa", "eager", "compiled")
            yield time_shape(shape, False, names, backward)


def precision() -> Iterator[Figures]:
    from ecoformer.backends.triton import launch

    for dtype in (torch.bfloat16, torch.float32):
        setting = Setting(SHAPES[0], dtype, GPU)
        layer = eco(setting)
        functions: HashFunctions = layer.hasher.functions()
        q, v, _, _ = draw_inputs(setting)  # with codes that depend on rounding
        exact = project(q.double(), HashFunctions(*(x.double() for x in functions))) >= 0
        call = fused.FusedCall.simple(q, v, functions)
        for kind in ("tf32x3", "ieee"):
            launch.HASH_PRECISION = kind
            work = Work(partial(launch.forward, call))
            codes = work()[1][0].int().unsqueeze(-1)
            found = ((codes >> torch.arange(BITS, device=GPU)) & 1).bool()
            yield {
                "dtype": str(dtype),
                "precision": kind,
                "ms": time_contestants({"forward": work}, GPU, seconds=1.0)["forward"].median_ms,
                "bits": exact.numel(),
                "flipped": int((found != exact).sum()),
                "flipped_by_eager": int(((project(q.float(), functions) >= 0) != exact).sum()),
            }


def growth() -> Iterator[Figures]:
    for tokens in GROWTH:
        for backward in (False, True):
            yield time_shape((1, 8, tokens, 64), False, ("triton",), backward)


def causal_shapes() -> Iterator[Figures]:
    for backward in (False, True):
        for shape in ((32, 1, 3136, 32), (1, 8, 65_536, 64)):
            yield time_shape(shape, True, ("triton", "sdpa", "eager"), backward)


PHASES: dict[str, Callable[[], Iterator[Figures]]] = {
    "ceilings": ceilings, "check": check, "time": time_shapes,
    "precision": precision, "growth": growth, "causal": causal_shapes,
}  # fmt: skip


def run_phase(name: str, out: Path) -> None:
    """Write the phase's rows as they come."""
    rows = []
    for row in PHASES[name]():
        rows.append(row)
        print(name, json.dumps(row), flush=True)
        (out / f"{name}.json").write_text(json.dumps(rows))


def run_tests(out: Path, seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider"]
    with (out / "tests.log").open("w") as log:
        try:
            finished = subprocess.run(
                [*command, "tests/backends/test_triton_kernels.py"], stdout=log, stderr=log, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"no end after {seconds:.0f} s"
    return f"exit status {finished.returncode}"


def table(figures: Figures) -> str:
    """Milliseconds by shape (those of plain calls in brackets), with ratios to the others and the floor."""
    copy = figures.get("ceilings", {}).get("rows") or [{}]
    bandwidth = copy[0].get("copy_tb_per_s")
    lines = []
    for phase in ("time", "growth", "causal"):
        for row in figures.get(phase, {}).get("rows", []):
            ms = row["ms"]
            floor = row["floor_bytes"] / bandwidth / 1e9 if bandwidth else float("nan")
            called = row["called_ms"]
            text = "  ".join(f"{name} {value:8.3f} ({called[name]:.3f})" for name, value in ms.items())
            if "triton" in ms:
                rivals = [f"{name}/triton {ms[name] / ms['triton']:.2f}" for name in ms if name != "triton"]
                text += f"  floor {floor:.3f} (x{ms['triton'] / floor:.2f})  " + "  ".join(rivals)
            lines.append(f"{phase:6s} {row['shape']!s:22s} {'f+b' if row['backward'] else 'fwd'}  {text}")
    return "\n".join(lines)


def run_all(names: list[str], out: Path, seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    figures: Figures = {}
    for name in names:
        limit = min(LIMITS[name], end - time.monotonic())
        if limit < 10:
            figures[name] = {"status": "no time left"}
            continue
        if name == "tests":
            figures[name] = {"status": run_tests(out, limit)}
        else:
            command = [sys.executable, __file__, "--phase", name, "--out", str(out)]
            try:
                status = f"exit status {subprocess.run(command, env=environment, timeout=limit).returncode}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit:.0f} s"
            written = out / f"{name}.json"
            rows = json.loads(written.read_text()) if written.exists() else []
            written.unlink(missing_ok=True)
            figures[name] = {"status": status, "rows": rows}
        path = write_result("gpu_kernels", figures)
        shutil.copy(path, out)
    print(table(figures))
    checked = figures.get("check", {}).get("rows", [])
    print(f"right: {sum(row['right'] and row['repeats_equal'] for row in checked)} of {len(checked)} checks")
    print({name: figures[name]["status"] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, default=560, help="limit of all phases together")
    parser.add_argument("--phases", default=",".join(LIMITS), help="which, separated by commas")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_kernels.py needs a CUDA device")
    if arguments.phase:
        run_phase(arguments.phase, arguments.out)
        return
    names = arguments.phases.split(",")
    for name in names:
        if name not in LIMITS:
            raise SystemExit(f"--phases knows {', '.join(LIMITS)}, not {name!r}")
    run_all(names, arguments.out, arguments.seconds)


if __name__ == "__main__":
    main()
