"""Groups of bits, and codes from projections, on the GPU: errors, and times next to the paper's form.

    python benchmarks/gpu_affinity.py --out FOLDER [--steps check,trials,time] [--dtypes bfloat16,float32]

FOLDER/gpu_affinity.json holds the rows found so far. Processes compile the kernels of all rows at once and do
the checks; times are then taken one after the other.

    check    groups of 4 x 4, 8 x 2 and 2 x 6 bits; shared and separate hash functions, hyperplanes,
             projections; masks, weights of keys, causal order; fp32, bf16, fp16: errors of the output and all
             gradients against fp64, and eager's
    time     16 bits, bf16, forward and with the backward, with and without causal order, by CUDA graphs in
             turns: "paper" (its affinity), "4x4" (4 groups of 4), "signs" (4 groups of 4, queries and keys
             are projections, keys have weights 2^e in bf16, and everything needs gradients)
    trials   other block sizes and warps for the kernels of groups; `time` after it uses the fastest
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn import functional as F

from ecoformer.affinity import FLOOR, Affinity
from ecoformer.backends import fused, triton
from ecoformer.backends.hashing import (
    Functions,
    HashFunctions,
    Hyperplanes,
    Signs,
    Surrogate,
    project,
    scaled,
    sign_ste,
)
from ecoformer.backends.triton import configs, plans
from ecoformer.backends.triton.configs import Config

SHAPES = [(256, 1, 3136, 32), (256, 5, 196, 64), (1, 8, 65536, 64)]
SUPPORT = 25
Row = dict[str, Any]


def draw_functions(heads: int, dim: int, bits: int, planes: bool, g: torch.Generator) -> Functions:
    if planes:
        return Hyperplanes(2 * torch.randn(heads, dim, bits, generator=g).cuda())
    support = F.normalize(torch.randn(heads, SUPPORT, dim, generator=g), dim=-1)
    weight = torch.randn(heads, SUPPORT, bits, generator=g) * 2
    mean, sigma = torch.full((heads, SUPPORT), 0.6), torch.full((heads,), 2.0)
    return HashFunctions(*(x.cuda() for x in (support, mean, sigma, weight)))


def draw_call(
    shape: tuple[int, int, int, int], dtype: torch.dtype, groups: int | None, bits: int = 16, *,
    apart: bool = False, cross: bool = False, masked: bool = False, weighted: bool | torch.dtype = False,
    planes: bool = False, signs: bool = False, causal: bool = False, clear: bool = True,
) -> fused.FusedCall:  # fmt: skip
    """`clear`: tokens keep off the projections 0 and ±1, where rounding decides.

    `signs`: queries and keys are projections. `weighted` by a dtype: weights are powers of two of that dtype.
    """
    batch, heads, n, dim = shape
    g = torch.Generator().manual_seed(0)
    functions: Functions = Signs() if signs else draw_functions(heads, dim, bits, planes, g)
    key_functions = draw_functions(heads, dim, bits, planes, g) if apart else None
    device = torch.Generator("cuda").manual_seed(0)
    width = bits if signs else dim

    def tokens() -> Tensor:
        x = torch.randn(batch, n, heads, width, generator=device, device="cuda").to(dtype).transpose(1, 2)
        if clear:
            both = [f for f in (functions, key_functions) if f is not None]
            y = torch.cat([project(x.double(), type(f)(*(t.double() for t in f))) for f in both], dim=-1)
            y = (scaled(y) if signs else y).abs()
            good = ((y > 1e-3) & ((y - 1).abs() > 1e-3)).all(dim=-1)
            for sample, kept in zip(x.reshape(-1, n, width), good.reshape(-1, n), strict=True):
                sample[~kept] = sample[kept][0]
        return x

    q = tokens()
    k = tokens() if cross or signs else None
    if signs and k is not None:  # of one projection
        q, k = torch.stack([q.transpose(1, 2), k.transpose(1, 2)], dim=2).transpose(1, 3).unbind(2)
    v = torch.randn(batch, n, heads, dim, generator=device, device="cuda").to(dtype).transpose(1, 2)
    mask = torch.rand(batch, n, generator=device, device="cuda") < 0.3 if masked else None
    key_weight = None
    if weighted:
        key_weight = 0.5 + torch.rand(batch, n, heads, generator=device, device="cuda").transpose(1, 2)
        if isinstance(weighted, torch.dtype):
            key_weight = torch.exp2((8 * key_weight - 8).round()).to(weighted)
    constant = Affinity.paper(bits).constant(bits) or 0.0
    levels: Any = (None, None, None)
    if groups is not None:
        numbers = torch.rand(2, heads, groups, generator=g).cuda()
        affinity = Affinity(groups, 0.3 + 0.6 * numbers[0], 0.5 + numbers[1])
        constant, levels = 0.0, (*affinity.levels(bits, numbers), FLOOR * affinity.total(numbers))
    scale, ratio, floor = levels
    tensors = (q, k, v, mask, key_weight, functions, key_functions, scale, ratio, floor)
    return fused.FusedCall(*tensors, constant, causal)


def wide(call: fused.FusedCall) -> fused.FusedCall:
    flat = [x.double() if isinstance(x, Tensor) and x.dtype != torch.bool else x for x in call.flat()]
    return fused.FusedCall.of(*flat)


def own_codes(x: Tensor, functions: Functions) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    surrogate: Surrogate = "scaled" if isinstance(functions, Signs) else "hardtanh"
    return sign_ste(project(x.to(wide), functions), surrogate).to(x.dtype).to(wide)


def by_autograd(call: fused.FusedCall, grad: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:
    with mock.patch.object(fused, "codes", own_codes):
        out = fused.plain(call)
        return [out, *fused.plain_backward(call, grad.to(out.dtype), needs)]


def by_triton(call: fused.FusedCall, grad: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:
    reason = triton.cannot(call, needs_grad=True)
    if reason:
        raise RuntimeError(reason)
    out, saved = triton.forward(call)
    return [out, *triton.backward(call, grad, saved, needs)]


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm().clamp_min(1e-30))


SMALL, LONG = (2, 2, 300, 32), (2, 2, 1500, 64)
CASES: list[tuple[Any, int | None, int, dict[str, Any]]] = [
    (LONG, 4, 16, {"signs": True, "weighted": torch.bfloat16}),
    ((4, 1, 3137, 32), 4, 16, {"signs": True, "weighted": torch.bfloat16}),
    (SMALL, 4, 16, {"signs": True, "weighted": True, "masked": True}),
    (LONG, 4, 16, {"signs": True, "weighted": torch.bfloat16, "causal": True}),
    (SMALL, 4, 16, {}),
    (LONG, 4, 16, {}),
    (LONG, 4, 16, {"masked": True, "weighted": True}),
    (LONG, 8, 16, {"apart": True}),
    (LONG, 2, 12, {"apart": True, "cross": True, "weighted": True, "masked": True}),
    (LONG, 4, 16, {"planes": True, "apart": True}),
    (LONG, 4, 16, {"causal": True}),
    (LONG, 8, 16, {"causal": True, "apart": True, "weighted": True, "masked": True}),
    ((2, 2, 700, 128), 4, 16, {}),
    (LONG, None, 16, {"apart": True, "weighted": True}),
    (LONG, None, 16, {"causal": True, "cross": True, "weighted": True}),
    (LONG, None, 16, {"planes": True}),
    (LONG, None, 16, {}),
]


def check(dtype: torch.dtype, case: int) -> Row:
    shape, groups, bits, options = CASES[case]
    row: Row = {"shape": shape, "groups": groups, "bits": bits, "dtype": str(dtype)}
    row |= {name: str(x) for name, x in options.items()}
    call = draw_call(shape, dtype, groups, bits, **options)
    grad = torch.randn_like(call.v)
    every = tuple(x is not None for x in call.differentiable())
    truth = by_autograd(wide(call), grad.double(), every)
    theirs = by_autograd(call, grad, every)
    # Gradients of tokens and values alone are computed with fewer pieces in bf16.
    kinds = {"all": every}
    if dtype == torch.bfloat16 and groups is not None:
        kinds["tokens"] = (True, every[1], True, *[False] * 5)
    for kind, needs in kinds.items():
        ours, again = by_triton(call, grad, needs), by_triton(call, grad, needs)
        errors, right = {}, True
        names = ("out", *fused.DIFFERENTIABLE)
        for name, x, y, z, true in zip(names, ours, again, theirs, truth, strict=True):
            if x is not None and y is not None and z is not None and true is not None:
                errors[name] = [error(x, true), error(z, true)]
                parameter = dtype != torch.float32 and x.dtype == torch.float32
                bound = 2 * errors[name][1] + (2**-13 if parameter else 1e-6)
                right &= errors[name][0] <= bound and torch.equal(x, y)
        row[kind] = {"right": right, "errors": errors}
    return row


def graph(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        function()
    return captured


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def medians(works: dict[str, Callable[[], object]], seconds: float = 0.6) -> dict[str, float]:
    """Median microseconds of each, replayed in turns."""
    graphs = {name: graph(work) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.monotonic() + seconds * len(works)
    while time.monotonic() < end or len(next(iter(times.values()))) < 10:
        for name, captured in graphs.items():
            begin, stop = event(), event()
            begin.record()
            for _ in range(10):
                captured.replay()
            stop.record()
            stop.synchronize()
            times[name].append(begin.elapsed_time(stop) * 100)
    return {name: statistics.median(found) for name, found in times.items()}


KINDS: dict[str, dict[str, Any]] = {
    "paper": {"groups": None},
    "4x4": {"groups": 4},
    "signs": {"groups": 4, "signs": True, "weighted": torch.bfloat16},
}


def work(shape: Any, kind: str, causal: bool, backward: bool) -> Callable[[], object]:
    call = draw_call(shape, torch.bfloat16, causal=causal, clear=False, **KINDS[kind])
    grad = torch.randn_like(call.v)
    needs = (True, False, True, *[False] * 5)
    if kind == "signs":
        needs = tuple(x is not None for x in call.differentiable())

    def run() -> object:
        out, saved = triton.forward(call, keep=backward)
        return triton.backward(call, grad, saved, needs) if backward else out

    run()
    return run


def registers() -> Row:
    """Registers, spilled bytes and shared memory of the kernels that have been launched."""
    found: Row = {}
    for plan in plans._plans.values():
        for ready in next(iter(plan._ready.values()), []):
            kernel = ready.runner.__closure__
            for cell in kernel or ():
                compiled = cell.cell_contents
                if hasattr(compiled, "n_regs"):
                    name = f"{compiled.name} x{compiled.metadata.num_warps}"
                    found[name] = [compiled.n_regs, compiled.n_spills, compiled.metadata.shared]
    return found


def kernel_times(function: Callable[[], object], runs: int = 10) -> list[tuple[str, float]]:
    """Microseconds of each launch, in order, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            function()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda e: e.time_range.start)
    each = len(kernels) // runs
    names = [e.name[:40] for e in kernels[:each]]
    times = [statistics.median(e.time_range.elapsed_us() for e in kernels[i::each]) for i in range(each)]
    return [(name, round(us, 1)) for name, us in zip(names, times, strict=True)]


