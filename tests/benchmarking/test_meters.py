"""Energy counters, on a sysfs tree and an NVML of our own."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from ecoformer.benchmarking import meters
from ecoformer.benchmarking.energy import EnergyBench
from ecoformer.benchmarking.meters import NoMeterError, RaplMeter, nvml_meter, open_meter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def write_zone(root, zone, name, energy, wrap=1_000_000):
    folder = root / zone
    folder.mkdir(exist_ok=True)
    for file, value in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", wrap)):
        (folder / file).write_text(f"{value}\n")


def test_rapl_sums_packages_and_nothing_twice(tmp_path):
    def set_all(first, second, other):
        write_zone(tmp_path, "intel-rapl:0", "package-0", first)
        write_zone(tmp_path, "intel-rapl:1", "package-1", second)
        write_zone(tmp_path, "intel-rapl:0:0", "core", other)
        write_zone(tmp_path, "intel-rapl:2", "psys", other)

    set_all(100, 200, 0)
    meter = RaplMeter(tmp_path)
    assert meter.joules() == 0
    set_all(500_100, 250_200, 999_999)
    assert meter.joules() == pytest.approx(0.75)


def test_rapl_wraps_around(tmp_path):
    write_zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    meter = RaplMeter(tmp_path)
    for energy, joules in ((950_000, 0.05), (100_000, 0.2), (900_000, 1.0), (0, 1.1)):
        write_zone(tmp_path, "intel-rapl:0", "package-0", energy)
        assert meter.joules() == pytest.approx(joules)


def test_rapl_that_is_not_there_or_not_for_us(tmp_path, monkeypatch):
    with pytest.raises(NoMeterError, match="no RAPL counter"):
        RaplMeter(tmp_path)
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = type(tmp_path).read_text

    def forbidden(self, *args):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *args)

    monkeypatch.setattr(type(tmp_path), "read_text", forbidden)
    with pytest.raises(NoMeterError, match=r"by root only.*chmod"):
        RaplMeter(tmp_path)


class FakeNvml:
    """Either counter, in NVML's words."""

    class NVMLError(Exception):
        pass

    def __init__(self, energy=None, power=None):
        self.energy, self.power, self.ups, self.asked = energy, power, 0, None

    def nvmlInit(self):
        self.ups += 1

    def nvmlShutdown(self):
        self.ups -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer(self.energy)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer(self.power)

    def _answer(self, value):
        if value is None:
            raise self.NVMLError("Not Supported")
        return value


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))


def test_nvml_counter():
    nvml = FakeNvml(energy=5_000, power=1)
    meter = nvml_meter(GPU, nvml)
    assert nvml.asked == "GPU-12-34"
    nvml.energy = 7_500
    assert meter.joules() == 2.5
    assert "energy counter" in meter.source
    meter.close()
    assert nvml.ups == 0


def test_nvml_power_where_there_is_no_counter():
    nvml = FakeNvml(power=100_000)
    meter = nvml_meter(GPU, nvml)
    start = time.perf_counter()
    time.sleep(0.1)
    joules, seconds = meter.joules(), time.perf_counter() - start
    assert joules == pytest.approx(100 * seconds, rel=0.1)
    assert "sampled" in meter.source
    meter.close()
    assert nvml.ups == 0


def test_nvml_with_neither():
    with pytest.raises(NoMeterError, match="neither energy nor power of cuda:0: Not Supported"):
        nvml_meter(GPU, FakeNvml())


def test_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter, missing = open_meter(GPU)
    assert meter is None
    assert "pip install 'ecoformer[energy]'" in missing


class Machine:
    """A clock, a sleep and a counter: 10 W idle and 50 W at work."""

    source = "a machine of ours"

    def __init__(self):
        self.now, self.used, self.closed = 0.0, 0.0, False

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.used = self.now + seconds, self.used + 10 * seconds

    def work(self):
        self.now, self.used = self.now + 0.25, self.used + 50 * 0.25

    def joules(self):
        return self.used

    def close(self):
        self.closed = True


def test_idle_power_is_taken_off_and_stated():
    machine = Machine()
    with EnergyBench(
        CPU, meter=machine, idle_seconds=2, work_seconds=3, clock=machine.clock, sleep=machine.sleep
    ) as bench:
        energy = bench.measure(machine.work, items=4)
        assert "the idle power of 10.0 W" in bench.note
    assert machine.closed
    assert (energy.idle_watts, energy.watts) == (10, 50)
    assert (energy.calls, energy.seconds) == (12, 3)
    assert energy.gross_joules == pytest.approx(12.5)
    assert energy.joules == pytest.approx(10)
    assert energy.per_item_joules == pytest.approx(2.5)


def test_short_calls_come_in_bursts():
    machine = Machine()
    calls = 0

    def work():
        nonlocal calls
        calls += 1
        machine.now += 0.001

    bench = EnergyBench(
        CPU, meter=machine, idle_seconds=1, work_seconds=1, clock=machine.clock, sleep=machine.sleep
    )
    energy = bench.measure(work)
    assert energy.calls == calls
    assert energy.seconds == pytest.approx(1, abs=0.1)


def test_without_a_meter(tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    with EnergyBench(CPU) as bench:
        assert bench.measure(lambda: None) is None
        assert bench.note.startswith("no energy: there is no RAPL counter")
