"""`--graphs` on a CUDA device; run with `pytest -m gpu`."""

import pytest
import torch

from ecoformer.benchmarking.attention import MECHANISMS, bench_attention
from ecoformer.benchmarking.capturing import Room, captured, waits
from ecoformer.benchmarking.models import Load, bench_models
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.results import Row
from ecoformer.models.text import TextEncoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")


def test_a_replay_does_the_work_again():
    x = torch.ones(4, device=GPU)
    out = []
    replay = captured(lambda: out.append(x * 2))
    x.fill_(5)
    replay()
    assert out[-1].tolist() == [10] * 4


def test_waits():
    x = torch.ones(4, device=GPU)
    assert waits(lambda: x.sum().item())
    assert not waits(lambda: x.sum())
    assert torch.cuda.get_sync_debug_mode() == 0


def _breaks_by_reading(x):
    x.sum().item()


def _breaks_by_waiting(x):
    torch.cuda.synchronize()


def _breaks_by_itself(x):
    if torch.cuda.is_current_stream_capturing():
        raise KeyError("oh")


@pytest.mark.parametrize("breaks", [_breaks_by_reading, _breaks_by_waiting, _breaks_by_itself])
def test_others_can_be_captured_after_one_that_cannot(breaks):
    x = torch.ones(4, device=GPU)
    torch.rand(4, device=GPU)
    stream = torch.cuda.current_stream()

    def work():
        y = torch.rand(4, device=GPU) + x
        breaks(y)
        return y

    with pytest.raises((RuntimeError, KeyError)):
        captured(work)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.rand(4, device=GPU).std() > 0
    out = []
    replay = captured(lambda: out.append(torch.rand(4, device=GPU) + x))
    replay()
    first = out[-1].clone()
    replay()
    assert not torch.equal(first, out[-1])
    assert (first >= 1).all()


def test_graphs_of_a_room_share_memory():
    x = torch.ones(16 << 20, device=GPU)
    room = Room(GPU)
    replays = [captured(lambda: x + 1, room)]
    before = torch.cuda.memory_reserved()
    replays.append(captured(lambda: x + 2, room))
    assert torch.cuda.memory_reserved() - before < 32 << 20
    for replay in replays:
        replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal, backward):
    names = (*MECHANISMS, "explicit")
    setting = Setting((2, 2, 300, 32), torch.bfloat16, GPU, is_causal, backward, graphs=True)
    run = bench_attention([setting], names, seconds=0.02)
    assert not run.wrong
    for row in run.rows:
        # PyTorch's sorting decides over this one.
        assert row.failure is None or row.mechanism == "reformer", row.failure
        assert row.failure is None or row.failure.startswith("cannot be captured as a CUDA graph: ")
    assert all(row.to_dict()["graphs"] for row in run.rows)


@pytest.mark.parametrize(
    "how", [{}, {"train": True}, {"amp": torch.bfloat16}, {"train": True, "amp": torch.bfloat16}]
)
def test_models(how):
    rows = _bench_text(("softmax", "explicit", "performer", "eco"), **how)
    assert [row.failure for row in rows] == [None] * len(rows)
    assert all(row.timing.median_ms > 0 and row.peak_mb > 0 for row in rows)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
@pytest.mark.parametrize("how", [{}, {"train": True}])
def test_compiled_models(how):
    rows = _bench_text(("softmax", "eco"), compiled=True, **how)
    assert [row.failure for row in rows] == [None] * len(rows)


def _bench_text(names: tuple[str, ...], **how: object) -> list[Row]:
    def texts(count: int) -> torch.Tensor:
        return torch.randint(1, 30, (count, 256), generator=torch.Generator().manual_seed(count))

    model = TextEncoder(attention="softmax", vocabulary=30, length=256, dim=32, hidden=16, depth=1).eval()
    load = Load(texts, "tokens", {}, per_sample=256, graphs=True, **how)
    return bench_models(model, names, load, [2, 4], GPU, seconds=0.02).rows
