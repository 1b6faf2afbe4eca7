"""`bench fit`: how long it takes to learn hash functions."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.benchmarking.checking import finite
from ecoformer.benchmarking.measuring import Progress, no_progress, synchronize
from ecoformer.benchmarking.results import Check, Row, Run, Timing
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
    progress: Progress = no_progress,
) -> Run:
    """Fit a hasher to random tokens (B, H, N, D); it must do better than random hash functions."""
    tokens = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    hasher = KernelHasher(shape[1], shape[3], bits, support).to(device)
    untaught = copy.deepcopy(hasher)
    untaught.fit(tokens, options=FitOptions(steps=0, start="random", support="random"))

    def check() -> Check:
        found, random = (each.quality(tokens[:4, :, :_JUDGED]).objective for each in (hasher, untaught))
        return Check(found / random, 1.0, "the objective of random hash functions")

    about = {"shape": list(shape), "bits": bits, "support": support, "hashers": 1}
    return _timed(
        lambda: hasher.fit(tokens, seed=seed, options=options), check, about, device, repeats, progress
    )


def bench_model_fit(
    model: nn.Module,
    batch: Tensor,
    what: str,
    *,
    repeats: int = 3,
    options: FitOptions | None = None,
    progress: Progress = no_progress,
) -> Run:
    """Fit all hashers of a model in one forward pass."""

    def fit() -> object:
        return fit_hashers(model, [batch], samples=len(batch), progress=False, options=options)

    about = {"model": what, "shape": list(batch.shape), "hashers": len(hashers_of(model))}
    check = torch.no_grad()(lambda: finite(model(batch)))
    return _timed(fit, check, about, batch.device, repeats, progress)


def _timed(
    fit: Callable[[], object],
    check: Callable[[], Check],
    about: dict[str, Any],
    device: torch.device,
    repeats: int,
    progress: Progress,
) -> Run:
    """Time every fit, without a warm-up: each takes seconds."""
    times: list[float] = []
    for repeat in range(repeats):
        progress(f"fit {repeat + 1} of {repeats}" + (f", the last took {times[-1]:.1f} s" if times else ""))
        synchronize(device)
        start = time.perf_counter()
        fit()
        synchronize(device)
        times.append(time.perf_counter() - start)
    row = Row("eco", "eager", about)
    row.checked = row.check(check)
    if row.failure is None:
        row.timing = Timing.of([seconds * 1e3 for seconds in times])
        seconds = row.timing.median_ms / 1e3
        row.setting |= {"seconds": seconds, "seconds_per_hasher": seconds / about["hashers"]}
    run = Run.on(device)
    run.rows.append(row)
    return run
