"""`bench attention`: nothing wrong is timed."""

import math
from dataclasses import replace

import pytest
import torch

from ecoformer.attention import EcoAttention, PerformerAttention, SoftmaxAttention
from ecoformer.backends.choice import available, requested, use_backend
from ecoformer.benchmarking import attention, contestants, measuring
from ecoformer.benchmarking.attention import (
    MECHANISMS,
    Setting,
    bench_attention,
    build_layer,
    contestants_of,
    draw_inputs,
)
from ecoformer.benchmarking.contestants import compiled, hashed_backends
from ecoformer.benchmarking.measuring import Bench

CPU = torch.device("cpu")
SMALL = Setting((2, 2, 70, 8), torch.float32, CPU)
WIDE = replace(SMALL, shape=(2, 2, 70, 16))


def bench(setting=SMALL, mechanisms=("softmax", "eco"), **how):
    return bench_attention([setting], mechanisms, Bench(CPU, 0.01, **{"memory": False} | how))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mechanism_is_right(dtype, backward):
    names = (*MECHANISMS, "explicit", "lsh_eco", "bi_eco", "combiner", "fp_eco", "klsh_eco")
    run = bench(replace(WIDE, dtype=dtype, backward=backward), names)
    assert [row.failure for row in run.rows] == [None] * len(names)
    assert [row.mechanism for row in run.rows] == list(names)
    for row in run.rows:
        assert 0 < row.checked.error <= row.checked.bound
        assert row.timing.median_ms > 0
        assert row.ratio_to_sdpa == pytest.approx(run.rows[0].timing.median_ms / row.timing.median_ms)


def test_a_row_as_json():
    row = bench(mechanisms=("eco",), memory=True).to_dict()["rows"][1]
    assert (row["mechanism"], row["backend"]) == ("eco", "eager")
    assert row["shape"] == [2, 2, 70, 8]
    assert row["dtype"] == "float32"
    assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
    assert row["checked"]["passed"] is True
    assert row["checked"]["against"] == "the reference in fp64"
    assert row["peak_mb"] > 0


@pytest.mark.parametrize("backward", [False, True])
def test_causal(backward):
    run = bench(replace(WIDE, is_causal=True, backward=backward), MECHANISMS)
    assert [row.mechanism for row in run.rows] == ["softmax", "eco", "sharp_eco", "performer", "reformer"]
    assert not run.wrong
    assert "linformer" in run.notes[0]


def test_heads_too_narrow_for_the_codes():
    run = bench(mechanisms=("sharp_eco",))
    assert [row.mechanism for row in run.rows] == ["softmax"]
    assert "sharp_eco needs D >= 16" in run.notes[0]


def spoil(monkeypatch, cls, change):
    """Change what a mechanism computes in fp32, and leave the fp64 that it is compared with."""
    right = cls.attend

    def wrong(self, q, k, v, mask, is_causal):
        out = right(self, q, k, v, mask, is_causal)
        return change(out, v) if v.dtype == torch.float32 else out

    monkeypatch.setattr(cls, "attend", wrong)


@pytest.mark.parametrize(
    ("cls", "mechanism", "change"),
    [
        (EcoAttention, "eco", lambda out, v: out * (1 + 1e-4)),
        (EcoAttention, "eco", lambda out, v: out.index_fill(2, torch.tensor([out.shape[2] - 1]), 0.0)),
        (EcoAttention, "eco", lambda out, v: out + math.nan),
        (SoftmaxAttention, "softmax", lambda out, v: out.flip(2)),
        (PerformerAttention, "performer", lambda out, v: out.roll(1, dims=-1)),
    ],
)
def test_a_wrong_result_gets_no_time(monkeypatch, cls, mechanism, change):
    spoil(monkeypatch, cls, change)
    run = bench(mechanisms=("softmax", "eco", "performer"))
    bad = next(row for row in run.rows if row.mechanism == mechanism)
    assert bad.failure.startswith("wrong result: error ")
    assert bad.timing is bad.to_dict()["median_ms"] is None
    assert run.wrong == [bad]
    assert all(row.timing for row in run.rows if row is not bad)


def test_a_wrong_gradient_gets_no_time(monkeypatch):
    spoil(monkeypatch, EcoAttention, lambda out, v: out + 0.01 * (v - v.detach()))
    assert not bench().wrong
    assert [row.mechanism for row in bench(replace(SMALL, backward=True)).wrong] == ["eco"]


def test_wrong_only_at_full_length(monkeypatch):
    """Where the dense reference is too large, eager in a wider dtype is the truth."""
    setting = replace(SMALL, shape=(1, 1, 1025, 8))
    monkeypatch.setattr(attention, "_DENSE", 1025**2 - 1)
    assert bench(setting).rows[1].checked.against == "eager in torch.float64"
    spoil(monkeypatch, EcoAttention, lambda out, v: out * (1.001 if v.shape[-2] > 1024 else 1))
    assert [row.mechanism for row in bench(setting).wrong] == ["eco"]


