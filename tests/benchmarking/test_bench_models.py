"""`bench model`."""

import pytest
import torch
from torch import nn

from ecoformer.attention import EcoAttention
from ecoformer.backends.choice import requested, use_backend
from ecoformer.benchmarking import contestants, models
from ecoformer.benchmarking.contestants import ExplicitAttention, check_training
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.models import Load, bench_models, make_explicit
from ecoformer.conversion import convert
from ecoformer.models.text import TextEncoder

CPU = torch.device("cpu")


def texts(count):
    return torch.randint(1, 30, (count, 40), generator=torch.Generator().manual_seed(count))


def load(**how):
    return Load(texts, {"model": "text"}, **how)


def text_model(**how):
    small = {"vocabulary": 30, "length": 40, "dim": 16, "hidden": 8, "depth": 1}
    return TextEncoder(attention="softmax", **small, **how).eval()


@pytest.fixture
def model():
    return text_model()


def bench(model, names, batches=(1,), **how):
    return bench_models(model, names, load(**how), batches, Bench(CPU, 0.01))


@pytest.mark.parametrize("how", [{}, {"train": True}, {"amp": torch.bfloat16}])
def test_rows(model, how):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = bench(model, ("native", "explicit", "eco", "performer"), (1, 3), **how)
    assert [row.label for row in run.rows] == [
        "softmax (sdpa)",
        "native (eager)",
        "explicit (N x N matrix)",
        "eco (eager)",
        "performer (eager)",
    ] * 2
    assert not run.wrong
    for row in run.rows:
        facts = row.to_dict()
        assert facts["tokens_per_s"] == pytest.approx(facts["batch"] * 40 / row.timing.median_ms * 1e3)
        assert facts["peak_mb"] > 0
    assert [row.ratio_to_sdpa for row in run.rows if row.mechanism == "softmax"] == [1, 1]
    assert all(row.checked.passed for row in run.rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("train", [False, True])
def test_a_wrong_backend_gets_no_time(model, monkeypatch, train):
    right = EcoAttention.attend

    def wrong(self, q, k, v, *rest):
        off = 0.1 * v if requested() == "cpu" else 0
        with use_backend("eager"):
            return right(self, q, k, v, *rest) + off

    monkeypatch.setattr(contestants, "available", lambda device: ["cpu", "eager"])
    monkeypatch.setattr(contestants, "why_not", lambda *call: None)
    monkeypatch.setattr(EcoAttention, "attend", wrong)
    run = bench(model, ("eco",), train=train)
    assert [row.backend for row in run.wrong] == ["cpu"]
    assert run.wrong[0].failure.startswith("wrong result")
    assert run.wrong[0].timing is None


def _other_output(out):
    return out + 1


def _other_gradient(out):
    return 2 * out - out.detach()


def _nan_gradient(out):
    return out + (out - out.detach()) * float("nan") if out.requires_grad else out


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("spoil", "train", "fails"),
    [
        (_other_output, False, True),
        (_other_gradient, False, False),
        (_other_gradient, True, True),
        (_nan_gradient, True, True),
        (lambda out: out, True, False),
    ],
)
def test_what_is_timed_is_compared_too(monkeypatch, spoil, train, fails, amp):
    model = text_model(dropout=0.0, attn_drop=0.0)
    monkeypatch.setattr(models, "compiled", lambda call: lambda x: spoil(call(x)))
    run = bench(model, ("eco",), batches=(2,), compiled=True, train=train, amp=amp)
    for row in run.rows:
        assert (row.timing is None) == bool(row.failure) == row.wrong == fails, row
        assert row.to_dict()["checked"]["passed"] is not fails
        assert not fails or row.failure.startswith("wrong result")


def test_random_models_are_timed_without_comparing_gradients():
    model = TextEncoder(attention="softmax", vocabulary=30, length=40, dim=16, hidden=8, depth=1, dropout=0.5)
    run = bench(model, ("softmax",), batches=(2,), train=True)
    assert run.rows[0].timing is not None
    assert run.rows[0].checked.against == "a plain run of the first sample"


def test_a_model_of_nan_gets_no_time(model):
    run = bench(_broken(model), ["performer"])
    assert [row.timing for row in run.rows] == [None, None]
    assert len(run.wrong) == 2


def _broken(model):
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    return model


def test_padding_is_compared_too(model):
    def padded(count):
        return texts(count).index_fill(1, torch.arange(30, 40), 0)

    run = bench_models(model, ["eco"], Load(padded, {}), [2], Bench(CPU, 0.01))
    assert [row.failure for row in run.rows] == [None, None]


def test_compiled_models_say_so(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    run = bench(model, ("eco",), compiled=True)
    assert [row.backend for row in run.rows] == ["sdpa, compiled", "eager, compiled"]


def test_what_cannot_run_is_a_row(model, monkeypatch):
    def refuse(model, dynamic):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    run = bench(model, ("eco",), compiled=True)
    assert [row.failure for row in run.rows] == ["failed: RuntimeError: no compiler"] * 2


def test_explicit_replaces_every_softmax_layer(model):
    convert(model, "softmax")
    sample = texts(2)
    before = model(sample)
    kinds = [type(block.attn) for block in make_explicit(model).blocks]
    assert kinds == [ExplicitAttention]
    torch.testing.assert_close(model(sample), before)


class Noisy(torch.autograd.Function):
    """The identity, with a gradient that is off by noise or by a factor."""

    @staticmethod
    def forward(ctx, x, noise, factor):
        ctx.noise, ctx.factor = noise, factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad + ctx.noise * grad.norm() * torch.randn_like(grad), None, None


def noisy(linear, factor, noise=0.0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return lambda: Noisy.apply(linear(x), noise, factor)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("noise", "factor", "right"), [(0.0, 1.0, True), (0.5, 1.0, True), (0.0, 2.0, False), (0.001, 2.0, False)]
)
def test_what_plain_runs_differ_by_is_allowed(noise, factor, right, half):
    linear = nn.Linear(8, 8)
    precise = noisy(linear, 1.0) if half else None
    check = check_training(noisy(linear, factor, noise), noisy(linear, 1.0, noise), linear, precise)
    assert check.passed == right
    assert all(parameter.grad is None for parameter in linear.parameters())


@pytest.mark.parametrize(
    ("factor", "right"), [(1.5, True), (1.0, True), (0.5, True), (-0.5, False), (3.0, False)]
)
def test_what_is_nearer_to_the_truth_than_a_plain_run_is_right(factor, right):
    """As compiled code may be that keeps fp32 between operators."""
    linear = nn.Linear(8, 8)
    check = check_training(noisy(linear, factor), noisy(linear, 1.5), linear, noisy(linear, 1.0))
    assert check.passed == right
