"""Measure which launch configurations are fastest for a call, and remember them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph  # type: ignore[import-untyped, unused-ignore]

from ecoformer.backends.fused import Call, CannotRun, HashFunctions, plain, plain_backward
from ecoformer.backends.triton import launch, launch_backward
from ecoformer.backends.triton.configs import ONE_TILE, STEPS, Config, Step, choose, remember, sizes_of, trial

_TILES = ((16, 1), (32, 1), (64, 1), (16, 2), (32, 2), (64, 2), (32, 4), (16, 8))
"""Tokens and warps, none with `configs.has_async_products`."""
_STAGES = (1, 2, 3)
_PER_SM = (0, 2, 4, 8, 16, 32, ONE_TILE)
_ROUNDING = 2.0**-6
_NEEDS = (True, False, True, False)
Work = Callable[[], Sequence[Tensor | None]]


def tune(
    q: Tensor,
    v: Tensor,
    functions: HashFunctions,
    beta: float,
    *,
    backward: bool = True,
    seconds: float = 60.0,
    save: bool = True,
) -> dict[Step, tuple[Config, float]]:
    """Find configurations for self-attention of these shapes: one setting at a time, step by step.

    What gives other results than eager PyTorch does not count, however fast.

    Args:
        q: tokens (B, H, N, D) on a CUDA device.
        v: values (B, H, N, E).
        functions: hash functions of all heads.
        beta: as `forward` takes it.
        backward: tune its steps too.
        seconds: no further configuration is tried after that.
        save: write what was found to `configs.cache_file()`.

    Returns:
        By step: the best configuration, and the milliseconds of the forward or backward that it is part of.
    """
    end = time.perf_counter() + seconds
    call = Call(q, None, v, None, functions, beta, False)
    sizes = sizes_of(call.q, call.v, functions.support, functions.weight.shape[-1])
    grad = torch.randn_like(call.v)
    truths = _truths(call, grad if backward else None)
    works: dict[str, Work] = {"forward": lambda: launch.forward(call)[:1]}
    if backward:
        saved = launch.forward(call)[1]
        works["backward"] = lambda: launch_backward.backward(call, grad, saved, _NEEDS)
    best: dict[Step, tuple[Config, float]] = {}
    for step in STEPS if backward else STEPS[:2]:
        way = "backward" if step.endswith("grad") else "forward"
        with trial(**{name: config for name, (config, _) in best.items()}):
            # A step that one launch for both passes makes needless.
            if step in ("read", "token_grad") and list(best.values())[-1][0].per_sm == 0:
                continue
            best[step] = _descend(step, choose(step, sizes, q.device), works[way], truths[way], end)
    if save:
        remember(sizes, q.device, {step: config for step, (config, _) in best.items()})
    return best


def _truths(call: Call, grad: Tensor | None) -> dict[str, list[Tensor]]:
    """What eager PyTorch computes in fp32: the output, and the gradients of tokens and values."""
    wide = call._replace(q=call.q.float(), v=call.v.float())
    found = {"forward": [plain(wide).detach()]}
    if grad is not None:
        found["backward"] = [x for x in plain_backward(wide, grad.float(), _NEEDS) if x is not None]
    return found


def _descend(step: Step, start: Config, work: Work, truth: list[Tensor], end: float) -> tuple[Config, float]:
    best, fastest = start, _milliseconds(step, start, work, truth)
    for variants in (_tiles, _stages, _programs):
        for config in variants(step, best):
            if config != best and time.perf_counter() < end:
                taken = _milliseconds(step, config, work, truth)
                if taken < fastest:
                    best, fastest = config, taken
    if fastest == float("inf"):
        raise RuntimeError(
            f"no configuration of {step} gives the results of eager: set ECOFORMER_BACKEND=eager"
        )
    return best, fastest


def _tiles(step: Step, config: Config) -> Iterator[Config]:
    return (config._replace(block=block, warps=warps) for block, warps in _TILES)


def _stages(step: Step, config: Config) -> Iterator[Config]:
    return (config._replace(stages=stages) for stages in _STAGES)


def _programs(step: Step, config: Config) -> Iterator[Config]:
    alone = step in ("gather", "gather_grad")
    return (config._replace(per_sm=count) for count in _PER_SM if count or alone)


def _milliseconds(step: Step, config: Config, work: Work, truth: list[Tensor]) -> float:
    with trial(**{step: config}):
        try:
            found = [x for x in work() if x is not None]
            if not all(map(_same, found, truth)):
                return float("inf")
            return float(do_bench_cudagraph(work, rep=20, return_mode="median"))
        except CannotRun:
            return float("inf")


def _same(x: Tensor, truth: Tensor) -> bool:
    """Up to the rounding of half precision; NaN is not."""
    wide = truth.double()
    return bool((x.double() - wide).norm() <= _ROUNDING * wide.norm())