def time_shape(shape: Any, causal: bool, backward: bool) -> Row:
    works = {kind: work(shape, kind, causal, backward) for kind in KINDS}
    us = medians(works)
    return {
        "shape": shape,
        "causal": causal,
        "backward": backward,
        "us": us,
        "ratio": {kind: us[kind] / us["paper"] for kind in us},
        "kernels": {kind: kernel_times(each) for kind, each in works.items()},
        "registers, spills, shared": registers(),
    }


NARROW, WIDE = (0,), (1, 2)
TRIALS: list[tuple[tuple[int, ...], str, str, list[Config]]] = [
    (NARROW, "signs", "gather", [
        Config(32, 1, 3, 7), Config(32, 1, 4, 7), Config(32, 2, 3, 7), Config(64, 2, 3, 5),
    ]),
    (NARROW, "signs", "read", [
        Config(32, 1, 3, 9), Config(32, 1, 3, 11), Config(32, 2, 3, 9), Config(64, 2, 3, 5),
        Config(16, 1, 3, 17),
    ]),
    (NARROW, "signs", "gather_grad", [Config(32, 1, 3, 7), Config(64, 2, 3, 3), Config(16, 1, 3, 7)]),
    (NARROW, "signs", "token_grad", [
        Config(32, 1, 3, 7), Config(32, 1, 4, 7), Config(64, 2, 3, 3), Config(32, 1, 3, 9),
    ]),
    (WIDE, "signs", "gather", [
        Config(64, 2, 3, 4), Config(32, 2, 3, 4), Config(16, 1, 3, 8), Config(32, 1, 3, 8),
    ]),
    (WIDE, "signs", "read", [Config(32, 1, 3, 8), Config(16, 1, 3, 13), Config(64, 2, 3, 4)]),
    (WIDE, "signs", "gather_grad", [Config(32, 2, 3, 4), Config(16, 1, 3, 8), Config(32, 2, 2, 4)]),
    (WIDE, "signs", "token_grad", [Config(32, 2, 3, 4), Config(16, 1, 3, 8), Config(64, 2, 3, 4)]),
    (NARROW, "4x4", "gather", [Config(32, 2, 3, 5), Config(16, 1, 3, 9), Config(32, 1, 3, 7)]),
    (NARROW, "4x4", "read", [
        Config(32, 1, 1, 8), Config(32, 1, 3, 9), Config(32, 2, 3, 9), Config(64, 1, 1, 8),
    ]),
    (NARROW, "4x4", "gather_grad", [Config(32, 1, 3, 7), Config(64, 2, 3, 3)]),
    (NARROW, "4x4", "token_grad", [
        Config(32, 2, 2, 3), Config(32, 1, 3, 7), Config(16, 1, 3, 7), Config(64, 2, 2, 3),
    ]),
]  # fmt: skip


