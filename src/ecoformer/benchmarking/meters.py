"""Counters of energy: NVML of a GPU, RAPL of a processor."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")
_SAMPLING_SECONDS = 0.02


class Meter(Protocol):
    """A counter that only grows."""

    source: str

    def joules(self) -> float:
        """Joules since the meter was opened."""

    def close(self) -> None:
        """Let the counter go."""


class NoMeterError(RuntimeError):
    """This machine lets nobody read such a counter."""


def open_meter(device: torch.device) -> tuple[Meter | None, str]:
    """The counter of `device`, or None and what is missing for one."""
    try:
        return (nvml_meter(device) if device.type == "cuda" else RaplMeter()), ""
    except NoMeterError as error:
        return None, str(error)


class RaplMeter:
    """RAPL: the energy of all processor packages, by the kernel's powercap files."""

    source = "RAPL (all processor packages, whoever uses them)"

    def __init__(self, root: Path | None = None) -> None:
        root = root or POWERCAP
        self._packages = [_Package(zone) for zone in _package_zones(root)]
        if not self._packages:
            raise NoMeterError(
                f"there is no RAPL counter under {root}: it takes Linux on an Intel or AMD processor; most "
                "virtual machines hide it"
            )

    def joules(self) -> float:
        """Joules since the meter was opened. It must be read once before a counter wraps twice (minutes)."""
        return sum(package.microjoules() for package in self._packages) / 1e6

    def close(self) -> None:
        """Files are opened at every reading, so that nothing is held."""


class _Package:
    """One processor package, whose counter starts again at zero when it is full."""

    def __init__(self, zone: Path) -> None:
        self._counter = zone / "energy_uj"
        self._range = _number(zone / "max_energy_range_uj")
        self._last, self._total = _number(self._counter), 0

    def microjoules(self) -> int:
        now = _number(self._counter)
        self._total += now - self._last if now >= self._last else now - self._last + self._range
        self._last = now
        return self._total


def _package_zones(root: Path) -> list[Path]:
    """Packages only: their parts (core, dram) are counted in them, and "psys" counts them again."""
    zones = sorted(zone for zone in root.glob("intel-rapl:*") if zone.name.count(":") == 1)
    return [zone for zone in zones if _text(zone / "name").startswith("package")]


def _number(file: Path) -> int:
    return int(_text(file))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except PermissionError:
        raise NoMeterError(
            f"{file} may be read by root only: run as root, or once `sudo chmod o+r {file.parent}/energy_uj`"
        ) from None
    except OSError as error:
        raise NoMeterError(f"{file} cannot be read: {error.strerror}") from None


def nvml_meter(device: torch.device, pynvml: Any = None) -> Meter:
    """NVML's energy counter of one GPU or, where it has none, its power, sampled and integrated."""
    if pynvml is None:
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoMeterError("NVML is not installed: pip install 'ecoformer[energy]'") from None
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml, device)
        try:
            return NvmlCounter(pynvml, handle)
        except pynvml.NVMLError:
            return NvmlPower(pynvml, handle)
    except pynvml.NVMLError as error:
        raise NoMeterError(f"NVML gives neither energy nor power of {device}: {error}") from None


def _handle(pynvml: Any, device: torch.device) -> Any:
    """NVML's own name of the GPU: it numbers them all, PyTorch only those that are visible."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


class NvmlCounter:
    """The counter of millijoules that GPUs since Volta have."""

    source = "NVML's energy counter (the whole GPU, whoever uses it)"

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml, self._handle = pynvml, handle
        self._start = self._read()

    def joules(self) -> float:
        """Joules since the meter was opened."""
        return (self._read() - self._start) / 1e3

    def close(self) -> None:
        """Shut NVML down."""
        self._pynvml.nvmlShutdown()

    def _read(self) -> int:
        return int(self._pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


class NvmlPower:
    """Power, sampled by a thread of its own and integrated by the trapezoid rule."""

    source = "NVML's power, sampled (the whole GPU, whoever uses it)"

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml, self._handle = pynvml, handle
        self._lock, self._done = threading.Lock(), threading.Event()
        self._total, self._last = 0.0, (time.perf_counter(), self._watts())
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def joules(self) -> float:
        """Joules since the meter was opened."""
        return self._step()

    def close(self) -> None:
        """Stop sampling and shut NVML down."""
        self._done.set()
        self._thread.join()
        self._pynvml.nvmlShutdown()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLING_SECONDS):
            self._step()

    def _step(self) -> float:
        with self._lock:
            now = (time.perf_counter(), self._watts())
            self._total += (now[0] - self._last[0]) * (now[1] + self._last[1]) / 2
            self._last = now
            return self._total

    def _watts(self) -> float:
        return float(self._pynvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
