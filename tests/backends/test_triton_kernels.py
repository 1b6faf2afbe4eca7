"""Triton kernels against eager PyTorch: natively with `-m gpu`, on the CPU by `test_triton_interpreter.py`.

All inputs are views without order in memory, in the middle of buffers full of NaN.
"""

import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from ecoformer import FitOptions, KernelHasher, eco_attention
from ecoformer.affinity import FLOOR, Affinity, group_values
from ecoformer.backends import eager, fused
from ecoformer.backends.hashing import HashFunctions, Hyperplanes, Signs, codes, project, scaled
from ecoformer.functional import sign_ste, unpack_codes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALVES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]

pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    from ecoformer.backends import triton

    return triton


@pytest.fixture(scope="module")
def configs():
    pytest.importorskip("triton")
    from ecoformer.backends.triton import configs

    return configs


class Case(NamedTuple):
    n: int
    dim: int = 16
    value_dim: int = 16
    bits: int = 16
    support: int = 25
    n_k: int | None = None
    masked: bool = False
    causal: bool = False
    batch: int = 2
    heads: int = 2
    groups: int | None = None
    apart: bool = False
    """Keys have hash functions of their own."""
    weighted: bool = False
    planes: bool = False
    signs: bool = False
    """Tokens are projections already."""
    cancels: float = 1.0
    """How many times larger than the weight's gradient its terms are."""


def embedded(x):
    """The same numbers as a view (B, H, N, D) of a (B, N, H, D) buffer, with NaN on all sides."""
    batch, heads, n, width = x.shape
    buffer = x.new_full((batch, n + 2, heads, width + 3), torch.nan)
    view = buffer[:, 1:-1, :, 1:-2].transpose(1, 2)
    view.copy_(x)
    return view


def draw_tokens(shape, functions, dtype, generator):
    """Tokens whose projections keep clear of 0 and ±1, where rounding decides about codes and gradients."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.cat([project(x.double(), converted(f, torch.float64)) for f in functions], dim=-1)
    y = (scaled(y) if functions == [Signs()] else y).abs()
    clear = ((y > 1e-3) & ((y - 1).abs() > 1e-3)).all(dim=-1)
    for sample, good in zip(x.flatten(0, 1), clear.flatten(0, 1), strict=True):
        assert good.any()
        sample[~good] = sample[good][0]
    return x


def converted(functions, *to):
    return None if functions is None else type(functions)(*(f.to(*to) for f in functions))


def make(case, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(shape, generator=generator)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def draw_functions():
        shape = (case.heads, case.support, case.dim)
        if case.signs:
            return Signs()
        if case.planes:
            return Hyperplanes(2 * normal(case.heads, case.dim, case.bits))
        return HashFunctions(
            torch.nn.functional.normalize(normal(*shape), dim=-1),
            0.2 + 0.2 * rand(*shape[:2]),
            0.7 + 0.5 * rand(case.heads),
            3 * normal(*shape[:2], case.bits) / case.support**0.5,
        )

    functions = draw_functions()
    key_functions = draw_functions() if case.apart else None
    both = [functions] if key_functions is None else [functions, key_functions]
    lead = (case.batch, case.heads)
    dim = case.bits if case.signs else case.dim
    q = draw_tokens((*lead, case.n, dim), both, dtype, generator)
    n_k = case.n_k or case.n
    k = None if case.n_k is None else draw_tokens((*lead, n_k, dim), both, dtype, generator)
    v = normal(*lead, n_k, case.value_dim).to(dtype)
    mask = None
    if case.masked:
        mask = rand(case.batch, n_k) < 0.4
        mask[0] = True
        mask = mask.repeat_interleave(2, dim=1)[:, ::2]
    key_weight = None
    if case.weighted:
        key_weight = (0.5 + rand(case.batch, n_k, case.heads)).transpose(1, 2).to(DEVICE)
    q, k, v = (None if x is None else embedded(x.to(DEVICE)) for x in (q, k, v))
    functions, key_functions = converted(functions, DEVICE), converted(key_functions, DEVICE)
    mask = None if mask is None else mask.to(DEVICE)
    constant, levels = Affinity.paper(case.bits).constant(case.bits), (None, None, None)
    if case.groups is not None:
        numbers = rand(2, case.heads, case.groups).to(DEVICE)
        affinity = Affinity(case.groups, 0.3 + 0.6 * numbers[0], 0.5 + numbers[1])
        levels, constant = (*affinity.levels(case.bits, numbers), FLOOR * affinity.total(numbers)), 0.0
    tensors = (q, k, v, mask, key_weight, functions, key_functions, *levels)
    return fused.FusedCall(*tensors, constant, case.causal)


def plain(call):
    """Eager PyTorch with gradients, where fp64 stays fp64, and codes are of the tokens' dtype."""

    def own_codes(x, functions):
        wide = eager.accumulator(x.dtype)
        reach = 1.0 if isinstance(functions, Signs) else None
        return sign_ste(project(x.to(wide), functions), reach).to(x.dtype).to(wide)

    with mock.patch.object(fused, "codes", own_codes):
        return fused.plain(call)


