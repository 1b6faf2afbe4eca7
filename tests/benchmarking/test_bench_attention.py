"""No time for a wrong result."""

import math
import sys
import time
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from ecoformer.attention import EcoAttention, PerformerAttention, SoftmaxAttention
from ecoformer.backends.choice import asked_for, use_backend
from ecoformer.benchmarking import backends, checking, crossover, measuring
from ecoformer.benchmarking.attention import MECHANISMS, bench_attention, draw_inputs
from ecoformer.benchmarking.operators import Setting, build_layer, flash_linear_attention, operators_of
from ecoformer.benchmarking.results import Row, Run, with_ratios
from ecoformer.benchmarking.timing import Timing

CPU = torch.device("cpu")
SMALL = Setting((2, 2, 70, 8), torch.float32, CPU)


def bench(setting=SMALL, mechanisms=("softmax", "eco"), **kwargs):
    return bench_attention([setting], mechanisms, seconds=0.01, **{"memory": False} | kwargs)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_come_along_are_right(dtype, backward):
    names = (*MECHANISMS, "explicit", "lsh_eco", "bi_eco", "combiner", "fp_eco", "klsh_eco")
    run = bench(replace(SMALL, dtype=dtype, backward=backward), names)
    assert [row.failure for row in run.rows] == [None] * len(names)
    assert [row.mechanism for row in run.rows] == list(names)
    for row in run.rows:
        assert 0 < row.checked.error <= row.checked.bound
        assert row.timing.median_ms > 0
        assert row.ratio_to_sdpa == pytest.approx(run.rows[0].timing.median_ms / row.timing.median_ms)


def test_a_row_as_json():
    run = bench(memory=True)
    row = run.to_dict()["rows"][1]
    assert (row["mechanism"], row["backend"]) == ("eco", "eager")
    assert row["shape"] == [2, 2, 70, 8]
    assert row["dtype"] == "float32"
    assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
    assert row["checked"]["passed"] is True
    assert row["checked"]["against"] == "the reference in fp64"
    assert row["peak_mb"] > 0


def test_softmax_is_always_there():
    assert [row.mechanism for row in bench(mechanisms=("eco",)).rows] == ["softmax", "eco"]


@pytest.mark.parametrize("backward", [False, True])
def test_causal(backward):
    run = bench(replace(SMALL, is_causal=True, backward=backward), MECHANISMS)
    assert [row.mechanism for row in run.rows] == ["softmax", "eco", "performer", "reformer"]
    assert not run.wrong
    assert "linformer has no causal order" in run.notes[0]


@pytest.mark.parametrize(
    ("cls", "mechanism", "spoil"),
    [
        (EcoAttention, "eco", lambda out: out * (1 + 1e-4)),
        (EcoAttention, "eco", lambda out: out.index_fill(2, torch.tensor([out.shape[2] - 1]), 0.0)),
        (EcoAttention, "eco", lambda out: out + math.nan),
        (SoftmaxAttention, "softmax", lambda out: out.flip(2)),
        (PerformerAttention, "performer", lambda out: out.roll(1, dims=-1)),
    ],
)
def test_a_wrong_result_gets_no_time(monkeypatch, cls, mechanism, spoil):
    right = cls.attend

    def wrong(self, q, k, v, mask, is_causal):
        out = right(self, q, k, v, mask, is_causal)
        return spoil(out) if v.dtype == torch.float32 else out

    monkeypatch.setattr(cls, "attend", wrong)
    run = bench(mechanisms=("softmax", "eco", "performer"))
    bad = next(row for row in run.rows if row.mechanism == mechanism)
    assert bad.failure.startswith("wrong result: error ")
    assert bad.timing is None
    assert run.wrong == [bad]
    assert all(row.timing for row in run.rows if row is not bad)
    assert bad.to_dict()["median_ms"] is None


def test_a_wrong_gradient_gets_no_time(monkeypatch):
    right = EcoAttention.attend

    def wrong(self, q, k, v, mask, is_causal):
        out = right(self, q, k, v, mask, is_causal)
        return out + (0.01 * (v - v.detach()) if v.dtype == torch.float32 else 0)

    monkeypatch.setattr(EcoAttention, "attend", wrong)
    assert not bench().wrong
    assert [row.mechanism for row in bench(replace(SMALL, backward=True)).wrong] == ["eco"]


