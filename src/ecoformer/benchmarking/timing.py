"""Times of several contestants within one run: taken in turns, so that drift hits all alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ecoformer.benchmarking.capturing import Work

Key = TypeVar("Key")

_WARM_UP = 3
_FEWEST, _MOST = 5, 1000
_CACHE = 256 << 20
"""Bytes that are written between two GPU calls; no GPU has a greater L2 cache."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contestant.

    Attributes:
        median_ms: the median over the repeats.
        low_ms: the lower quartile.
        high_ms: the upper quartile.
        repeats: how many calls were timed.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        """From the single times."""
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, low, high, len(milliseconds))


def time_contestants(
    contestants: Mapping[Key, Work],
    device: torch.device,
    *,
    seconds: float = 2.0,
    fewest: int = _FEWEST,
) -> dict[Key, Timing]:
    """Run every contestant once a round, round after round.

    Args:
        contestants: calls by name. They were run before: what they compile or tune is done.
        device: where they work. On a GPU each call is timed by events, after the L2 cache was overwritten.
        seconds: budget of all contestants together; the number of rounds follows from it.
        fewest: rounds that are run whatever they take.
    """
    if not contestants:
        return {}
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock
    works = list(contestants.values())
    per_round = _wall(clock, works)
    # A contestant of seconds must not be warmed up for minutes.
    for _ in range(_WARM_UP - 1 if per_round < seconds / 10 else 0):
        per_round = _wall(clock, works)
    rounds = int(min(max(seconds / per_round, fewest), _MOST))
    times = [clock(works) for _ in range(rounds)]
    columns = zip(*times, strict=True)
    return {name: Timing.of(list(column)) for name, column in zip(contestants, columns, strict=True)}


def _wall(clock: Callable[[list[Work]], list[float]], works: list[Work]) -> float:
    """Seconds of a round, all that is around the timed calls included."""
    start = time.perf_counter()
    clock(works)
    return max(time.perf_counter() - start, 1e-7)


def _cpu_clock(works: list[Work]) -> list[float]:
    """One round on the CPU: milliseconds of each, right after a call that is not timed.

    Without that one, short contestants would pay for the caches as the one before them left them.
    """
    times = []
    for work in works:
        work()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _gpu_clock(device: torch.device) -> Callable[[list[Work]], list[float]]:
    flush: Tensor = torch.empty(_CACHE, dtype=torch.int8, device=device)

    def clock(works: list[Work]) -> list[float]:
        with torch.cuda.device(device):
            pairs = []
            for work in works:
                flush.zero_()
                start, end = _event(), _event()
                start.record()
                work()
                end.record()
                # Without it the queue of a launch-bound contestant would be filled during the one before.
                torch.cuda.synchronize(device)
                pairs.append((start, end))
        return [start.elapsed_time(end) for start, end in pairs]

    return clock


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interruptions() -> int | None:
    """How often other programs have taken a processor from this one so far; None where nobody counts."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """PyTorch's CPU threads set to `count` and back again; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
