"""Energy by the machine's own counters: NVML for a GPU, RAPL for a processor. Idle power is subtracted."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
IDLE_SECONDS = 2.0
WORK_SECONDS = 3.0
"""NVML updates its counter about ten times per second: three seconds are right to three percent."""
_BURST_SECONDS = 0.02


class NoCounterError(RuntimeError):
    """There is no energy counter, or it cannot be read."""


class EnergyMeter:
    """Measures calls; idle power is measured once, before any of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._counter, self._idle_watts = device, None, 0.0
        try:
            self._counter, self._source = _nvml(device) if device.type == "cuda" else _rapl(POWERCAP)
        except NoCounterError as error:
            self.note = f"no energy: {error}"
            return
        before, start = self._counter(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        self._idle_watts = (self._counter() - before) / (time.perf_counter() - start)
        self.note = f"energy by {self._source}; idle power of {self._idle_watts:.1f} W is subtracted"

    def measure(self, work: Callable[[], object], items: int = 1) -> dict[str, Any] | None:
        """Run `work` again and again: joules per call and per item; None without a counter."""
        if self._counter is None:
            return None
        calls, burst, taken = 0, 1, 0.0
        before, start = self._counter(), time.perf_counter()
        while taken < WORK_SECONDS:
            for _ in range(burst):
                work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            calls += burst
            now = time.perf_counter() - start
            # Waiting for each call would leave the GPU idle between short ones.
            burst, taken = (burst * 2 if now - taken < _BURST_SECONDS else burst), now
        gross = self._counter() - before
        net = gross - self._idle_watts * taken
        return {
            "joules": net / calls,
            "gross_joules": gross / calls,
            "idle_watts": self._idle_watts,
            "watts": gross / taken,
            "calls": calls,
            "seconds": taken,
            "source": self._source,
            "per_item_joules": net / calls / items,
        }


def _nvml(device: torch.device) -> tuple[Callable[[], float], str]:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        raise NoCounterError("NVML is not installed: pip install 'ecoformer[energy]'") from None
    try:
        pynvml.nvmlInit()
        # By UUID, because NVML counts all GPUs and PyTorch only the visible ones.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise NoCounterError(f"NVML has no energy counter for {device} (Volta or later): {error}") from None
    source = "NVML's energy counter (the whole GPU, all processes)"
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3, source


def _rapl(root: Path) -> tuple[Callable[[], float], str]:
    """All processor packages. Their parts (core, dram) are included in them, and "psys" includes them."""
    zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    zones = [zone for zone in zones if _read(zone / "name").startswith("package")]
    if not zones:
        needs = "it needs Linux on an Intel or AMD processor, and most virtual machines hide it"
        raise NoCounterError(f"no RAPL counter under {root}: {needs}")
    ranges = [int(_read(zone / "max_energy_range_uj")) for zone in zones]
    last = [int(_read(zone / "energy_uj")) for zone in zones]
    total = 0

    def joules() -> float:
        nonlocal total
        for i, zone in enumerate(zones):
            now = int(_read(zone / "energy_uj"))
            total += (now - last[i]) % ranges[i]  # a full counter starts again at zero
            last[i] = now
        return total / 1e6

    return joules, "RAPL (all processor packages, all processes)"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        remedy = f"run as root, or run `sudo chmod o+r {file}` once"
        raise NoCounterError(f"cannot read {file} ({error.strerror}): {remedy}") from None
