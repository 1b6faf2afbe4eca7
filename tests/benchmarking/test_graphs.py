"""`--graphs`: replays are timed, and what cannot be captured says so. Captures themselves need a GPU."""

import json
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from ecoformer.attention import PerformerAttention
from ecoformer.benchmarking import crossover, graphs, measuring
from ecoformer.benchmarking.attention import bench_attention
from ecoformer.benchmarking.graphs import capture_all
from ecoformer.benchmarking.models import Load, bench_models
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.results import Row
from ecoformer.cli import main
from ecoformer.models.text import TextEncoder

CPU = torch.device("cpu")
SMALL = Setting((1, 2, 40, 8), torch.float32, CPU, graphs=True)


class Recorder:
    """Stands in for CUDA: "captures" calls, refuses some, counts replays."""

    def __init__(self):
        self.rooms, self.replays, self.broken, self.waiting = [], 0, [], []

    def captured(self, work, room):
        self.rooms.append(room)
        work()
        if self.broken and self.broken.pop(0):
            raise self.broken_with

        def replay():
            self.replays += 1
            work()

        return replay

    broken_with = RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it.")

    def waits(self, work):
        return work in self.waiting


@pytest.fixture
def cuda(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(graphs, "captured", recorder.captured)
    monkeypatch.setattr(graphs, "waits", recorder.waits)
    for module in ("benchmarking.attention", "benchmarking.models", "cli.bench"):
        monkeypatch.setattr(import_module(f"ecoformer.{module}"), "require_graphs", lambda device: None)
    return recorder


def bench(setting=SMALL, names=("softmax", "eco", "performer"), **kwargs):
    return bench_attention([setting], names, seconds=0.01, **{"memory": False} | kwargs)


@pytest.fixture
def model():
    return TextEncoder(attention="softmax", vocabulary=30, length=40, dim=16, hidden=8, depth=1).eval()


def bench_model(model, names=("softmax", "eco"), batches=(1,), **how):
    def texts(count):
        return torch.randint(1, 30, (count, 40), generator=torch.Generator().manual_seed(count))

    load = Load(texts, "tokens", {"model": "text"}, per_sample=40, **{"graphs": True} | how)
    return bench_models(model, names, load, batches, CPU, seconds=0.01)


def test_a_cpu_has_no_graphs(model):
    with pytest.raises(ValueError, match="need a CUDA device, got cpu"):
        bench()
    with pytest.raises(ValueError, match="need a CUDA device, got cpu"):
        bench_model(model)


@pytest.mark.parametrize("backward", [False, True])
def test_replays_are_timed(cuda, backward):
    run = bench(replace(SMALL, backward=backward))
    assert [row.failure for row in run.rows] == [None] * 3
    # Each was replayed once for the comparison; the CPU's clock calls twice in each timed and warm-up round.
    rounds = [row.timing.repeats for row in run.rows]
    assert cuda.replays >= 3 + 2 * sum(rounds)
    assert len(set(map(id, cuda.rooms))) == 1
    assert all(row["graphs"] is True for row in run.to_dict()["rows"])


def test_without_graphs_nothing_is_captured(cuda):
    run = bench(replace(SMALL, graphs=False))
    assert not cuda.rooms
    assert run.to_dict()["rows"][0]["graphs"] is False


def test_what_cannot_be_captured_says_so(cuda):
    cuda.broken = [False, True, False]
    run = bench()
    softmax, eco, performer = run.rows
    assert eco.failure == (
        "cannot be captured as a CUDA graph: CUDA error: operation not permitted when stream is capturing "
        "Search for it."
    )
    assert eco.timing is eco.ratio_to_sdpa is None
    assert softmax.timing
    assert performer.timing
    assert not run.wrong
    assert eco.checked.passed
    # What follows a failed capture has memory of its own.
    assert cuda.rooms[0] is cuda.rooms[1] is not cuda.rooms[2]


def test_no_room_for_a_graph_is_no_fault(cuda):
    cuda.broken, cuda.broken_with = [False, True, False], torch.OutOfMemoryError("no room")
    assert [row.failure for row in bench().rows] == [None, "out of memory", None]


def test_a_wrong_replay_gets_no_time(cuda, monkeypatch):
    state = {"replaying": False}
    right = PerformerAttention.attend

    def attend(self, q, *rest):
        out = right(self, q, *rest)
        return out * 0 if state["replaying"] else out

    monkeypatch.setattr(PerformerAttention, "attend", attend)

    def captured(work, room):
        def replay():
            state["replaying"] = True
            work()
            state["replaying"] = False

        return replay

    monkeypatch.setattr(graphs, "captured", captured)
    run = bench()
    assert [row.mechanism for row in run.wrong] == ["performer"]
    assert run.rows[2].failure == "wrong result: the replay is 1.0e+00 off, at most 1e-02 allowed"
    assert run.rows[2].timing is None
    assert run.rows[1].timing


def test_calls_that_wait_are_captured_last(cuda):
    order = []
    works = {i: (lambda i=i: order.append(i)) for i in range(3)}
    cuda.waiting = [works[0]]
    replays = capture_all([Row(str(i), "", {}) for i in range(3)], works, CPU)
    assert list(dict.fromkeys(order)) == [1, 2, 0]
    assert list(replays) == [0, 1, 2]


def test_results_of_any_kind(cuda):
    nan = torch.tensor([1.0, torch.nan])
    works = {0: lambda: None, 1: lambda: (nan, "x"), 2: lambda: {"logits": nan}, 3: lambda: nan}
    rows = [Row(str(i), "", {}) for i in works]
    assert list(capture_all(rows, works, CPU)) == [0, 1, 2, 3]


@pytest.mark.parametrize("train", [False, True])
def test_models(cuda, model, train):
    run = bench_model(model, batches=(1, 2), train=train)
    assert [row.failure for row in run.rows] == [None] * 4
    assert all(row.timing and row.per_second and row.peak_mb for row in run.rows)
    assert cuda.replays > 4 * 5
    # Memory of one batch's graphs is free before the next.
    assert len(set(map(id, cuda.rooms))) == 2


def test_a_model_that_cannot_be_captured(cuda, model):
    cuda.broken = [False, True]
    run = bench_model(model)
    assert run.rows[0].per_second
    assert run.rows[1].per_second is run.rows[1].peak_mb is None
    assert run.rows[1].failure.startswith("cannot be captured as a CUDA graph: ")


def test_graphs_are_gone_before_memory_is_measured(cuda, monkeypatch):
    alive = set()

    class Replay:
        def __init__(self):
            alive.add(id(self))

        def __call__(self):
            pass

        def __del__(self):
            alive.discard(id(self))

    monkeypatch.setattr(graphs, "_capture", lambda work, room, device: Replay())
    seen = []
    monkeypatch.setattr(measuring, "peak_memory_mb", lambda work, device: seen.append(len(alive)) or 1.0)
    bench(memory=True)
    assert seen == [0, 0, 0]


def test_energy_is_that_of_replays(cuda, model):
    asked = []

    class Meter:
        def measure(self, work, items):
            asked.append(items)
            before = cuda.replays
            work()
            assert cuda.replays == before + 1

    measures = measuring.Measures(CPU, 0.001, graphs=True, memory=False, meter=Meter())
    measuring.measured([Row("a", "b", {})], {0: lambda: None}, measures, "title", items=7)
    assert asked == [7]


def test_crossover_says_why_there_is_no_time(cuda):
    cuda.broken = [False, True]
    with pytest.raises(RuntimeError, match=r"no time to compare: eco \(eager\): cannot be captured"):
        crossover.find_crossover(SMALL, seconds=0.001)


@pytest.fixture
def cli(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["ecoformer", "bench", *arguments, "--device", "cpu", "--graphs"])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return command


ATTENTION = ("attention", "--shape", "1,1,20,8", "--mechanisms", "softmax", "--seconds", "0.01")
MODEL = ("model", "lra_text", "--tokens", "32", "--attention", "softmax", "--seconds", "0.01")


@pytest.mark.parametrize("arguments", [ATTENTION, MODEL])
def test_command_without_a_gpu(cli, arguments):
    line = "ecoformer: --graphs times CUDA graphs, which need a CUDA device, got cpu: leave it out\n"
    assert cli(*arguments) == (1, "", line)


@pytest.mark.parametrize("arguments", [ATTENTION, MODEL])
def test_command(cuda, cli, arguments):
    status, out, err = cli(*arguments, "--json")
    assert (status, err) == (0, "")
    assert [row["graphs"] for row in json.loads(out)["rows"]] == [True]
    assert cuda.replays
    cuda.broken = [True]
    status, out, _ = cli(*arguments)
    assert status == 0
    assert ", graphs" in out
    assert "softmax (sdpa): cannot be captured as a CUDA graph: CUDA error: " in " ".join(out.split())
