"""Groups of bits on the GPU: outputs and gradients against fp64, and times next to the paper's affinity.

    python benchmarks/gpu_affinity.py --out FOLDER [--steps time,check,trials] [--dtypes bfloat16,float32]

FOLDER/gpu_affinity.json holds what was found so far after every row.

    check    4 x 4, 8 x 2 and 2 x 6 bits; shared and separate hash functions, hyperplanes, masks, weights of
             keys, causal order; fp32, bf16, fp16: the error of output and all gradients, and eager's
    time     16 bits, bf16: the paper's affinity and 4 groups of 4, forward, with backward, in causal order,
             from CUDA graphs in turns; registers and spills of each kernel
    trials   other block sizes and warps for each kernel at the first shape
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.affinity import FLOOR, Affinity
from ecoformer.backends import fused, triton
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes, project, sign_ste
from ecoformer.backends.triton import configs, launch, plans
from ecoformer.backends.triton.configs import ONE_TILE, Config

SHAPES = [(256, 1, 3136, 32), (256, 5, 196, 64), (1, 8, 65536, 64)]
SUPPORT = 25
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
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
    apart: bool = False, cross: bool = False, masked: bool = False, weighted: bool = False,
    planes: bool = False, causal: bool = False, clear: bool = True,
) -> fused.FusedCall:  # fmt: skip
    """`clear`: tokens keep off the projections 0 and ±1, where rounding decides."""
    batch, heads, n, dim = shape
    g = torch.Generator().manual_seed(0)
    functions = draw_functions(heads, dim, bits, planes, g)
    key_functions = draw_functions(heads, dim, bits, planes, g) if apart else None
    device = torch.Generator("cuda").manual_seed(0)

    def tokens() -> Tensor:
        x = torch.randn(batch, n, heads, dim, generator=device, device="cuda").to(dtype).transpose(1, 2)
        if clear:
            both = [f for f in (functions, key_functions) if f is not None]
            y = torch.cat(
                [project(x.double(), type(f)(*(t.double() for t in f))) for f in both], dim=-1
            ).abs()
            good = ((y > 1e-3) & ((y - 1).abs() > 1e-3)).all(dim=-1)
            for sample, kept in zip(x.reshape(-1, n, dim), good.reshape(-1, n), strict=True):
                sample[~kept] = sample[kept][0]
        return x

    q = tokens()
    k = tokens() if cross else None
    v = torch.randn(batch, n, heads, dim, generator=device, device="cuda").to(dtype).transpose(1, 2)
    mask = torch.rand(batch, n, generator=device, device="cuda") < 0.3 if masked else None
    key_weight = 0.5 + torch.rand(batch, heads, n, generator=device, device="cuda") if weighted else None
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
    return sign_ste(project(x.to(wide), functions)).to(x.dtype).to(wide)


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


def check() -> Iterator[Row]:
    small, long = (2, 2, 300, 32), (2, 2, 1500, 64)
    cases: list[tuple[Any, int | None, int, dict[str, bool]]] = [
        (small, 4, 16, {}),
        (long, 4, 16, {}),
        (long, 4, 16, {"masked": True, "weighted": True}),
        (long, 8, 16, {"apart": True}),
        (long, 2, 12, {"apart": True, "cross": True, "weighted": True, "masked": True}),
        (long, 4, 16, {"planes": True, "apart": True}),
        (long, 4, 16, {"causal": True}),
        (long, 8, 16, {"causal": True, "apart": True, "weighted": True, "masked": True}),
        ((2, 2, 700, 128), 4, 16, {}),
        (long, None, 16, {"apart": True, "weighted": True}),
        (long, None, 16, {"causal": True, "cross": True, "weighted": True}),
        (long, None, 16, {"planes": True}),
    ]
    for dtype in DTYPES:
        # Every kernel is compiled for every case, seconds each.
        for shape, groups, bits, options in cases[::5] if dtype == torch.float16 else cases:
            row: Row = {"shape": shape, "groups": groups, "bits": bits, "dtype": str(dtype), **options}
            try:
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
            except Exception as failure:
                row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
            yield row
            torch.cuda.empty_cache()


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


def work(shape: Any, groups: int | None, causal: bool, backward: bool) -> Callable[[], object]:
    call = draw_call(shape, torch.bfloat16, groups, causal=causal, clear=False)
    grad = torch.randn_like(call.v)
    needs = (True, False, True, *[False] * 5)

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


def kernel_times(function: Callable[[], object]) -> Row:
    """Microseconds of each kernel, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            function()
        torch.cuda.synchronize()
    return {
        e.key[:40]: round(e.self_device_time_total / e.count, 1) for e in profile.key_averages() if e.count
    }


