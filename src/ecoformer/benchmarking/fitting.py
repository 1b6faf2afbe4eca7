"""`bench fit`: how long hash functions take to learn."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ecoformer.benchmarking.results import Check, Row, Run, device_name
from ecoformer.benchmarking.timing import Timing, synchronize
from ecoformer.hashing import FitOptions, KernelHasher, fit_hashers, hashers_of

_JUDGED = 512
"""Tokens of a sample that the objective is computed on."""


def bench_fit(
    shape: tuple[int, int, int, int],
    device: torch.device,
    *,
    bits: int = 16,
    support: int = 25,
    repeats: int = 3,
    seed: int = 0,
    options: FitOptions | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Fit a hasher to random tokens (B, H, N, D); it must have learned something before a time is printed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(shape, generator=generator).to(device)
    run = Run(device_name(device), torch.get_num_threads())
    hasher = KernelHasher(shape[1], shape[3], bits, support).to(device)
    about: dict[str, Any] = {"shape": list(shape), "bits": bits, "support": support, "hashers": 1}
    untaught = copy.deepcopy(hasher).fit(
        tokens, options=FitOptions(steps=0, start="random", support="random")
    )
    times = _times(lambda: hasher.fit(tokens, seed=seed, options=options), device, repeats, progress)
    few = tokens[:4, :, :_JUDGED]
    check = Check(
        hasher.quality(few).objective / untaught.quality(few).objective,
        1.0,
        "the objective of random hash functions",
    )
    run.rows.append(_row(about, times, check, 1))
    return run


def bench_model_fit(
    model: nn.Module,
    batch: torch.Tensor,
    what: str,
    *,
    repeats: int = 3,
    options: FitOptions | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Fit all hashers of a model in one forward pass."""
    device = batch.device
    run = Run(device_name(device), torch.get_num_threads())
    about: dict[str, Any] = {"model": what, "shape": list(batch.shape), "hashers": len(hashers_of(model))}

    def fit() -> object:
        return fit_hashers(model, [batch], samples=len(batch), progress=False, options=options)

    times = _times(fit, device, repeats, progress)
    with torch.no_grad():
        broken = float((~model(batch).isfinite()).float().mean())
    run.rows.append(_row(about, times, Check(broken, 0.0, "finite numbers"), len(hashers_of(model))))
    return run


def _times(
    fit: Callable[[], object], device: torch.device, repeats: int, progress: Callable[[str], None]
) -> list[float]:
    """Milliseconds of every fit; they take seconds, so that none is spent on warming up."""
    times: list[float] = []
    for repeat in range(repeats):
        before = f", the last one took {times[-1] / 1e3:.1f} s" if times else ""
        progress(f"fit {repeat + 1} of {repeats}{before}")
        synchronize(device)
        start = time.perf_counter()
        fit()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _row(about: dict[str, Any], times: list[float], check: Check, hashers: int) -> Row:
    timing = Timing.of(times)
    seconds = {"seconds": timing.median_ms / 1e3, "seconds_per_hasher": timing.median_ms / 1e3 / hashers}
    if check.passed:
        return Row("eco", "eager", about | seconds, check, timing=timing)
    why = f"wrong result: {check.error:.3g} against {check.against}, at most {check.bound:.3g} allowed"
    return Row("eco", "eager", about, check, failure=why, wrong=True)