def test_out_of_memory_is_not_a_bug(monkeypatch):
    def greedy(self, *args):
        raise torch.OutOfMemoryError("too much")

    def broken(self, *args):
        raise KeyError("oh")

    monkeypatch.setattr(PerformerAttention, "attend", greedy)
    monkeypatch.setattr(EcoAttention, "attend", broken)
    run = bench(mechanisms=("eco", "performer"))
    assert [row.failure for row in run.rows] == [None, "failed: KeyError: 'oh'", "out of memory"]
    assert [row.mechanism for row in run.wrong] == ["eco"]


def test_each_backend_is_a_row_and_is_chosen_outside_the_timed_call(monkeypatch):
    events = []

    def entering(module):
        def use(name):
            events.append("choose")
            return use_backend(name)

        monkeypatch.setattr(module, "use_backend", use)

    def clock(call):
        events.append("start")
        call()
        events.append("end")
        return 1.0

    right = EcoAttention.attend

    def listening(self, *args):
        events.append(requested())
        with use_backend("eager"):
            return right(self, *args)

    monkeypatch.setattr(contestants, "available", lambda device: ["cpu", "triton", "eager"])
    monkeypatch.setattr(contestants, "why_not", lambda *call: None)
    monkeypatch.setattr(EcoAttention, "attend", listening)
    monkeypatch.setattr(measuring, "_cpu_ms", clock)
    for module in (measuring, contestants):
        entering(module)
    run = bench(mechanisms=("softmax", "eco", "performer"))
    assert [row.backend for row in run.rows] == ["sdpa", "cpu", "triton", "eager", "eager"]
    timed = [events[i + 1 : events.index("end", i)] for i, event in enumerate(events) if event == "start"]
    assert timed[:5] == [[], ["cpu"], ["triton"], ["eager"], []]
    assert requested() is None


@pytest.mark.parametrize(
    ("mechanisms", "backward", "expected"),
    [
        (["eco"], False, ["cpu", "eager"]),
        (["lsh_eco"], False, ["cpu", "eager"]),
        (["eco"], True, ["cpu", "eager"]),
        (["bi_eco"], False, ["eager"]),
        (["lsh_eco", "bi_eco"], False, ["eager"]),
    ],
)
def test_a_backend_that_falls_back_to_eager_has_no_row(monkeypatch, mechanisms, backward, expected):
    pytest.importorskip("numba")
    monkeypatch.setattr(contestants, "available", available)
    hashers = [build_layer(name, replace(SMALL, shape=(1, 1, 32, 16))).hasher for name in mechanisms]
    assert hashed_backends(hashers, CPU, backward) == expected


def test_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    run = bench(replace(SMALL, compiled=True))
    assert [row.backend for row in run.rows] == ["sdpa", "eager", "eager, compiled"]
    assert not run.wrong


def test_more_than_eight_are_compiled(monkeypatch):
    compilations = []

    def backend(module, example):
        compilations.append(module)
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, dynamic: compile_(call, dynamic=dynamic, backend=backend)
    )
    for width in range(1, 12):
        compiled(torch.nn.Linear(2, width))(torch.ones(1, 2))
    assert len(compilations) == 11
    torch.compiler.reset()


@pytest.mark.parametrize("backward", [False, True])
def test_codes_do_not_depend_on_rounding(backward):
    setting = replace(SMALL, shape=(4, 2, 3000, 8), backward=backward)
    hasher = build_layer("eco", setting).hasher
    y = hasher.project(draw_inputs(setting, [hasher])[0], None).abs()
    assert y.min() >= attention._MARGIN
    assert hasher.project(draw_inputs(setting)[0], None).abs().min() < attention._MARGIN
    if backward:
        assert (y - 1).abs().min() >= attention._MARGIN


def test_errors():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert contestants.relative_error([truth + torch.tensor([0.3, 0.4])], [truth]) == pytest.approx(0.1)
    assert math.isnan(contestants.relative_error([truth, truth * math.nan], [truth, truth]))
    assert math.isnan(contestants.relative_error([truth[:1]], [truth]))
    assert contestants.relative_error([truth * 0 + 0.5], [truth * 0]) == pytest.approx(0.5)


def test_explicit_matrix_with_padding_and_causal_order():
    layers = [build_layer(name, replace(SMALL, dtype=torch.float64)) for name in ("softmax", "explicit")]
    q, k, v = torch.randn(3, 2, 2, 7, 8, dtype=torch.float64)
    mask = torch.tensor([[False] * 4 + [True] * 3, [True] * 7])
    for padding in (None, mask):
        for is_causal in (False, True):
            sdpa, matrix = (layer.attend(q, k, v, padding, is_causal) for layer in layers)
            torch.testing.assert_close(sdpa, matrix)


def test_contestants_share_queries_and_keys_where_the_mechanism_does():
    (reformer,) = contestants_of(build_layer("reformer", SMALL), SMALL)
    q, k, v = torch.randn(3, *SMALL.shape)
    assert torch.equal(reformer(q, k, v), reformer(q, q, v))
