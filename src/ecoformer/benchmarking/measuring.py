"""Rows that were found to be right get their time, memory and energy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from ecoformer.benchmarking.capturing import Work
from ecoformer.benchmarking.energy import EnergyBench
from ecoformer.benchmarking.graphs import capture_all
from ecoformer.benchmarking.memory import peak_memory_mb
from ecoformer.benchmarking.results import Row, Run, with_ratios
from ecoformer.benchmarking.timing import interruptions, time_contestants

_OFTEN, _FEW = 120.0, 10
"""Interruptions a second from which on a machine is not quiet, unless they were but a few: one other busy
thread makes 250 on two processors, a quiet system about 40."""


@dataclass(frozen=True)
class Measures:
    """What is measured, and how.

    Attributes:
        device: where the contestants work.
        seconds: how long each is timed, about.
        graphs: time replays of CUDA graphs in the place of calls, their energy too.
        memory: measure the peak memory of a call too.
        meter: measures energy; None for none.
        progress: told what is being done.
        interrupted: how often a second other programs took a processor, while contestants were timed.
    """

    device: torch.device
    seconds: float
    graphs: bool = False
    memory: bool = True
    meter: EnergyBench | None = None
    progress: Callable[[str], None] = lambda text: None
    interrupted: list[float] = field(default_factory=list)


def say_if_busy(run: Run, measures: Iterable[Measures]) -> None:
    """Note it where times on the CPU are not to be trusted.

    Threads that share a processor with somebody else hold up all others at every step, for a slice of time
    that is longer than many calls: SDPA's threads more than those of a kernel that takes but one step.
    """
    often = max((rate for each in measures for rate in each.interrupted), default=0.0)
    if often > _OFTEN:
        run.quiet = False
        run.notes.append(
            f"other programs, or more threads than processors, interrupted this one {often:.0f} times a "
            "second: neither times nor ratios are to be trusted, run it again on a quiet machine"
        )


def measured(
    rows: list[Row], works: dict[int, Work], measures: Measures, title: str, items: int = 1
) -> list[Row]:
    """The rows with their figures.

    Args:
        rows: one for each contestant.
        works: their calls by the index of their row; those that failed have none.
        measures: what is measured.
        title: what is being measured, for `progress`.
        items: samples of a call, for the energy of one.
    """

    def tell(text: str) -> None:
        measures.progress(f"{title}: {text}")

    rows, device, meter = list(rows), measures.device, measures.meter
    timed = capture_all(rows, works, device, tell) if measures.graphs else dict(works)
    tell(f"timing {len(timed)} contestants in turns")
    before, start = interruptions(), time.perf_counter()
    timings = time_contestants(timed, device, seconds=measures.seconds * max(1, len(timed)))
    after, taken = interruptions(), time.perf_counter() - start
    if device.type == "cpu" and before is not None and after is not None and after - before > _FEW:
        measures.interrupted.append((after - before) / taken)
    for index, timing in timings.items():
        rows[index] = replace(rows[index], timing=timing)
        if meter is not None:
            tell(f"energy of {rows[index].label}")
            rows[index] = replace(rows[index], energy=meter.measure(timed[index], items))
    timed.clear()  # Graphs hold the memory of all that they compute.
    for index in timings if measures.memory else ():
        rows[index] = replace(rows[index], peak_mb=peak_memory_mb(works[index], device))
    return with_ratios(rows)