def trial(shapes: tuple[int, ...], kind: str, step: str, config: Config) -> Row:
    row: Row = {"shapes": shapes, "kind": kind, "step": step, "config": config}
    with configs.trial(**{step: config}):
        row["kernels"] = [
            kernel_times(work(SHAPES[i], kind, False, step.endswith("grad")), 5) for i in shapes
        ]
    row["registers, spills, shared"] = registers()
    return row


def fastest(rows: list[Row]) -> dict[tuple[bool, bool, str], Config]:
    """The best configuration of each step, by the time of all kernels, relative to the best of each shape."""
    chosen = {}
    for shapes, kind, step, _ in TRIALS:
        found = [
            x
            for x in rows
            if x.get("kernels") and (x["kind"], x["step"], x["shapes"]) == (kind, step, shapes)
        ]
        totals = [[sum(us for _, us in each) for each in row["kernels"]] for row in found]
        if totals:
            least = [min(column) for column in zip(*totals, strict=True)]
            scores = [sum(a / b for a, b in zip(each, least, strict=True)) for each in totals]
            chosen[kind == "signs", shapes == NARROW, step] = found[scores.index(min(scores))]["config"]
    return chosen


def use(chosen: dict[tuple[bool, bool, str], Config]) -> None:
    """Make these the defaults of this process."""
    default = configs.default

    def other(step: configs.Step, sizes: configs.Sizes) -> Config:
        narrow = max(sizes.dim, sizes.value_dim) <= 32
        config = chosen.get((not sizes.support, narrow, step)) if sizes.features else None
        usual = default(step, sizes)
        return usual if config is None or not usual.per_sm else config

    configs.default = other


