"""Measured energy, with a Zeus of our own."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ecoformer.benchmarking import energy
from ecoformer.benchmarking.energy import EnergyMeter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Machine:
    """A clock and counters: 10 W idle and 50 W at work for the device that is measured, and others' noise."""

    def __init__(self, packages=2, gpus=2):
        self.now = self.used = 0.0
        self.packages, self.gpus = packages, gpus

    def perf_counter(self):
        return self.now

    def sleep(self, seconds, watts=10):
        self.now, self.used = self.now + seconds, self.used + watts * seconds

    def monitor(self, gpu_indices=None, cpu_indices=None):
        """As `zeus.monitor.ZeusMonitor`."""
        if gpu_indices and max(gpu_indices) >= self.gpus:
            raise ValueError("No GPUs available.")
        cpus = list(range(self.packages)) if cpu_indices is None else cpu_indices
        windows = {}

        def begin_window(name):
            windows[name] = self.now, self.used

        def end_window(name):
            start, before = windows.pop(name)
            used, gpu = self.used - before, bool(gpu_indices)
            half = dict.fromkeys(cpus, used / 4)  # two packages, each with memory
            return SimpleNamespace(
                time=self.now - start,
                gpu_energy=dict.fromkeys(gpu_indices, used) if gpu else {},
                cpu_energy=half or None,
                dram_energy=half or None,
            )

        return SimpleNamespace(cpu_indices=cpus, begin_window=begin_window, end_window=end_window)


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(energy, "time", made)
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=made.monitor))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


@pytest.mark.parametrize("device", [CPU, GPU])
def test_idle_power_is_subtracted(machine, device):
    meter = EnergyMeter(device)
    assert "10.0 W" in meter.note
    found = meter.measure(lambda: machine.sleep(0.25, watts=50), items=4)
    assert (found["idle_watts"], found["watts"]) == (10, 50)
    assert (found["calls"], found["seconds"]) == (12, 3)
    assert found["gross_joules"] == pytest.approx(12.5)
    assert found["joules"] == pytest.approx(10)
    assert found["per_item_joules"] == pytest.approx(2.5)


def test_short_calls_come_in_bursts(machine):
    calls = []
    found = EnergyMeter(GPU).measure(lambda: calls.append(machine.sleep(0.001)))
    assert found["calls"] == len(calls)
    assert found["seconds"] == pytest.approx(3, abs=0.1)


def test_a_machine_without_counters_says_so(machine):
    machine.packages = machine.gpus = 0
    with pytest.raises(ValueError, match="RAPL"):
        EnergyMeter(CPU)
    with pytest.raises(ValueError, match=r"cuda:1 \(No GPUs available"):
        EnergyMeter(GPU)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    monkeypatch.setitem(sys.modules, "zeus", None)
    with pytest.raises(ImportError, match=r"pip install 'ecoformer\[energy\]'"):
        EnergyMeter(CPU)