def backward(kernels, call, grad, saved, needs):
    """Gradients of q, k, v and the hash functions' weight."""
    to_q, to_k, to_v, _, to_weight, *_ = kernels.backward(
        call, grad, saved, (*needs[:3], False, needs[3], False, False, False)
    )
    return to_q, to_k, to_v, to_weight


def leaves(call, dtype=None):
    """Inputs that can be differentiated, and the list of them."""
    flat = list(call.flat())
    for i, x in enumerate(flat[:16]):
        if x is not None and x.dtype != torch.bool:
            flat[i] = x.detach().to(dtype or x.dtype).clone()
    copy = fused.FusedCall.of(*flat)
    return copy, [x.requires_grad_() for x in copy.differentiable() if x is not None]


def by_autograd(call, grad, dtype=None):
    copy, wanted = leaves(call, dtype)
    out = plain(copy)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def by_kernels(kernels, call, grad):
    assert kernels.cannot(call, needs_grad=True) is None
    out, saved = kernels.forward(call)
    needs = tuple(x is not None for x in call.differentiable())
    found = kernels.backward(call, grad, saved, needs)
    return [out, *(x for x in found if x is not None)]


def error(x, truth):
    return float((x.double() - truth).norm() / max(float(truth.norm()), 1e-30))


def check(kernels, case, dtype=torch.float32):
    call = make(case, dtype)
    grad = embedded(torch.randn(*call.q.shape[:3], case.value_dim).to(DEVICE, dtype))
    truth = by_autograd(call, grad, torch.float64)
    theirs = by_autograd(call, grad)
    ours = by_kernels(kernels, call, grad)
    inputs = dict(zip(fused.DIFFERENTIABLE, call.differentiable(), strict=True))
    names = ["out", *(name for name, x in inputs.items() if x is not None)]
    scale = max(float(x.norm()) for x in truth[1:])
    for name, x, y, true in zip(names, ours, theirs, truth, strict=True):
        assert x.shape == true.shape
        assert x.dtype == (inputs[name].dtype if name in inputs else dtype)
        assert x.isfinite().all(), name
        # Gradients that are zero but for rounding are judged by the size of the others.
        if float(true.norm()) < 1e-6 * scale:
            assert float(x.norm()) < 1e-5 * scale, name
        else:
            rounding = 8 * torch.finfo(torch.float32).eps * (case.cancels if name == "hash weight" else 1.0)
            if dtype != torch.float32 and x.dtype == torch.float32:
                rounding = 2**-13  # of two pieces of 8 bits each
            assert error(x, true) <= 2 * error(y, true) + rounding, name


