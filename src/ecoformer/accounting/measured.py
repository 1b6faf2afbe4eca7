"""Measured energy, by Zeus: NVML's counter of a GPU, RAPL's counters of CPUs. Idle power is subtracted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ecoformer.arguments import one_line
from ecoformer.third_party import import_library

IDLE_SECONDS = 2.0
WORK_SECONDS = 3.0
"""NVML updates its counter about ten times per second: three seconds are right to three percent."""
_BURST_SECONDS = 0.02
SOURCES = {
    "cuda": "the GPU's energy counter (entire GPU, all processes)",
    "cpu": "RAPL's energy counters (all CPU packages and their memory, all processes)",
}


class EnergyMeter:
    """Measures calls; idle power is measured once, before any of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._monitor = device, _monitor(device)
        joules, seconds = self._window(lambda: time.sleep(IDLE_SECONDS))
        self.idle_watts = joules / seconds
        self.note = f"energy by {SOURCES[device.type]}; idle power of {self.idle_watts:.1f} W is subtracted"

    def measure(self, work: Callable[[], object], items: int = 1) -> dict[str, Any]:
        """Run `work` again and again: joules per call and per item, without and with idle power."""
        calls = 0

        def repeat() -> None:
            nonlocal calls
            burst, taken, start = 1, 0.0, time.perf_counter()
            while taken < WORK_SECONDS:
                for _ in range(burst):
                    work()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                calls += burst
                now = time.perf_counter() - start
                # Waiting for each call would leave the GPU idle between short ones.
                burst, taken = (burst * 2 if now - taken < _BURST_SECONDS else burst), now

        gross, seconds = self._window(repeat)
        net = gross - self.idle_watts * seconds
        return {
            "joules": net / calls,
            "per_item_joules": net / calls / items,
            "gross_joules": gross / calls,
            "idle_watts": self.idle_watts,
            "calls": calls,
            "seconds": seconds,
            "source": SOURCES[self._device.type],
        }

    def _window(self, work: Callable[[], object]) -> tuple[float, float]:
        """Joules and seconds of some work."""
        self._monitor.begin_window("ecoformer")
        work()
        found = self._monitor.end_window("ecoformer")
        on_gpu = self._device.type == "cuda"
        counters = (found.gpu_energy,) if on_gpu else (found.cpu_energy, found.dram_energy)
        return sum(sum((counter or {}).values()) for counter in counters), found.time


def _monitor(device: torch.device) -> Any:
    """Zeus on the counters of this device alone."""
    monitor_class = import_library("zeus.monitor").ZeusMonitor
    if device.type != "cuda":
        monitor = monitor_class(gpu_indices=[])
        if not monitor.cpu_indices:
            raise ValueError("Zeus reads no energy counter of this CPU: RAPL needs root or the zeusd service")
        return monitor
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return monitor_class(gpu_indices=[index], cpu_indices=[])
    except Exception as error:
        raise ValueError(f"Zeus reads no energy counter of {device}: {one_line(error)}") from error
