"""Contestants are timed in turns, as often as the time allows."""

import time

import pytest
import torch

from ecoformer.benchmarking import Timing, time_contestants
from ecoformer.benchmarking.memory import peak_memory_mb
from ecoformer.benchmarking.timing import threads

CPU = torch.device("cpu")


def test_in_turns():
    calls = []
    works = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = time_contestants(works, CPU, seconds=0.001)
    # Each call that is timed follows one that is not.
    assert "".join(calls) == "aabbcc" * (len(calls) // 6)
    assert set(timings) == set("abc")
    # Warm-up rounds are not among the repeats.
    assert timings["a"].repeats == len(calls) // 6 - 3


def test_what_is_slower_takes_longer():
    works = {"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.004)}
    timings = time_contestants(works, CPU, seconds=0.1)
    assert 1 <= timings["short"].median_ms < 4 <= timings["long"].median_ms
    assert timings["long"].low_ms <= timings["long"].median_ms <= timings["long"].high_ms


def test_the_budget_decides_over_repeats():
    def repeats(pause, seconds):
        return time_contestants({"a": lambda: time.sleep(pause)}, CPU, seconds=seconds)["a"].repeats

    assert repeats(0.005, 0.01) == 5  # the fewest
    assert 5 < repeats(0.002, 0.06) <= 15
    assert repeats(0.0, 1.0) == 1000  # the most


def test_nobody_comes():
    assert time_contestants({}, CPU) == {}


def test_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low_ms, timing.median_ms, timing.high_ms, timing.repeats) == (2.0, 3.0, 4.0, 5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(before + 1) as count:
        assert count == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with threads(None) as count:
        assert count == before


@pytest.mark.parametrize("temporaries", [0, 3])
def test_peak_memory_of_a_call(temporaries, capfd):
    def work():
        held = [torch.ones(250_000) for _ in range(temporaries)]
        del held
        return torch.ones(250_000)

    work()
    assert peak_memory_mb(work, CPU) == pytest.approx(max(1, temporaries), rel=0.01)
    assert capfd.readouterr() == ("", "")