CASES = [
    Case(1, bits=1, support=1),
    Case(63, dim=40, bits=8, masked=True),
    Case(200, value_dim=40, heads=1, batch=1),
    Case(63, dim=96, value_dim=96, bits=33, support=64),
    Case(63, dim=40, bits=33, n_k=50, masked=True),
    Case(5, n_k=70, bits=16),
    Case(1, causal=True),
    Case(63, bits=8, causal=True, batch=1),
    Case(140, value_dim=40, masked=True, causal=True, heads=1),
    Case(140, groups=4, heads=1, batch=1),
    Case(40, groups=2, bits=8, masked=True, planes=True),
    Case(20, groups=3, bits=9, n_k=30, apart=True, weighted=True, masked=True),
    Case(40, apart=True, weighted=True, planes=True, batch=1),
    Case(70, groups=8, causal=True, heads=1, batch=1),
    Case(40, groups=2, bits=8, n_k=40, causal=True, apart=True, weighted=True, masked=True, heads=1),
    Case(40, bits=8, causal=True, apart=True, weighted=True, heads=1, batch=1),
    Case(70, groups=4, n_k=70, signs=True, weighted=True, masked=True, heads=1),
    Case(40, groups=2, bits=8, signs=True, heads=1),
    Case(40, bits=9, n_k=30, signs=True),
    Case(50, groups=4, n_k=50, signs=True, weighted=True, causal=True, heads=1, batch=1),
    Case(40, bits=8, signs=True, causal=True, heads=1, batch=1),
]
THOROUGH = [
    Case(3137, batch=1),
    Case(3137, dim=32, value_dim=32, masked=True),
    Case(3137, causal=True, batch=1),
    # With one support sample all bits agree, or all differ.
    Case(500, dim=96, value_dim=40, bits=33, support=1, masked=True, cancels=900),
    Case(500, dim=40, value_dim=96, bits=33, support=64, causal=True),
    Case(257, dim=128, value_dim=128, bits=64, support=64, causal=True, batch=1),
    Case(257, dim=128, value_dim=128, bits=64, support=64, n_k=129, batch=1),
    Case(500, bits=1, n_k=3137, batch=1),
    Case(3137, dim=32, value_dim=32, groups=4, masked=True, batch=1),
    Case(600, groups=4, causal=True, batch=1),
    Case(600, dim=64, value_dim=64, groups=4, causal=True, apart=True, weighted=True, batch=1),
    Case(200, dim=40, bits=12, groups=2, weighted=True, batch=1),
    Case(200, dim=96, value_dim=128, bits=32, groups=8, planes=True, apart=True, batch=1),
    Case(300, dim=128, value_dim=40, groups=16, n_k=200, batch=1),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in THOROUGH)])
def test_output_and_gradients(kernels, case):
    check(kernels, case)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "case",
    [
        CASES[1],
        CASES[5],
        CASES[7]._replace(n=130, heads=1),
        Case(40, bits=8, groups=2, weighted=True, batch=1),
        Case(40, bits=8, groups=2, causal=True, heads=1, batch=1),
    ],
)
def test_half_precision(kernels, case, dtype):
    check(kernels, case, dtype)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts fp32 to bf16 where hardware rounds")