def time_shapes() -> Iterator[Row]:
    for shape in SHAPES:
        for causal in (False, True):
            for backward in (False, True):
                row: Row = {"shape": shape, "causal": causal, "backward": backward}
                try:
                    works = {
                        name: work(shape, g, causal, backward) for name, g in (("paper", None), ("4x4", 4))
                    }
                    row["us"] = medians(works)
                    row["ratio"] = row["us"]["4x4"] / row["us"]["paper"]
                    row["kernels"] = {name: kernel_times(each) for name, each in works.items()}
                    row["registers, spills, shared"] = registers()
                except Exception as failure:
                    row["failure"] = f"{type(failure).__name__}: {failure}"[:500]
                plans.forget()
                torch.cuda.empty_cache()
                yield row


TRIALS: dict[str, list[Config]] = {
    "gather": [
        Config(16, 1, 3, 7), Config(16, 1, 2, 9), Config(16, 1, 2, 10), Config(32, 2, 3, 5),
        Config(32, 2, 2, 5), Config(32, 2, 2, 6), Config(32, 1, 2, 7),
    ],
    "read": [
        Config(32, 1, 1, 12), Config(32, 1, 1, 5), Config(64, 1, 1, 8), Config(32, 2, 1, 6),
        Config(16, 1, 1, 8),
    ],
    "gather_grad": [
        Config(16, 1, 3, 7), Config(16, 1, 2, 9), Config(32, 2, 3, 5), Config(32, 2, 2, 4),
        Config(32, 1, 2, 7), Config(32, 1, 3, 16),
    ],
    "token_grad": [
        Config(32, 2, 2, 3), Config(32, 2, 1, 8), Config(32, 2, 1, 16), Config(32, 2, 2, 16),
        Config(16, 1, 1, 7), Config(32, 4, 1, ONE_TILE), Config(32, 2, 1, ONE_TILE), Config(64, 4, 1, 3),
    ],
}  # fmt: skip
CAUSAL_TRIALS = [
    Config(32, 2, 1, 0, 4), Config(32, 2, 1, 0, 16), Config(32, 4, 1, 0, 8), Config(16, 1, 1, 0, 16),
    Config(32, 1, 1, 0, 8), Config(16, 2, 1, 0, 16), Config(64, 2, 1, 0, 4),
]  # fmt: skip


def trials() -> Iterator[Row]:
    for shape in (SHAPES[0], SHAPES[2]):
        for step, choices in TRIALS.items():
            backward = step.endswith("grad")
            for config in (None, *choices):
                row: Row = {"shape": shape, "step": step, "config": config}
                if config is not None and configs.has_async_products(config):
                    continue
                try:
                    with configs.trial(**({} if config is None else {step: config})):
                        row["us"] = medians({"4x4": work(shape, 4, False, backward)}, 0.3)["4x4"]
                except Exception as failure:
                    row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
                plans.forget()
                yield row
        for config in (None, *CAUSAL_TRIALS):
            row = {"shape": shape, "step": "causal", "config": config}
            try:
                chosen = configs.causal_config if config is None else (lambda sizes, config=config: config)
                with mock.patch.object(launch, "causal_config", chosen):
                    plans.forget()
                    for backward in (False, True):
                        found = medians({"4x4": work(shape, 4, True, backward)}, 0.3)["4x4"]
                        row["us with backward" if backward else "us"] = found
            except Exception as failure:
                row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
            plans.forget()
            yield row


STEPS: dict[str, Callable[[], Iterator[Row]]] = {"check": check, "time": time_shapes, "trials": trials}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", default="time,check,trials", help="which, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32,float16", help="of the checks")
    parser.add_argument("--seconds", type=float, default=560, help="start no row after this time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_affinity.py needs a CUDA device")
    arguments.out.mkdir(parents=True, exist_ok=True)
    DTYPES[:] = [getattr(torch, name) for name in arguments.dtypes.split(",")]
    begin = time.monotonic()
    figures: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for step in arguments.steps.split(","):
        rows = figures[step] = []
        for row in STEPS[step]():
            rows.append(row)
            print(step, json.dumps(row), flush=True)
            (arguments.out / "gpu_affinity.json").write_text(json.dumps(figures, indent=1))
            if time.monotonic() - begin > arguments.seconds:
                print("out of time", file=sys.stderr)
                return
    for row in figures.get("time", []):
        order, passes = "causal" if row["causal"] else "", "f+b" if row["backward"] else "fwd"
        print(row["shape"], order, passes, row.get("us"), row.get("ratio", row.get("failure")))
    checks = figures.get("check", [])
    right = [
        "failure" in row or all(row[x]["right"] for x in ("all", "tokens") if x in row) for row in checks
    ]
    failed = sum("failure" in row for row in checks)
    print(f"checks: {len(checks)}, right: {sum(right) - failed}, failed to run: {failed}")


if __name__ == "__main__":
    main()