Job = tuple[Callable[..., Row], tuple[Any, ...]]


def jobs(step: str, dtypes: list[torch.dtype]) -> list[Job]:
    if step == "check":
        return [
            (check, (dtype, case))
            for dtype in dtypes
            for case in range(0, len(CASES), 5 if dtype == torch.float16 else 1)
        ]
    if step == "time":
        return [
            (time_shape, (shape, causal, backward))
            for causal in (False, True)
            for shape in SHAPES
            for backward in (False, True)
        ]
    return [(trial, (*rest, config)) for *rest, choices in TRIALS for config in choices]


def attempt(job: Job) -> Row:
    """A row, or why there is none."""
    function, arguments = job
    try:
        return function(*arguments)
    except Exception as failure:
        return {"job": str(arguments), "failure": f"{type(failure).__name__}: {failure}"[:500]}
    finally:
        plans.forget()
        torch.cuda.empty_cache()


def warm(job: Job) -> Row | None:
    """Compile the kernels of a job; the row of a check."""
    if job[0] is check:
        return attempt(job)
    module = sys.modules[__name__]
    medians = mock.patch.object(module, "medians", side_effect=lambda works: dict.fromkeys(works, 1.0))
    with medians, mock.patch.object(module, "kernel_times", return_value=[]):
        attempt(job)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", default="check,trials,time", help="which, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32,float16", help="of the checks")
    parser.add_argument("--seconds", type=float, default=560, help="start no row after this time")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_affinity.py needs a CUDA device")
    arguments.out.mkdir(parents=True, exist_ok=True)
    dtypes = [getattr(torch, name) for name in arguments.dtypes.split(",")]
    begin = time.monotonic()
    figures: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    steps = arguments.steps.split(",")
    every = [(step, job) for step in steps for job in jobs(step, dtypes)]

    def add(step: str, row: Row) -> None:
        figures.setdefault(step, []).append(row)
        brief = {name: x for name, x in row.items() if "registers" not in name}
        print(f"{time.monotonic() - begin:.0f} s", step, json.dumps(brief, default=str), flush=True)
        (arguments.out / "gpu_affinity.json").write_text(json.dumps(figures, indent=1, default=str))

    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        found = pool.imap(warm, [job for _, job in every])
        for (step, _), row in zip(every, found, strict=True):
            if row is not None:
                add(step, row)
            if time.monotonic() - begin > arguments.seconds:
                break
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for step, job in every:
        if step == "time" and "chosen" not in figures and "trials" in figures:
            chosen = fastest(figures["trials"])
            figures["chosen"] = {str(key): config for key, config in chosen.items()}
            print("chosen", figures["chosen"], flush=True)
            use(chosen)
        if step != "check" and time.monotonic() - begin < arguments.seconds:
            add(step, attempt(job))
    for row in figures.get("time", []):
        order, passes = "causal" if row.get("causal") else "", "f+b" if row.get("backward") else "fwd"
        print(row.get("shape"), order, passes, row.get("us"), row.get("ratio", row.get("failure")))
    checks = figures.get("check", [])
    failed = sum("failure" in row for row in checks)
    right = sum(all(row[x]["right"] for x in ("all", "tokens") if x in row) for row in checks) - failed
    print(f"checks: {len(checks)}, right: {right}, failed to run: {failed}")


if __name__ == "__main__":
    main()