@pytest.mark.parametrize(
    "case",
    [
        Case(3137, dim=64, value_dim=64, masked=True),
        Case(1000, causal=True),
        Case(3137, dim=64, value_dim=64, groups=4, masked=True),
        Case(3137, dim=32, value_dim=32, groups=4, apart=True, weighted=True),
        Case(1000, dim=32, value_dim=32, groups=4, causal=True),
    ],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_of_long_sequences(kernels, case, dtype):
    check(kernels, case, dtype)


LARGE = [
    Case(70, bits=32, support=48, heads=1, masked=True),
    Case(40, dim=96, value_dim=40, n_k=50, batch=1),
    Case(140, bits=24, causal=True, heads=1, batch=1),
    Case(40, bits=33, support=64, heads=1, batch=1),
    Case(40, bits=64, support=40, causal=True, heads=1, batch=1),
    Case(20, dim=128, value_dim=128, heads=1, batch=1),
]
LARGE_AND_LONG = [
    Case(1100, dim=32, value_dim=32, bits=bits, support=m) for bits in (24, 32) for m in (25, 48)
]


@pytest.mark.parametrize("case", [*LARGE, *([] if INTERPRETED else LARGE_AND_LONG)])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_of_large_sizes(kernels, case, dtype):
    check(kernels, case, dtype)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("narrow", ["q", "k", "v"])
def test_gradients_have_the_dtypes_of_what_they_are_of(kernels, narrow, bits):
    call = make(Case(20, n_k=30, batch=1, bits=bits))
    call = call._replace(**{narrow: getattr(call, narrow).half()})
    grad = torch.randn_like(call.v[:, :, :20])
    out, saved = kernels.forward(call)
    found = backward(kernels, call, grad, saved, (True, True, True, True))
    inputs = (call.q, call.k, call.v, call.functions.weight)
    assert [x.dtype for x in found] == [x.dtype for x in inputs]
    assert out.dtype == call.v.dtype


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts fp32 to bf16 where hardware rounds")
@pytest.mark.parametrize(
    "case",
    [
        Case(196, dim=64, value_dim=64, groups=4, batch=8, heads=20),
        Case(3137, dim=32, value_dim=32, groups=4),
        Case(1000, dim=32, value_dim=32, groups=4, causal=True),
    ],
)
def test_gradients_that_are_rounded_to_bf16(kernels, case):
    """Where those of tokens and values alone are needed, they are computed with fewer pieces."""
    call = make(case, torch.bfloat16)
    grad = torch.randn(*call.q.shape[:3], case.value_dim).to(DEVICE, torch.bfloat16)
    saved = kernels.forward(call)[1]
    to_q, _, to_v, _ = backward(kernels, call, grad, saved, (True, False, True, False))
    truth, theirs = by_autograd(call, grad, torch.float64), by_autograd(call, grad)
    for i, x in ((1, to_q), (2, to_v)):
        assert error(x, truth[i]) <= 2 * error(theirs[i], truth[i])


@pytest.mark.skipif(not INTERPRETED, reason="natively `test_half_precision` tests it")
@pytest.mark.parametrize("groups", [None, 2])
def test_bf16_by_the_interpreter(kernels, groups):
    call = make(Case(40, bits=8, groups=groups), torch.bfloat16)
    grad = torch.randn(2, 2, 40, 16).bfloat16()
    for x, true in zip(by_kernels(kernels, call, grad), by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < 2**-6  # it cuts fp32 to bf16 where hardware rounds


@pytest.mark.parametrize(("block", "per_sm"), [(64, 1), (64, 3), (32, 1 << 20)])
@pytest.mark.parametrize("cheap", [0, 1 << 30])
def test_however_tokens_are_cut(kernels, configs, monkeypatch, block, per_sm, cheap):
    from ecoformer.backends.triton import launch

    monkeypatch.setattr(launch, "_CHEAP_TO_ADD", cheap)
    call = make(Case(230, batch=1, heads=1))
    grad = torch.randn(1, 1, 230, 16).to(DEVICE)
    config = configs.Config(block, 2, 2, per_sm)
    with configs.trial(gather=config, read=config, gather_grad=config, token_grad=config):
        results = by_kernels(kernels, call, grad)
    for x, true in zip(results, by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < 2e-6


@pytest.mark.parametrize("warps", [1, 2])
def test_one_launch_for_many_tiles(kernels, configs, warps):
    """As for many short heads: codes and what queries read go through memory within a program."""
    call = make(Case(196, dim=32, value_dim=32, heads=1, masked=True))
    grad = torch.randn(2, 1, 196, 32).to(DEVICE)
    with configs.trial(gather=configs.Config(32, warps, 3, 0), gather_grad=configs.Config(32, warps, 1, 0)):
        results = by_kernels(kernels, call, grad)
    for x, true in zip(results, by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter adds in one order")
@pytest.mark.parametrize("case", [Case(80, heads=1), Case(80, causal=True, heads=1), Case(40, n_k=60)])
def test_repeated_runs_are_equal(kernels, case):
    call = make(case)
    grad = torch.randn(*call.q.shape[:3], case.value_dim).to(DEVICE)
    first = by_kernels(kernels, call, grad)
    for _ in range(20):
        for x, y in zip(first, by_kernels(kernels, call, grad), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    "case",
    [
        Case(20, heads=1, masked=True),
        Case(20, causal=True, heads=1, batch=1),
        Case(20, n_k=30, heads=1, batch=1),
    ],
)
def test_what_was_worked_out_for_other_tensors_serves(kernels, case):
    """The launches of a call are repeated with those of the next one of its shapes."""
    for seed in range(2):
        call = make(case, seed=seed)
        grad = torch.randn(*call.q.shape[:3], case.value_dim).to(DEVICE)
        results = by_kernels(kernels, call, grad)
        truth = by_autograd(call, grad, torch.float64)
        for x, true in zip(results, truth, strict=True):
            assert error(x, true) < 4e-6
        out, nothing = kernels.forward(call, keep=False)
        assert torch.equal(out, results[0])
        assert not nothing


def rearranged(x):
    """The same numbers with channels apart from each other in memory."""
    return x.mT.contiguous().mT


CHANGES = {
    "constant": lambda call, grad: (call._replace(constant=call.constant + 16), grad),
    "strides of q": lambda call, grad: (call._replace(q=rearranged(call.q)), grad),
    "strides of v": lambda call, grad: (call._replace(v=rearranged(call.v)), grad),
    "strides of the mask": lambda call, grad: (call._replace(mask=call.mask.clone().contiguous()), grad),
    "no mask": lambda call, grad: (call._replace(mask=None), grad),
    "strides of the gradient": lambda call, grad: (call, rearranged(grad)),
    "one gradient for all": lambda call, grad: (call, torch.ones((), device=DEVICE).expand(grad.shape)),
    "dtype of the gradient": lambda call, grad: (call, grad.half()),
    "dtype of v": lambda call, grad: (call._replace(v=call.v.half()), grad),
    "dtype of q": lambda call, grad: (call._replace(q=call.q.half()), grad),
    "causal": lambda call, grad: (call._replace(causal=True), grad),
    "keys": lambda call, grad: (call._replace(k=call.q.flip(2)), grad),
    "hash functions of keys": lambda call, grad: (call._replace(key_functions=call.functions), grad),
    "weights of keys": lambda call, grad: (call._replace(key_weight=call.v[..., 0].abs() + 1), grad),
    "groups": lambda call, grad: (grouped(call, 4), grad),
}


def grouped(call, groups, beta=0.6):
    affinity, like = Affinity(groups, torch.full((call.v.shape[1], groups), beta)), call.functions.weight
    scale, ratio = affinity.levels(call.bits, like)
    return call._replace(scale=scale, ratio=ratio, floor=FLOOR * affinity.total(like), constant=0.0)


@pytest.fixture(scope="module")
def planned(kernels):
    """A call and a gradient whose launches are kept."""
    call = make(Case(16, heads=1, masked=True))
    grad = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    by_kernels(kernels, call, grad)
    return call, grad


@pytest.mark.parametrize("what", CHANGES)
def test_a_plan_is_not_taken_for_what_differs(kernels, planned, what):
    """One thing changes at the same shapes."""
    call, grad = CHANGES[what](*planned)
    bound = 1e-3 if torch.float16 in (call.q.dtype, call.v.dtype) else 4e-6
    for x, true in zip(by_kernels(kernels, call, grad), by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < bound


def test_precision_of_the_hash_functions_may_change(kernels, monkeypatch):
    from ecoformer.backends.triton import launch

    call = make(Case(40, heads=1))
    before = launch.key_of(call)
    monkeypatch.setattr(launch, "HASH_PRECISION", "ieee")
    assert launch.key_of(call) != before


@pytest.mark.parametrize("n", [40, 150])
def test_buckets_of_whole_numbers_are_exact(kernels, n):
    call = make(Case(n, bits=8, groups=2, heads=1))
    values = torch.randint(-1000, 1001, call.v.shape, device=DEVICE).float()
    state = kernels.forward(call._replace(v=values))[1][1]
    f = group_values(codes(call.q, call.functions), 2)
    sums = eager.sums(f.double(), values.double(), None, None)[..., :-1, :].float()
    assert torch.equal(state, torch.cat([sums[..., :-1].flatten(-2), sums[..., -1]], dim=-1))


@pytest.mark.parametrize("causal", [False, True])
def test_denominators_have_a_floor(kernels, causal):
    """With ratio 0 a query reads the keys of its own value; where there is none, nothing."""
    call = grouped(make(Case(20, bits=6, causal=causal, apart=True, heads=1, batch=1)), 1, 1.0)
    grad = torch.randn(1, 1, 20, 16).to(DEVICE)
    ours, truth = by_kernels(kernels, call, grad), by_autograd(call, grad, torch.float64)
    assert not truth[0].any(dim=-1).all()
    for x, true in zip(ours[:4], truth[:4], strict=True):
        assert x.isfinite().all()
        assert error(x, true) < 1e-5


def test_codes_and_sums_of_whole_numbers_are_exact(kernels):
    call = make(Case(150, bits=16, heads=1))
    values = torch.randint(-1000, 1001, call.v.shape, device=DEVICE).float()
    _, (packed, state) = kernels.forward(call._replace(v=values))
    h = codes(call.q, call.functions)
    assert packed.dtype == torch.int16
    assert torch.equal(unpack_codes(packed), h)
    sums = eager.sums(h.double(), values.double(), None, None).float()
    assert torch.equal(state[..., : sums[0, 0].numel()].view_as(sums), sums)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.int16), (17, torch.int32), (64, torch.int64)])
def test_width_of_packed_codes(kernels, bits, dtype):
    call = make(Case(20, bits=bits, batch=1))
    packed = kernels.forward(call)[1][0]
    assert packed.dtype == dtype
    assert torch.equal(unpack_codes(packed, bits), codes(call.q, call.functions))


WIDE_CAUSAL = Case(140, dim=64, value_dim=64, bits=24, causal=True, heads=1, batch=1)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(20), torch.float32),
        (Case(20, n_k=30), torch.float32),
        (Case(140, causal=True, heads=1, batch=1), torch.float32),
        (WIDE_CAUSAL, torch.bfloat16),
        (Case(20, bits=8, groups=2, apart=True, heads=1), torch.float32),
        (Case(20, bits=8, groups=2, causal=True, heads=1), torch.float32),
    ],
)
def test_room_is_as_announced(kernels, case, dtype):
    call = make(case, dtype)
    announced = kernels.kept(call)
    for room, tensor in zip(announced, kernels.forward(call)[1], strict=True):
        assert (room.shape, room.dtype, room.stride()) == (tensor.shape, tensor.dtype, tensor.stride())


