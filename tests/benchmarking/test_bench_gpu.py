"""Benchmarks on a CUDA device; run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from ecoformer.benchmarking import Work, time_contestants
from ecoformer.benchmarking.attention import MECHANISMS, Setting, bench_attention
from ecoformer.benchmarking.energy import EnergyMeter
from ecoformer.benchmarking.measuring import Bench, capture, capture_place, peak_memory_mb
from ecoformer.benchmarking.models import Load, bench_models
from ecoformer.models.text import TextEncoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(dtype, is_causal, backward, graphs):
    setting = Setting((2, 3, 1500, 32), dtype, GPU, is_causal, backward)
    settings = [setting, replace(setting, shape=(1, 1, 63, 40))]
    run = bench_attention(settings, (*MECHANISMS, "explicit"), Bench(GPU, 0.05, graphs))
    assert not run.wrong
    for row in run.rows:
        # PyTorch's sorting decides whether this one can be captured.
        assert row.failure is None or (graphs and row.mechanism == "reformer"), row.failure
        assert row.failure or (row.timing.median_ms > 0 and row.peak_mb > 0)
        assert row.to_dict()["graphs"] is graphs


def test_time_is_that_of_the_device():
    """Launches return at once; the work takes milliseconds."""
    a = torch.randn(4096, 4096, device=GPU)
    works = {"one": Work(lambda: a @ a), "three": Work(lambda: a @ a @ a @ a)}
    timings = time_contestants(works, GPU, seconds=0.3)
    assert timings["three"].median_ms == pytest.approx(3 * timings["one"].median_ms, rel=0.3)


def test_peak_memory():
    x = torch.ones(1_000_000, device=GPU)
    assert peak_memory_mb(lambda: (x + 1) * 2, GPU) == pytest.approx(8, rel=0.1)


def test_energy():
    pytest.importorskip("zeus")
    meter = EnergyMeter(GPU)
    a = torch.randn(8192, 8192, device=GPU)
    assert meter.measure(lambda: a @ a)["joules"] > 0


def test_a_replay_does_the_work_again():
    x = torch.ones(4, device=GPU)
    graph, out = capture(Work(lambda: x * 2), *capture_place(GPU))
    x.fill_(5)
    graph()
    assert out.tolist() == [10] * 4


def test_a_call_that_waits_for_the_gpu_is_refused_before_the_capture():
    x = torch.ones(4, device=GPU)
    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(Work(lambda: x.sum().item()), *capture_place(GPU))
    assert torch.cuda.get_sync_debug_mode() == 0


def test_others_are_captured_after_one_that_raises():
    x, stream = torch.ones(4, device=GPU), torch.cuda.current_stream()

    def breaks():
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("oh")
        return x + 1

    with pytest.raises(KeyError):
        capture(Work(breaks), *capture_place(GPU))
    assert torch.cuda.current_stream() == stream
    graph, out = capture(Work(lambda: x + 2), *capture_place(GPU))
    graph()
    assert out.tolist() == [3] * 4


def test_graphs_share_memory():
    x, place = torch.ones(16 << 20, device=GPU), capture_place(GPU)
    graphs = [capture(Work(lambda: x + 1), *place)[0]]
    before = torch.cuda.memory_reserved()
    graphs.append(capture(Work(lambda: x + 2), *place)[0])
    assert torch.cuda.memory_reserved() - before < 32 << 20
    for graph in graphs:
        graph()
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_models(amp, train, compiled):
    def texts(count):
        return torch.randint(1, 30, (count, 256), generator=torch.Generator().manual_seed(count))

    model = TextEncoder(attention="softmax", vocabulary=30, length=256, dim=32, hidden=16, depth=1).eval()
    load = Load(texts, {}, train=train, amp=amp, compiled=compiled)
    names = ("softmax", "eco") if compiled else ("softmax", "native", "explicit", "performer", "eco")
    rows = bench_models(model, names, load, [2, 4], Bench(GPU, 0.02, graphs=True)).rows
    assert [row.failure for row in rows] == [None] * len(rows)
    assert all(row.timing.median_ms > 0 and row.peak_mb > 0 for row in rows)
