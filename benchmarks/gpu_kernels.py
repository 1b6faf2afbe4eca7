"""The Triton kernels on a CUDA device: right first, then how fast, against SDPA, eager and the copy floor.

    python benchmarks/gpu_kernels.py --out FOLDER [--seconds 560] [--phases ceilings,check,time,...]

Phases run in this order, each in a process of its own with a time limit, so that neither a hang nor a crash
takes the others along. results/gpu_kernels.json, copied to FOLDER, holds what all have found so far,
FOLDER/PHASE.json what the running one has. Two calls of ten minutes take them all:

    python benchmarks/gpu_kernels.py --out FOLDER --phases ceilings,check,time,tune,tuned
    python benchmarks/gpu_kernels.py --out FOLDER2 --phases ceilings,precision,growth,causal,tests

    ceilings    bandwidth of a copy on the device
    check       outputs and gradients against fp64, bf16 / fp16 / fp32, both orders
    time        the shapes, with the configurations that the package comes with
    tune        search for better ones; FOLDER/cache/triton.json keeps them
    tuned       the shapes again, with these
    precision   products of fp32 matrices: "tf32x3" against "ieee", time and flipped codes
    growth      65,536 to 1,048,576 tokens x 8 heads x 64 channels
    causal      the same in causal order, shorter
    tests       pytest -m gpu on the kernels' tests

Once per release, for memory errors and races (slow, so with few cases; `memcheck`, then `racecheck`):

    compute-sanitizer --tool memcheck python -m pytest -q -m gpu tests/backends/test_triton_kernels.py \
        -k "test_output_and_gradients and (case1 or case3 or case8)"
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import write_result
from torch import Tensor
from torch.nn import functional as F

from ecoformer import hash_attention
from ecoformer.arguments import bias_value
from ecoformer.backends import fused
from ecoformer.backends.hashing import HashFunctions, project
from ecoformer.benchmarking import Work, time_contestants
from ecoformer.benchmarking.contestants import steady_tokens
from ecoformer.benchmarking.measuring import capture, capture_place
from ecoformer.functional import sign_ste

BITS, SUPPORT = 16, 25
BETA = float(bias_value("paper", BITS))
SHAPES = [(256, 1, 3136, 32), (32, 1, 3136, 32), (256, 5, 196, 64), (1, 8, 262144, 64)]
GROWTH = [65_536 << k for k in range(5)]
LIMITS = {
    "ceilings": 60, "check": 120, "time": 150, "tune": 200, "tuned": 120, "precision": 60, "growth": 90,
    "causal": 90, "tests": 420,
}  # fmt: skip

Shape = tuple[int, int, int, int]
Figures = dict[str, Any]


def draw_functions(heads: int, dim: int) -> HashFunctions:
    """Hash functions of about the scale that fitting gives; which ones has no influence on the time."""
    generator = torch.Generator().manual_seed(1)
    support = F.normalize(torch.randn(heads, SUPPORT, dim, generator=generator), dim=-1)
    weight = torch.randn(heads, SUPPORT, BITS, generator=generator) * 2
    mean, sigma = torch.full((heads, SUPPORT), 0.6), torch.full((heads,), 2.0)
    return HashFunctions(*(x.cuda() for x in (support, mean, sigma, weight)))


def draw(shape: Shape, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Queries that are the keys, values and a gradient: heads of a projection, as layers make them."""
    batch, heads, tokens, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, tokens, heads, dim, generator=generator, device="cuda", dtype=dtype).transpose(
            1, 2
        )
        for _ in range(3)
    ]


def steady(shape: Shape, dtype: torch.dtype, functions: HashFunctions) -> Tensor:
    """Queries whose codes and gradients do not depend on rounding."""
    seeds = itertools.count()
    return steady_tokens(
        lambda: draw(shape, dtype, next(seeds))[0], [lambda tokens: project(tokens, functions)], True
    )


def eager(q: Tensor, v: Tensor, functions: HashFunctions, causal: bool) -> Tensor:
    wide = q if q.dtype == torch.float64 else q.float()
    codes = sign_ste(project(wide, functions)).to(q.dtype)
    return hash_attention(codes, codes, v, is_causal=causal)


def with_gradients(
    call: Callable[[Tensor, Tensor], Tensor], q: Tensor, v: Tensor, grad: Tensor
) -> list[Tensor]:
    q, v = q.detach().requires_grad_(), v.detach().requires_grad_()
    out = call(q, v)
    return [out.detach(), *torch.autograd.grad(out, (q, v), grad.to(out.dtype))]