@pytest.mark.parametrize("what", ["q", "v"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_nan_stays_in_its_sample(kernels, what, causal, groups):
    call = make(Case(40, bits=8, groups=groups, causal=causal, heads=1))
    grad = torch.randn(2, 1, 40, 16).to(DEVICE)
    clean = by_kernels(kernels, call, grad)[:3]
    getattr(call, what)[1, :, 35] = torch.nan
    spoilt = by_kernels(kernels, call, grad)[:3]
    assert spoilt[0][1, :, 35:].isnan().all()
    for x, y in zip(clean, spoilt, strict=True):
        assert torch.equal(x[0], y[0])


def test_a_length_that_overflows_is_nan(kernels):
    call = make(Case(20, batch=1))
    call.q[0, 0, 3] = 1e30
    out = kernels.forward(call)[0]
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()


def test_nan_of_a_query_stays_there(kernels):
    call = make(Case(20, n_k=30, batch=1))
    clean = kernels.forward(call)[0]
    call.q[0, 0, 7] = torch.nan
    out = kernels.forward(call)[0]
    assert out[0, 0, 7].isnan().all()
    out[0, 0, 7] = clean[0, 0, 7]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_hold_anything(kernels, causal):
    call = make(Case(40, masked=True, causal=causal, heads=1))
    grad = torch.randn(2, 1, 40, 16).to(DEVICE)
    padding = call.mask[:, None]
    clean = by_kernels(kernels, call, grad)
    call.v[padding] = torch.nan
    for x, y in zip(clean, by_kernels(kernels, call, grad), strict=True):
        assert torch.equal(x, y)
    call.q[padding] = torch.nan
    out = kernels.forward(call)[0]
    assert torch.equal(out[~padding], clean[0][~padding])


PROJECTIONS = Case(33, bits=8, groups=2, n_k=33, signs=True, weighted=True, heads=1)


@pytest.mark.parametrize("causal", [False, True])
def test_padded_projections_may_hold_anything(kernels, causal):
    call = make(PROJECTIONS._replace(masked=True, causal=causal))
    grad = torch.randn(2, 1, 33, 16).to(DEVICE)
    padding = call.mask[:, None]
    clean = by_kernels(kernels, call, grad)
    call.v[padding], call.k[padding] = torch.nan, torch.nan
    for x, y in zip(clean, by_kernels(kernels, call, grad), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_and_infinity_in_projections(kernels, causal):
    """The sign of infinity is a sign. NaN stays in its row as a query, in its head as a key."""
    call = make(PROJECTIONS._replace(causal=causal))
    call.q[0, 0, 20, 3], call.k[0, 0, 7, 5] = torch.inf, -torch.inf
    finite = call._replace(q=call.q.clamp(-9, 9), k=call.k.clamp(-9, 9))
    out = kernels.forward(finite)[0]
    assert torch.equal(kernels.forward(call)[0], out)
    call.q[0, 0, 20, 3] = torch.nan
    found = kernels.forward(call)[0]
    assert found[0, 0, 20].isnan().all()
    assert torch.equal(found[:, :, :20], out[:, :, :20])
    assert torch.equal(found[1], out[1])
    call.k[0, 0, 30, 0] = torch.nan
    found = kernels.forward(call)[0]
    assert found[0, 0, 30:].isnan().all()
    assert torch.equal(found[1], out[1])


@pytest.mark.parametrize("causal", [False, True])
def test_a_zero_token_gets_its_gradient(kernels, causal):
    call = make(Case(33, batch=1, heads=1, causal=causal))
    call.q[0, 0, 5] = 0
    grad = torch.randn(1, 1, 33, 16).to(DEVICE)
    ours, theirs = by_kernels(kernels, call, grad), by_autograd(call, grad)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert ours[1][0, 0, 5].abs().max() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_but_padding_reads_zero(kernels, causal):
    call = make(Case(20, masked=True, causal=causal, heads=1))
    out, to_q, to_v, _ = by_kernels(kernels, call, torch.ones(2, 1, 20, 16, device=DEVICE))
    assert not out[0].any()
    assert not to_q[0].any()
    assert not to_v[0].any()


@pytest.mark.parametrize(
    "needs", [(True, True, False, False), (False, False, True, False), (False,) * 3 + (True,)]
)
@pytest.mark.parametrize("n_k", [None, 40])
def test_only_what_is_needed(kernels, needs, n_k):
    call = make(Case(30, n_k=n_k, heads=1, batch=1))
    needs = (needs[0], needs[1] and n_k is not None, *needs[2:])
    grad = torch.randn(1, 1, 30, 16).to(DEVICE)
    saved = kernels.forward(call)[1]
    everything = backward(kernels, call, grad, saved, (True, n_k is not None, True, True))
    found = backward(kernels, call, grad, saved, needs)
    for x, y, needed in zip(found, everything, needs, strict=True):
        if needed:
            torch.testing.assert_close(x, y)
        else:
            assert x is None


def test_a_bias_that_is_no_whole_number(kernels):
    call = make(Case(70, causal=True, heads=1, batch=1))._replace(constant=17.3)
    grad = torch.randn(1, 1, 70, 16).to(DEVICE)
    for x, true in zip(by_kernels(kernels, call, grad), by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < 2e-6


@pytest.mark.parametrize(
    "case",
    [
        Case(20, masked=True, heads=1),
        Case(20, n_k=30, heads=1, batch=1),
        Case(20, causal=True, heads=1, batch=1),
        Case(20, bits=8, groups=2, apart=True, weighted=True, heads=1, batch=1),
        Case(20, bits=8, groups=2, causal=True, planes=True, heads=1, batch=1),
    ],
)
def test_as_a_registered_operator(kernels, case):
    call = make(case)
    grad = torch.randn(*call.q.shape[:3], case.value_dim).to(DEVICE)
    copy, wanted = leaves(call)
    out = fused.run("triton", copy, True)
    found = [out.detach(), *torch.autograd.grad(out, wanted, grad)]
    for x, true in zip(found, by_autograd(call, grad, torch.float64), strict=True):
        assert error(x, true) < 2e-6
    arguments = (*call.flat(), "triton")
    torch.library.opcheck(fused.eco_attention, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_without_a_break(kernels, causal):
    hasher = KernelHasher(1, 16).fit(torch.randn(2, 1, 60, 16), options=FitOptions(steps=5, pairs=5))
    hasher.to(DEVICE)
    q, v = (torch.randn(1, 1, 30, 16, device=DEVICE).requires_grad_() for _ in range(2))

    def gradients(attention):
        out = attention(q, v, hasher, is_causal=causal, backend="triton")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, v))]

    torch.compiler.reset()
    compiled = torch.compile(eco_attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(gradients(compiled), gradients(eco_attention), strict=True):
        assert torch.equal(x, y)


def test_what_it_cannot_do(kernels, monkeypatch):
    call = make(Case(20, n_k=30))

    def reason(**changes):
        return kernels.cannot(call._replace(**changes), needs_grad=False)

    assert reason() is None
    assert "as many keys" in reason(causal=True)
    assert reason(functions=Hyperplanes(torch.zeros(2, 16, 16))) is None
    levels = [torch.zeros(2, 2, device=DEVICE)] * 2
    assert "groups" in reason(scale=levels[0], ratio=levels[1])
    few = torch.zeros(2, 4, device=DEVICE)
    assert reason(scale=few, ratio=few) is None
    q = torch.zeros(2, 2, 30, 128, device=DEVICE)
    assert "causal" in reason(scale=few, ratio=few, q=q, k=None, v=q, causal=True)
    assert "fp32" in reason(q=call.q.double())
    assert "channels" in reason(v=torch.zeros(2, 2, 30, 129, device=DEVICE))
    wide = call.functions._replace(weight=torch.zeros(2, 25, 65, device=DEVICE))
    assert "bits" in reason(functions=wide)
    assert reason(k=None, causal=True) is None
    monkeypatch.setattr(kernels, "_LONGEST", 19)
    assert reason() is None
    assert "so many tokens" in kernels.cannot(call, needs_grad=True)
    monkeypatch.setattr(kernels, "VERSION", (3, 2))
    assert reason() == "it needs Triton 3.3"


@pytest.mark.skipif(INTERPRETED, reason="needs the memory and the speed of a GPU")
def test_offsets_beyond_32_bits(kernels):
    n = 1 << 20
    call = make(Case(64, dim=64, value_dim=64, batch=1, heads=8))
    q, v = (x.repeat(1, 1, n // 64, 1).half() for x in (call.q, call.v))
    buffer = torch.empty(1, n, 5, 8, 64, dtype=torch.float16, device=DEVICE)
    buffer[:, :, 0], buffer[:, :, 4] = q.transpose(1, 2), v.transpose(1, 2)
    q, v = buffer[:, :, 0].transpose(1, 2), buffer[:, :, 4].transpose(1, 2)
    assert (n - 1) * q.stride(2) > 2**31
    long = call._replace(q=q, v=v)
    short = call._replace(q=call.q.half(), v=call.v.half())
    out, saved = kernels.forward(long)
    expected = kernels.forward(short)[0]
    torch.testing.assert_close(out[:, :, -64:], expected, rtol=2e-3, atol=2e-3)
    grad = torch.randn_like(expected).repeat(1, 1, n // 64, 1)
    to_q, _, to_v, _ = backward(kernels, long, grad, saved, (True, False, True, False))
    torch.testing.assert_close(to_q[:, :, :64], to_q[:, :, -64:])
    torch.testing.assert_close(to_v[:, :, :64], to_v[:, :, -64:])
