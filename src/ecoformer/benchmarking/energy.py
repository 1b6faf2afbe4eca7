"""Energy that a machine's own counters measured, with its idle power taken off and stated."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ecoformer.benchmarking.meters import Meter, open_meter
from ecoformer.benchmarking.timing import synchronize

IDLE_SECONDS = 2.0
WORK_SECONDS = 3.0
"""NVML refreshes its counter about ten times a second: over three seconds that is three percent at worst."""

_BURST_SECONDS = 0.02


@dataclass(frozen=True)
class Energy:
    """Energy of one call.

    Attributes:
        joules: of a call, idle power taken off.
        gross_joules: of a call, as measured.
        idle_watts: what was taken off for every second, measured before.
        watts: mean power while it ran.
        calls: how many calls were measured.
        seconds: how long they took.
        source: the counter.
        per_item_joules: `joules` divided by the images or texts of a call.
    """

    joules: float
    gross_joules: float
    idle_watts: float
    watts: float
    calls: int
    seconds: float
    source: str
    per_item_joules: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class EnergyBench:
    """Measures calls with one meter; idle power is measured once, before any of them.

    Args:
        device: whose energy is asked for.
        meter: the counter; by default the one that this machine has.
        idle_seconds: how long idle power is measured.
        work_seconds: how long each contestant runs.
        clock: seconds; tests have their own.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        meter: Meter | None = None,
        idle_seconds: float | None = None,
        work_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._clock = device, clock
        self._work_seconds = WORK_SECONDS if work_seconds is None else work_seconds
        self._closing = ExitStack()
        found = (meter, "") if meter is not None else open_meter(device)
        self.meter, self.missing = found
        self.idle_watts = 0.0
        if self.meter is not None:
            self._closing.callback(self.meter.close)
            synchronize(device)
            start, before = clock(), self.meter.joules()
            sleep(IDLE_SECONDS if idle_seconds is None else idle_seconds)
            self.idle_watts = (self.meter.joules() - before) / (clock() - start)

    @property
    def note(self) -> str:
        """What a reader must know of the figures, or why there are none."""
        if self.meter is None:
            return f"no energy: {self.missing}"
        idle = f"the idle power of {self.idle_watts:.1f} W, measured before, is taken off"
        return f"energy by {self.meter.source}; {idle}"

    def measure(self, work: Callable[[], object], items: int = 1) -> Energy | None:
        """Run `work` again and again and share the energy out; None without a meter."""
        if self.meter is None:
            return None
        calls, burst = 0, 1
        synchronize(self._device)
        start, before = self._clock(), self.meter.joules()
        while (begun := self._clock()) - start < self._work_seconds:
            for _ in range(burst):
                work()
            synchronize(self._device)
            calls += burst
            # Waiting for every call would leave the GPU idle between short ones.
            burst = burst * 2 if self._clock() - begun < _BURST_SECONDS else burst
        gross = self.meter.joules() - before
        seconds = self._clock() - start
        net = gross - self.idle_watts * seconds
        return Energy(
            net / calls,
            gross / calls,
            self.idle_watts,
            gross / seconds,
            calls,
            seconds,
            self.meter.source,
            net / calls / items,
        )

    def close(self) -> None:
        """Let the counter go."""
        self._closing.close()

    def __enter__(self) -> EnergyBench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
