"""Rows that were found to be right get their time, memory and energy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ecoformer.benchmarking.capturing import Work
from ecoformer.benchmarking.energy import EnergyBench
from ecoformer.benchmarking.graphs import capture_all
from ecoformer.benchmarking.memory import peak_memory_mb
from ecoformer.benchmarking.results import Row, with_ratios
from ecoformer.benchmarking.timing import time_contestants


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
    """

    device: torch.device
    seconds: float
    graphs: bool = False
    memory: bool = True
    meter: EnergyBench | None = None
    progress: Callable[[str], None] = lambda text: None


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
    timings = time_contestants(timed, device, seconds=measures.seconds * max(1, len(timed)))
    for index, timing in timings.items():
        rows[index] = replace(rows[index], timing=timing)
        if meter is not None:
            tell(f"energy of {rows[index].label}")
            rows[index] = replace(rows[index], energy=meter.measure(timed[index], items))
    timed.clear()  # Graphs hold the memory of all that they compute.
    for index in timings if measures.memory else ():
        rows[index] = replace(rows[index], peak_mb=peak_memory_mb(works[index], device))
    return with_ratios(rows)
