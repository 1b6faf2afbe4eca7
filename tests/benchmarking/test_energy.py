"""The energy counter, with an NVML of our own."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ecoformer.benchmarking import energy
from ecoformer.benchmarking.energy import EnergyMeter, _counter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def fake_nvml(answer):
    class NVMLError(Exception):
        pass

    def energy_of(handle):
        assert handle == "handle of GPU-12-34"
        if not answer:
            raise NVMLError("Not Supported")
        return answer[-1]

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=energy_of,
    )


def test_nvml(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    millijoules = [5_000]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(millijoules))
    joules = _counter(GPU)
    before = joules()
    millijoules.append(7_500)
    assert joules() - before == 2.5
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([]))
    with pytest.raises(RuntimeError, match="Not Supported"):
        _counter(GPU)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"pip install 'ecoformer\[energy\]'"):
        _counter(GPU)


class Machine:
    """A clock and a counter: 10 W idle and 50 W at work."""

    def __init__(self):
        self.now = self.used = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds, watts=10):
        self.now, self.used = self.now + seconds, self.used + watts * seconds


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(energy, "time", made)
    monkeypatch.setattr(energy, "_counter", lambda device: lambda: made.used)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_idle_power_is_subtracted(machine):
    meter = EnergyMeter(GPU)
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


def test_a_cpu_has_no_counter():
    with pytest.raises(ValueError, match="--energy needs an NVIDIA GPU, got cpu"):
        EnergyMeter(CPU)
