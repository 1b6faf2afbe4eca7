"""Gradients of the CPU kernels against the reference in fp64, and against eager's errors."""

from __future__ import annotations

import math

import pytest
import torch
from calls import make_call, truth_gradients

from ecoformer import Affinity, eco_attention
from ecoformer.backends import cpu, fused
from ecoformer.backends.cpu import threads as team
from ecoformer.backends.hashing import Signs
from ecoformer.hashing import LshHasher

pytest.importorskip("numba")

SEPARATE = {"queries": 70, "weighted": True}
SIGNS = {"signs": True, "groups": 4, **SEPARATE}
CALLS = {
    "paper": {},
    "paper, planes": {"planes": True, "channels": 40},
    "paper, own hash functions of keys": {"apart": True, "weighted": True, "bits": 13, "dim": 20},
    "paper, cross": {"queries": 70, "masked": True},
    "groups": {"groups": 4, "masked": True},
    "groups of 8": {"groups": 2, **SEPARATE},
    "groups of 1": {"groups": 16, "apart": True, "channels": 5},
    "groups of 5": {"groups": 3, "bits": 15, "planes": True, "apart": True, "weighted": True},
    "beta 1": {"groups": 4, "beta": (1.0, 1.0)},
    "signs": SIGNS,
    "signs, 64 bits": {**SIGNS, "bits": 64, "groups": 16, "masked": True},
    "signs, 12 bits": {**SIGNS, "bits": 12},
    "signs, one code": {"signs": True, "groups": 4},
    "signs, paper": {"signs": True, **SEPARATE},
}
CAUSAL = {
    name: CALLS[name]
    for name in ("paper", "paper, own hash functions of keys", "groups", "groups of 5", "beta 1", "signs")
}
EVERY_CALL = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)


@pytest.fixture(params=["one", "three", "three of Python"])
def threads(request, monkeypatch):
    if request.param == "three of Python":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    torch.set_num_threads(1 if request.param == "one" else 3)
    yield
    torch.set_num_threads(1)


def gradients(call, grad, needs=None):
    needs = needs or tuple(x is not None for x in call.differentiable())
    assert cpu.cannot(call, needs_grad=True) is None
    _, saved = cpu.forward(call)
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in cpu.kept(call)]
    return cpu.backward(call, grad, saved, needs)


def draw_grad(call):
    g = torch.Generator().manual_seed(9)
    return torch.randn(*call.q.shape[:3], call.v.shape[-1], generator=g).to(call.v.dtype)


def norm(x):
    return x.double().norm().item()


@pytest.mark.parametrize("n", [1, 63, 1030])
@EVERY_CALL
def test_errors_are_at_most_twice_those_of_eager(options, n, threads):
    if n > 1000:  # one head in parts, and digits of eight bits
        options = {**options, "batch": 1, "heads": 1, "masked": False}
    check_against_eager(make_call(n, **options))


@pytest.mark.parametrize("n", [1, 70, 300])
@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
def test_causal_order(options, n):
    many = {"batch": 1, "heads": 1, "masked": False} if n > 100 else {}
    queries = {"queries": n} if "queries" in options else {}
    check_against_eager(make_call(n, **{**options, **queries, **many}, causal=True))


def check_against_eager(call):
    grad, needs = draw_grad(call), [x is not None for x in call.differentiable()]
    found, eager = gradients(call, grad), fused.plain_backward(call, grad, needs)
    for name, ours, plain, true, given in zip(
        fused.DIFFERENTIABLE, found, eager, truth_gradients(call, grad), call.differentiable(), strict=True
    ):
        assert (ours is None) == (plain is None), name
        if ours is not None:
            assert (ours.shape, ours.dtype, ours.is_contiguous()) == (given.shape, given.dtype, True), name
            # A single key is all that is read: its gradients are differences of equal numbers.
            tiny = 1e-4 if call.v.shape[2] == 1 else 1e-7
            assert norm(ours - true) <= 2 * norm(plain - true) + 1e-6 * norm(true) + tiny, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, SIGNS], ids=["paper", "signs"])
def test_half_precision(options, dtype):
    call = make_call(300, **options)
    halves = {name: x.to(dtype) for name in ("q", "k", "v") if (x := getattr(call, name)) is not None}
    call = call._replace(**halves)
    wide = call._replace(**{name: x.float() for name, x in halves.items()})
    grad = draw_grad(call)
    for half, full, given in zip(
        gradients(call, grad), gradients(wide, grad.float()), call.differentiable(), strict=True
    ):
        assert half is None or torch.equal(half, full.to(given.dtype))


def exact_call(causal=False, n=64, batch=2, heads=2):
    """Two kinds of tokens with opposite codes, as many of each: with beta 1 all quotients are exact."""
    g = torch.Generator().manual_seed(1)
    kind = torch.randint(0, 2, (batch, heads, 1, 16), generator=g) * 2.0 - 1
    q, k = (kind * (torch.arange(n) % 2 * 2 - 1).view(-1, 1) for _ in range(2))
    v = torch.randint(-4, 5, (batch, heads, n, 24), generator=g).float()
    weight = torch.ones(batch, heads, n)
    levels = (torch.full((heads, 4), 16.0), torch.zeros(heads, 4), torch.full((heads,), 2.0**-20))
    return fused.FusedCall(q, k, v, None, weight, Signs(), None, *levels, 0.0, causal)


