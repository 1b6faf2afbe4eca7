"""Energy counters, with a sysfs tree and an NVML of our own."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ecoformer.benchmarking import energy
from ecoformer.benchmarking.energy import EnergyMeter, NoCounterError, _nvml, _rapl

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def write_zone(root, zone, name, joules, wrap=1_000_000):
    folder = root / zone
    folder.mkdir(exist_ok=True)
    for file, value in (("name", name), ("energy_uj", joules), ("max_energy_range_uj", wrap)):
        (folder / file).write_text(f"{value}\n")


def test_rapl_adds_packages_and_nothing_twice(tmp_path):
    def set_all(first, second, other):
        write_zone(tmp_path, "intel-rapl:0", "package-0", first)
        write_zone(tmp_path, "intel-rapl:1", "package-1", second)
        write_zone(tmp_path, "intel-rapl:0:0", "core", other)
        write_zone(tmp_path, "intel-rapl:2", "psys", other)

    set_all(100, 200, 0)
    joules, _ = _rapl(tmp_path)
    assert joules() == 0
    set_all(500_100, 250_200, 999_999)
    assert joules() == pytest.approx(0.75)


def test_rapl_wraps_around(tmp_path):
    write_zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    joules, _ = _rapl(tmp_path)
    for counter, expected in ((950_000, 0.05), (100_000, 0.2), (900_000, 1.0), (0, 1.1)):
        write_zone(tmp_path, "intel-rapl:0", "package-0", counter)
        assert joules() == pytest.approx(expected)


def test_rapl_that_is_missing_or_for_root_only(tmp_path, monkeypatch):
    with pytest.raises(NoCounterError, match="no RAPL counter"):
        _rapl(tmp_path)
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = type(tmp_path).read_text

    def forbidden(self, *args):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *args)

    monkeypatch.setattr(type(tmp_path), "read_text", forbidden)
    with pytest.raises(NoCounterError, match=r"root.*chmod"):
        _rapl(tmp_path)


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
    joules, _ = _nvml(GPU)
    before = joules()
    millijoules.append(7_500)
    assert joules() - before == 2.5
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([]))
    with pytest.raises(NoCounterError, match="Not Supported"):
        _nvml(GPU)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoCounterError, match=r"pip install 'ecoformer\[energy\]'"):
        _nvml(GPU)


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
    monkeypatch.setattr(energy, "_rapl", lambda root: (lambda: made.used, "a machine"))
    return made


def test_idle_power_is_subtracted(machine):
    meter = EnergyMeter(CPU)
    assert "10.0 W" in meter.note
    found = meter.measure(lambda: machine.sleep(0.25, watts=50), items=4)
    assert (found["idle_watts"], found["watts"]) == (10, 50)
    assert (found["calls"], found["seconds"]) == (12, 3)
    assert found["gross_joules"] == pytest.approx(12.5)
    assert found["joules"] == pytest.approx(10)
    assert found["per_item_joules"] == pytest.approx(2.5)


def test_short_calls_come_in_bursts(machine):
    calls = []
    found = EnergyMeter(CPU).measure(lambda: calls.append(machine.sleep(0.001)))
    assert found["calls"] == len(calls)
    assert found["seconds"] == pytest.approx(3, abs=0.1)


def test_without_a_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    meter = EnergyMeter(CPU)
    assert meter.measure(lambda: None) is None
    assert meter.note.startswith("no energy: no RAPL counter")