def contestants(
    q: Tensor, v: Tensor, functions: HashFunctions, causal: bool, needs_grad: bool
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def triton(q: Tensor, v: Tensor) -> Tensor:
        return fused.run("triton", fused.Call(q, None, v, None, functions, BETA, causal), needs_grad)

    def plain(q: Tensor, v: Tensor) -> Tensor:
        return eager(q, v, functions, causal)

    return {
        "triton": triton,
        "sdpa": lambda q, v: F.scaled_dot_product_attention(q, q, v, is_causal=causal),
        "eager": plain,
        "compiled": torch.compile(plain, dynamic=False),
    }


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def ceilings() -> Iterator[Figures]:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    timing = time_contestants({"copy": Work(lambda: target.copy_(source))}, source.device, seconds=1.0)[
        "copy"
    ]
    yield {"copy_tb_per_s": 2 * source.numel() * 4 / timing.median_ms / 1e9}


def in_fp64(functions: HashFunctions, causal: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, v: eager(q, v, functions, causal)


def check() -> Iterator[Figures]:
    """Against fp64, as good as eager PyTorch; where rounding decides about a bit there is no truth."""
    cases = [
        ((3, 2, 500, 32), False),
        ((2, 5, 196, 64), False),
        ((256, 5, 196, 64), False),
        ((2, 1, 3137, 32), False),
        ((2, 2, 700, 64), True),
    ]
    for shape, causal in cases:
        functions = draw_functions(shape[1], shape[3])
        wide = HashFunctions(*(x.double() for x in functions))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            _, v, grad = draw(shape, dtype)
            q = steady(shape, dtype, functions)
            calls = contestants(q, v, functions, causal, True)
            truth = with_gradients(in_fp64(wide, causal), q.double(), v.double(), grad)
            errors = {}
            for name in ("triton", "eager"):
                results = with_gradients(calls[name], q, v, grad)
                errors[name] = [error(x, y) for x, y in zip(results, truth, strict=True)]
            again = with_gradients(calls["triton"], q, v, grad)
            first = with_gradients(calls["triton"], q, v, grad)
            equal = all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
            right = all(x <= 2 * y + 1e-6 for x, y in zip(errors["triton"], errors["eager"], strict=True))
            row = {"shape": shape, "causal": causal, "dtype": str(dtype), "right": right}
            yield {**row, "repeats_equal": equal, **errors}


def time_shape(shape: Shape, causal: bool, names: tuple[str, ...], backward: bool) -> Figures:
    """Median milliseconds of each contestant at one shape; no time for what disagrees with eager.

    `ms` is the GPU's work, replayed from a graph; `called_ms` is a plain call from Python.
    """
    functions = draw_functions(shape[1], shape[3])
    q, v, grad = draw(shape, torch.bfloat16)
    calls = contestants(q, v, functions, causal, backward)
    row: Figures = {"shape": shape, "causal": causal, "backward": backward}
    truth = eager(q, v, functions, causal) if "eager" in names else None
    works: dict[str, Work] = {}
    for name in names:
        call = calls[name]
        if backward:
            works[name] = Work(partial(with_gradients, call, q, v, grad))
        else:
            works[name] = Work(partial(call, q, v))
        if truth is not None and name != "sdpa":
            off = error(call(q, v).detach(), truth)
            row[f"{name}_error"] = off
            if not off < 2e-2:
                works.pop(name)
        if name in works:
            works[name]()
    # Graphs for all alike: otherwise launches would dominate the time of short kernels.
    place = capture_place(q.device)
    graphs = {name: capture(work, *place)[0] for name, work in works.items()}
    for key, timed in (("ms", graphs), ("called_ms", works)):
        timings = time_contestants(timed, q.device, seconds=1.0)
        row[key] = {name: timing.median_ms for name, timing in timings.items()}
        row[f"{key}_spread"] = {name: [timing.low_ms, timing.high_ms] for name, timing in timings.items()}
    # Queries, values and output once; backward also reads them and the gradient and writes two gradients.
    row["floor_bytes"] = q.numel() * 2 * (3 + 5 * backward)
    return row


def time_shapes() -> Iterator[Figures]:
    for backward in (False, True):
        for shape in SHAPES:
            long = shape[2] > 100_000
            names = ("triton", "eager") if long else ("triton", "sdpa", "eager", "compiled")
            yield time_shape(shape, False, names, backward)


def tune() -> Iterator[Figures]:
    from ecoformer.backends.triton.tuning import tune as search

    for shape in SHAPES:
        q, v, _ = draw(shape, torch.bfloat16)
        best = search(
            q, v, draw_functions(shape[1], shape[3]), BETA, seconds=LIMITS["tune"] / len(SHAPES) - 4
        )
        yield {
            "shape": shape,
            **{step: {"config": list(config), "pass_ms": taken} for step, (config, taken) in best.items()},
        }


def precision() -> Iterator[Figures]:
    from ecoformer.backends.triton import launch

    shape = SHAPES[0]
    functions = draw_functions(shape[1], shape[3])
    for dtype in (torch.bfloat16, torch.float32):
        q, v, _ = draw(shape, dtype)
        exact = project(q.double(), HashFunctions(*(x.double() for x in functions))) >= 0
        bits = torch.arange(BITS, device="cuda")
        for kind in ("tf32x3", "ieee"):
            launch.HASH_PRECISION = kind

            def call(q: Tensor = q, v: Tensor = v) -> list[Tensor]:
                return launch.forward(fused.Call(q, None, v, None, functions, BETA, False))[1]

            found = ((call()[0].int().unsqueeze(-1) >> bits) & 1).bool()
            timing = time_contestants({"forward": Work(call)}, q.device, seconds=1.0)["forward"]
            by_eager = project(q.float(), functions) >= 0
            yield {
                "dtype": str(dtype),
                "precision": kind,
                "ms": timing.median_ms,
                "bits": exact.numel(),
                "flipped": int((found != exact).sum()),
                "flipped_by_eager": int((by_eager != exact).sum()),
            }


def growth() -> Iterator[Figures]:
    for tokens in GROWTH:
        for backward in (False, True):
            yield time_shape((1, 8, tokens, 64), False, ("triton",), backward) | {
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9
            }


def causal_shapes() -> Iterator[Figures]:
    for backward in (False, True):
        for shape in ((32, 1, 3136, 32), (1, 8, 65_536, 64)):
            yield time_shape(shape, True, ("triton", "sdpa", "eager"), backward)


PHASES: dict[str, Callable[[], Iterator[Figures]]] = {
    "ceilings": ceilings, "check": check, "time": time_shapes, "tune": tune, "tuned": time_shapes,
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
    for phase in ("time", "tuned", "growth", "causal"):
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
    environment = os.environ | {"ECOFORMER_CACHE": str(out / "cache"), "PYTHONUNBUFFERED": "1"}
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