def test_integers_are_exact(threads):
    call = exact_call()
    g = torch.Generator().manual_seed(2)
    grad = torch.randint(-4, 5, call.v.shape, generator=g).float()
    true = truth_gradients(call, grad)
    for name, ours, exact in zip(fused.DIFFERENTIABLE, gradients(call, grad), true, strict=True):
        assert ours is None or torch.equal(ours, exact.float()), name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_denominator_at_its_floor(causal):
    # Queries whose groups all differ from those of all keys: with beta 1 nothing but the floor is left.
    call = exact_call(causal)
    call = call._replace(q=call.q.abs(), k=-call.q.abs())
    grad, needs = draw_grad(call), [x is not None for x in call.differentiable()]
    eager = fused.plain_backward(call, grad, needs)
    for name, ours, plain in zip(fused.DIFFERENTIABLE, gradients(call, grad), eager, strict=True):
        if ours is not None:
            assert norm(ours - plain) <= 1e-5 * norm(plain), name


@pytest.mark.parametrize("options", [{}, SIGNS, {"apart": True, "planes": True}], ids=str)
def test_only_what_is_needed(options):
    call = make_call(200, **options)
    grad, given = draw_grad(call), call.differentiable()
    everything = gradients(call, grad)
    for i, x in enumerate(given):
        if x is not None:
            found = gradients(call, grad, tuple(i == other for other in range(len(given))))
            assert [j for j, each in enumerate(found) if each is not None] == [i]
            torch.testing.assert_close(found[i], everything[i], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("where", ["q", "v", "grad"])
@pytest.mark.parametrize("options", [{}, {"signs": True, "groups": 4}], ids=["paper", "signs"])
def test_nan_stays_in_its_head(options, where, causal):
    torch.set_num_threads(2)
    call = make_call(300, **options, causal=causal)
    grad = draw_grad(call)
    clean = gradients(call, grad)
    tensor = grad if where == "grad" else getattr(call, where)
    tensor[1, 0, 7, 3] = math.nan
    found = gradients(call, grad)
    torch.set_num_threads(1)
    for name, before, after in zip(fused.DIFFERENTIABLE, clean, found, strict=True):
        if name in ("q", "v"):
            assert after[1, 0].isnan().any() or name == "v"
            after[1, 0] = before[1, 0]
            assert torch.equal(after, before)


def test_nan_of_padding_gets_no_gradient(threads):
    call = make_call(600, groups=4, queries=70, weighted=True)
    mask = torch.zeros(2, 600, dtype=torch.bool)
    mask[0, 9] = True
    call, grad = call._replace(mask=mask), draw_grad(call)
    clean = gradients(call, grad)
    call.k[0, :, 9], call.v[0, :, 9], call.key_weight[0, :, 9] = math.nan, math.nan, math.nan
    found = gradients(call, grad)
    for name, before, after in zip(fused.DIFFERENTIABLE, clean, found, strict=True):
        if name in ("q", "v", "key_weight", "scale", "ratio"):
            assert torch.equal(before, after), name
    assert not found[2][0, :, 9].any()
    assert not found[3][0, :, 9].any()


@pytest.mark.parametrize("options", [{}, SIGNS], ids=["paper", "signs"])
def test_any_strides(options, threads):
    call = make_call(600, **options)
    grad = draw_grad(call)
    expected = gradients(call, grad)
    names = [name for name in ("q", "k", "v") if getattr(call, name) is not None]
    odd = call._replace(
        **{n: getattr(call, n).permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for n in names}
    )
    found = gradients(odd, grad.transpose(1, 2).contiguous().transpose(1, 2))
    assert all(x is None or torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    ones = torch.ones(()).expand(grad.shape)
    pairs = zip(gradients(call, ones), gradients(call, ones.contiguous()), strict=True)
    assert all(x is None or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@EVERY_CALL
def test_scratch_memory_is_as_large_as_it_says(options, causal, monkeypatch):
    def fenced(wanted):
        memory = torch.full((wanted + 4096,), 0xAB, dtype=torch.uint8)
        fences.append((wanted, memory))
        return memory.data_ptr() + 2048

    fences = []
    monkeypatch.setattr(team, "scratch", fenced)
    for n in (5, 1100):
        more = {"queries": n} if causal and "queries" in options else {}
        call = make_call(n, **{**options, **more}, causal=causal)
        gradients(call, draw_grad(call))
    for wanted, memory in fences:
        assert (memory[:2048] == 0xAB).all()
        assert (memory[2048 + wanted :] == 0xAB).all()


def test_repeated_runs_are_equal(threads):
    call = make_call(3137, heads=1, batch=1, **SIGNS)
    grad = draw_grad(call)
    first, *others = (gradients(call, grad) for _ in range(5))
    assert all(x is None or torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_takes_the_kernels(compiled, monkeypatch):
    hasher = LshHasher(2, 16, 16, seed=0)
    beta = None if compiled else torch.full((2, 4), 0.4, requires_grad=True)
    affinity = Affinity(4) if beta is None else Affinity(4, beta)
    leaves = [torch.randn(2, 2, 50, 16, requires_grad=True) for _ in range(2)]

    def attend(backend):
        return eco_attention(*leaves, hasher, affinity=affinity, backend=backend)

    calls, original = [], cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *given: (calls.append(1), original(*given))[1])
    outs = torch.compile(attend, backend="aot_eager")("cpu") if compiled else attend("cpu"), attend("eager")
    wanted = leaves if compiled else [*leaves, beta]
    found, plain = (torch.autograd.grad(out.square().sum(), wanted) for out in outs)
    assert calls
    for one, two in zip(found, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