def test_wrong_only_at_its_own_length(monkeypatch):
    """What the slices do not reach is held against eager in a wider dtype."""
    right = EcoAttention.attend

    def wrong(self, q, k, v, mask, is_causal):
        out = right(self, q, k, v, mask, is_causal)
        return out * (1.001 if v.dtype == torch.float32 and v.shape[-2] > 1024 else 1)

    monkeypatch.setattr(EcoAttention, "attend", wrong)
    assert [row.mechanism for row in bench(replace(SMALL, shape=(1, 1, 1025, 8))).wrong] == ["eco"]


def test_what_does_not_fit_is_no_fault(monkeypatch):
    def greedy(self, *args):
        raise torch.OutOfMemoryError("no room")

    def broken(self, *args):
        raise KeyError("oh")

    monkeypatch.setattr(PerformerAttention, "attend", greedy)
    monkeypatch.setattr(EcoAttention, "attend", broken)
    run = bench(mechanisms=("eco", "performer"))
    assert [row.failure for row in run.rows] == [None, "failed: KeyError: 'oh'", "out of memory"]
    assert [row.mechanism for row in run.wrong] == ["eco"]


def allow(monkeypatch, *names):
    """Backends of these names, which can do everything."""
    monkeypatch.setattr(backends, "available", lambda device: names)
    monkeypatch.setattr(backends, "why_not", lambda *call: None)


def test_every_backend_is_a_row(monkeypatch):
    allow(monkeypatch, "eager", "cpu")
    run = bench(mechanisms=("softmax", "eco", "performer"))
    assert [row.backend for row in run.rows] == ["sdpa", "eager", "cpu", "eager"]


def test_every_backend_runs_by_its_own_name(monkeypatch):
    seen = set()
    right = EcoAttention.attend

    def listening(self, *args):
        seen.add(asked_for())
        with use_backend("eager"):
            return right(self, *args)

    allow(monkeypatch, "cpu", "triton")
    monkeypatch.setattr(EcoAttention, "attend", listening)
    bench()
    assert seen == {"cpu", "triton", "eager"}  # eager is what both are held against
    assert asked_for() is None


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'eco'"):
        bench(mechanisms=("ecoo",))


