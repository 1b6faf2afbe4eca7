"""Measured energy, with a Zeus of our own."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ecoformer.accounting import measured
from ecoformer.accounting.measured import EnergyMeter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Machine:
    """A clock and the counter of one device: 10 W idle, 50 W at work."""

    def __init__(self):
        self.now = self.used = 0.0
        self.devices = 2

    def perf_counter(self):
        return self.now

    def sleep(self, seconds, watts=10):
        self.now, self.used = self.now + seconds, self.used + watts * seconds

    def monitor(self, gpu_indices=None, cpu_indices=None):
        """As `zeus.monitor.ZeusMonitor`."""
        if gpu_indices and max(gpu_indices) >= self.devices:
            raise ValueError("No GPUs available.")
        cpus, start = list(range(self.devices)) if cpu_indices is None else cpu_indices, []

        def end_window(name):
            used, seconds = self.used - start[-1][1], self.now - start[-1][0]
            half = dict.fromkeys(cpus, used / 4)  # two packages, each with memory
            gpus = dict.fromkeys(gpu_indices, used)
            return SimpleNamespace(time=seconds, gpu_energy=gpus, cpu_energy=half, dram_energy=half or None)

        def begin_window(name):
            start.append((self.now, self.used))

        return SimpleNamespace(cpu_indices=cpus, begin_window=begin_window, end_window=end_window)


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(measured, "time", made)
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=made.monitor))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


@pytest.mark.parametrize("device", [CPU, GPU])
def test_idle_power_is_subtracted(machine, device):
    found = EnergyMeter(device).measure(lambda: machine.sleep(0.25, watts=50), items=4)
    assert (found["idle_watts"], found["calls"], found["seconds"]) == (10, 12, 3)
    assert found["gross_joules"] == pytest.approx(12.5)
    assert found["joules"] == pytest.approx(10)
    assert found["per_item_joules"] == pytest.approx(2.5)


def test_short_calls_come_in_bursts(machine):
    calls = []
    found = EnergyMeter(GPU).measure(lambda: calls.append(machine.sleep(0.001)))
    assert found["calls"] == len(calls)
    assert found["seconds"] == pytest.approx(3, abs=0.1)


def test_a_machine_without_counters_or_without_zeus(machine, monkeypatch):
    machine.devices = 0
    with pytest.raises(ValueError, match="RAPL"):
        EnergyMeter(CPU)
    with pytest.raises(ValueError, match="cuda:1: No GPUs available"):
        EnergyMeter(GPU)
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    monkeypatch.setitem(sys.modules, "zeus", None)
    with pytest.raises(ImportError, match=r"pip install 'ecoformer\[energy\]'"):
        EnergyMeter(CPU)
