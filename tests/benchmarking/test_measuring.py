"""Time, memory and CUDA graphs; what needs a GPU is in `test_bench_gpu.py`."""

import time

import pytest
import torch

from ecoformer.benchmarking import Row, Timing, Work, measuring, time_contestants
from ecoformer.benchmarking.measuring import Bench, peak_memory_mb

CPU = torch.device("cpu")


def test_contestants_are_timed_in_turns():
    calls = []
    works = {name: Work(lambda name=name: calls.append(name)) for name in "abc"}
    timings = time_contestants(works, CPU, seconds=0.001)
    # Each timed call follows one that is not timed.
    assert "".join(calls) == "aabbcc" * (len(calls) // 6)
    assert set(timings) == set("abc")
    assert timings["a"].repeats == len(calls) // 6 - 3  # without warm-up rounds


def test_what_is_slower_takes_longer():
    works = {"short": Work(lambda: time.sleep(0.001)), "long": Work(lambda: time.sleep(0.004))}
    timings = time_contestants(works, CPU, seconds=0.1)
    assert 1 <= timings["short"].median_ms < 4 <= timings["long"].median_ms
    assert timings["long"].low_ms <= timings["long"].median_ms <= timings["long"].high_ms


def test_the_budget_determines_the_repeats():
    def repeats(pause, seconds):
        return time_contestants({"a": Work(lambda: time.sleep(pause))}, CPU, seconds=seconds)["a"].repeats

    assert repeats(0.005, 0.01) == 5  # the fewest
    assert 5 < repeats(0.002, 0.06) <= 15
    assert repeats(0.0, 1.0) == 1000  # the most


def test_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low_ms, timing.median_ms, timing.high_ms, timing.repeats) == (2.0, 3.0, 4.0, 5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize("temporaries", [0, 3])
def test_peak_memory_of_a_call(temporaries, capfd):
    def work():
        held = [torch.ones(250_000) for _ in range(temporaries)]
        del held
        return torch.ones(250_000)

    work()
    assert peak_memory_mb(work, CPU) == pytest.approx(max(1, temporaries), rel=0.01)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("rate", "quiet"), [(40, True), (4000, False)])
def test_a_busy_machine_is_noted(monkeypatch, rate, quiet):
    start = time.perf_counter()
    monkeypatch.setattr(measuring, "interruptions", lambda: int(rate * (time.perf_counter() - start)))
    bench = Bench(CPU, 0.05, memory=False)
    bench.measure([Row("a", "b", {})], [Work(lambda: time.sleep(0.001))])
    assert bench.run.quiet == bench.run.to_dict()["quiet"] == quiet
    assert any("busy" in note for note in bench.run.notes) != quiet


@pytest.fixture
def capturing(monkeypatch):
    """Stands in for CUDA: a graph is the call, counted; `broken` names calls that cannot be captured."""
    state = {"replays": 0, "places": 0, "broken": [], "alive": 0}

    class Replay:
        def __init__(self, work):
            self.work = work
            state["alive"] += 1

        def __call__(self):
            state["replays"] += 1
            self.work()

        def __del__(self):
            state["alive"] -= 1

    def capture(work, place):
        if work.call in state["broken"]:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return Work(Replay(work), work.backend), work()

    def capture_place(device):
        state["places"] += 1
        return (state["places"],)

    monkeypatch.setattr(measuring, "capture", capture)
    monkeypatch.setattr(measuring, "capture_place", capture_place)
    return state


def measure(calls, **how):
    bench = Bench(CPU, 0.001, **{"memory": False} | how)
    bench.graphs = True
    rows = [Row(str(i), "", {}) for i in range(len(calls))]
    bench.measure(rows, [Work(call) for call in calls])
    return rows


def test_graphs_need_a_gpu():
    with pytest.raises(ValueError, match="--graphs needs a CUDA device, got cpu"):
        Bench(CPU, graphs=True)


def test_replays_are_timed(capturing):
    calls = [lambda: torch.ones(3), lambda: (torch.ones(2), None), lambda: None]
    rows = measure(calls)
    assert [row.failure for row in rows] == [None] * 3
    assert capturing["places"] == 1
    # One replay for the comparison; the CPU's clock calls twice in each round.
    assert capturing["replays"] >= sum(1 + 2 * row.timing.repeats for row in rows)


def test_what_cannot_be_captured_says_so(capturing):
    def broken():
        return torch.ones(3)

    capturing["broken"] = [broken]
    rows = measure([broken, lambda: torch.ones(3)])
    assert rows[0].failure == (
        "cannot be captured as a CUDA graph: operation not permitted when stream is capturing"
    )
    assert rows[0].timing is None
    assert rows[1].timing is not None
    assert [row.wrong for row in rows] == [False] * 2
    assert capturing["places"] == 2  # what follows a failed capture has memory of its own


def test_a_wrong_replay_gets_no_time(capturing):
    results = iter([torch.ones(3)] + [torch.zeros(3)] * 10_000)
    (row,) = measure([lambda: next(results)])
    assert row.failure.startswith("wrong result")
    assert row.wrong
    assert row.timing is None


def test_graphs_are_freed_before_memory_is_measured(capturing, monkeypatch):
    seen = []
    monkeypatch.setattr(
        measuring, "peak_memory_mb", lambda work, device: seen.append(capturing["alive"]) or 1.0
    )
    rows = measure([lambda: torch.ones(3), lambda: torch.ones(2)], memory=True)
    assert seen == [0, 0]
    assert [row.peak_mb for row in rows] == [1.0, 1.0]