def test_compiled(monkeypatch):
    """Another compiler than PyTorch's, which takes a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    run = bench(replace(SMALL, compiled=True))
    assert [row.backend for row in run.rows] == ["sdpa", "eager", "eager, compiled"]
    assert run.rows[2].checked.against == "the reference in fp64, by way of eager"


@pytest.mark.parametrize("backward", [False, True])
def test_codes_do_not_hang_on_rounding(backward):
    setting = replace(SMALL, shape=(4, 2, 3000, 8), backward=backward)
    hasher = build_layer("eco", setting).hasher
    y = hasher.project(draw_inputs(setting, [hasher]).q, None).abs()
    assert y.min() >= checking._MARGIN
    assert hasher.project(draw_inputs(setting).q, None).abs().min() < checking._MARGIN
    if backward:
        assert (y - 1).abs().min() >= checking._MARGIN


def test_errors():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert checking.relative_error([truth + torch.tensor([0.3, 0.4])], [truth]) == pytest.approx(0.1)
    assert math.isnan(checking.relative_error([truth, truth * math.nan], [truth, truth]))
    assert math.isnan(checking.relative_error([truth[:1]], [truth]))
    assert checking.relative_error([truth * 0 + 0.5], [truth * 0]) == pytest.approx(0.5)


def test_peer_not_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert flash_linear_attention(SMALL) == (
        None,
        "flash-linear-attention (fla) is not installed, so that it is not among the peers",
    )


def test_peer_installed(monkeypatch):
    def chunk_linear_attn(q, k, v, scale=None, normalize=True):
        weights = torch.einsum("bnhd,bmhd->bhnm", q, k).tril() * scale
        return torch.einsum("bhnm,bmhd->bnhd", weights, v), None

    ops = ModuleType("fla.ops.linear_attn")
    ops.chunk_linear_attn = chunk_linear_attn
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", ops)
    assert flash_linear_attention(SMALL)[0] is None  # it has no CPU kernels
    operator, _ = flash_linear_attention(replace(SMALL, device=torch.device("cuda")))
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    torch.testing.assert_close(operator.call(q, k, v), operator.truth(q, k, v).float())
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    assert "cannot be imported" in flash_linear_attention(SMALL)[1]


def test_explicit_matrix_with_padding_and_order():
    layers = [build_layer(name, replace(SMALL, dtype=torch.float64)) for name in ("softmax", "explicit")]
    q, k, v = torch.randn(3, 2, 2, 7, 8, dtype=torch.float64)
    mask = torch.tensor([[False] * 4 + [True] * 3, [True] * 7])
    for padding in (None, mask):
        for is_causal in (False, True):
            sdpa, matrix = (layer.attend(q, k, v, padding, is_causal) for layer in layers)
            torch.testing.assert_close(sdpa, matrix)


def test_operators_of_a_layer_know_what_they_are():
    operator = operators_of(build_layer("reformer", SMALL), SMALL)[0]
    assert (operator.sorts, operator.shared_qk, operator.whole) == (True, True, None)


@pytest.fixture
def simulated(monkeypatch):
    """Times as formulas: SDPA takes N² and eco a multiple of N, with an offset."""
    asked = []

    def use(meeting, backend="eager", slow=()):
        def fake(settings, mechanisms, **kwargs):
            n = settings[0].shape[2]
            asked.append(n)
            times = {"softmax": n * n, "eco": n * meeting + (1e6 if n in slow else 0)}
            rows = [Row(m, backend, {}, timing=Timing(t, t, t, 1)) for m, t in times.items()]
            return Run("", 1, with_ratios(rows))

        monkeypatch.setattr(crossover, "bench_attention", fake)
        return asked

    return use


@pytest.mark.parametrize("meeting", [100, 1000, 5000.5])
def test_crossover(simulated, meeting):
    asked = simulated(meeting)
    found = crossover.find_crossover(SMALL)
    assert found.slower_at <= meeting < found.tokens <= 1.1 * found.slower_at + 1
    assert found.ratios[found.tokens] > 1 >= found.ratios[found.slower_at]
    assert len(asked) == len(set(asked)) < 20
    assert "eco (eager) overtakes SDPA between" in str(found)


def test_crossover_at_the_ends(simulated):
    simulated(2)
    found = crossover.find_crossover(SMALL)
    assert (found.tokens, found.slower_at) == (16, None)
    assert str(found) == "eco (eager) is faster than SDPA at every length tried, N = 16 to 16"
    asked = simulated(1e9)
    found = crossover.find_crossover(SMALL, longest=100)
    assert found.tokens is None
    assert max(asked) == 100
    assert str(found) == "eco does not overtake SDPA up to N = 100"


def test_crossover_of_what_wins_and_loses_again(simulated):
    """As where another kernel takes over from some length on."""
    simulated(15, slow=(32,))
    found = crossover.find_crossover(SMALL)
    assert found.ratios[16] > 1
    assert 32 <= found.slower_at < found.tokens <= 64
    simulated(15)
    assert crossover.find_crossover(SMALL).tokens == 16


def test_crossover_just_before_the_end(simulated):
    simulated(90)
    found = crossover.find_crossover(SMALL, longest=100)
    assert found.slower_at <= 90 < found.tokens <= 100


@pytest.mark.parametrize(("rate", "quiet"), [(40, True), (4000, False)])
def test_a_busy_machine_is_told(monkeypatch, rate, quiet):
    seen, start = [0], time.perf_counter()

    def interruptions():
        seen.append(int(rate * (time.perf_counter() - start)))
        return seen[-1]

    monkeypatch.setattr(measuring, "interruptions", interruptions)
    run = bench_attention([SMALL], ["eco"], seconds=0.05, memory=False)
    assert run.quiet == run.to_dict()["quiet"] == quiet
    assert any("run it again on a quiet machine" in note for note in run.notes) != quiet
    found = crossover.find_crossover(SMALL, longest=16, seconds=0.05)
    assert found.quiet == quiet
    assert str(found).startswith("not to be trusted, on a busy machine: ") != quiet


def test_crossover_of_wrong_results(monkeypatch):
    monkeypatch.setattr(EcoAttention, "attend", lambda self, q, k, v, mask, is_causal: v + q.float() * 0)
    with pytest.raises(RuntimeError, match=r"eco \(eager\) at .*: wrong result"):
        crossover.find_crossover(SMALL, seconds=0.001)
