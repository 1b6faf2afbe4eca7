"""Energy by NVML's counter of an NVIDIA GPU. Idle power is subtracted."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

IDLE_SECONDS = 2.0
WORK_SECONDS = 3.0
"""NVML updates its counter about ten times per second: three seconds are right to three percent."""
_BURST_SECONDS = 0.02
SOURCE = "NVML's energy counter (the entire GPU, all processes)"


class EnergyMeter:
    """Measures calls; idle power is measured once, before any of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._joules = device, _counter(device)
        before, start = self._joules(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        self._idle_watts = (self._joules() - before) / (time.perf_counter() - start)
        self.note = f"energy by {SOURCE}; idle power of {self._idle_watts:.1f} W is subtracted"

    def measure(self, work: Callable[[], object], items: int = 1) -> dict[str, Any]:
        """Run `work` again and again: joules per call and per item."""
        calls, burst, taken = 0, 1, 0.0
        before, start = self._joules(), time.perf_counter()
        while taken < WORK_SECONDS:
            for _ in range(burst):
                work()
            torch.cuda.synchronize(self._device)
            calls += burst
            now = time.perf_counter() - start
            # Waiting for each call would leave the GPU idle between short ones.
            burst, taken = (burst * 2 if now - taken < _BURST_SECONDS else burst), now
        gross = self._joules() - before
        net = gross - self._idle_watts * taken
        return {
            "joules": net / calls,
            "gross_joules": gross / calls,
            "idle_watts": self._idle_watts,
            "watts": gross / taken,
            "calls": calls,
            "seconds": taken,
            "source": SOURCE,
            "per_item_joules": net / calls / items,
        }


def _counter(device: torch.device) -> Callable[[], float]:
    """Joules that this GPU has used so far."""
    if device.type != "cuda":
        raise ValueError(f"--energy needs an NVIDIA GPU, got {device}: leave it out")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise ImportError("--energy needs NVML: pip install 'ecoformer[energy]'") from error
    try:
        nvml.nvmlInit()
        # By UUID, because NVML counts all GPUs and PyTorch only the visible ones.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise RuntimeError(f"--energy: NVML has no counter for {device} (Volta or later): {error}") from error
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
