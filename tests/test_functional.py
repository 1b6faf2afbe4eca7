"""`hash_attention` against the paper: by property in fp64, bit for bit on integers, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer import hash_attention, pack_codes, reference, sign_ste, unpack_codes
from ecoformer.affinity import Affinity

BIASES = ("paper", "tight")
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
BIAS = pytest.mark.parametrize("bias", BIASES)
HALVES = (torch.bfloat16, torch.float16)
# One token, and both sides of one and two blocks of the causal product.
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 130]))


@st.composite
def calls(draw):
    """Shapes, a mask's share of padding (None: no mask), and options of one call."""
    is_causal, bias = draw(st.booleans()), draw(st.sampled_from(BIASES))
    n_k = draw(LENGTHS)
    n = n_k if is_causal else draw(st.integers(1, 40))
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    shapes = {"n": n, "n_k": n_k, "dim": draw(st.integers(1, 5)), "bits": draw(st.integers(1, 64))}
    share = draw(st.sampled_from([None, 0.0, 0.3, 0.9]))
    return lead, shapes, draw(st.integers(0, 999)), share, {"is_causal": is_causal, "bias": bias}


@given(call=calls())
def test_equals_the_paper_with_gradients(call, make_inputs, make_mask, ground_truth):
    lead, shapes, seed, share, options = call
    x = make_inputs(*lead, **shapes, seed=seed).requires_grad()
    mask = None if share is None else make_mask(*lead, shapes["n_k"], seed=seed, share=share)
    ours, truth = hash_attention(*x, key_padding_mask=mask, **options), ground_truth(*x, mask, **options)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)
    weight = torch.randn(truth.shape, dtype=truth.dtype, generator=torch.Generator().manual_seed(seed))
    for mine, theirs in zip(x.gradients(ours, weight), x.gradients(truth, weight), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def whole_number_result(x, mask, is_causal, bias):
    """The quotient of two int64 sums, divided once in fp32."""
    q, k, v = (t.to(torch.int64) for t in x)
    seen = torch.ones(*q.shape[:-1], k.shape[-2], dtype=torch.int64)
    seen = seen.tril() if is_causal else seen
    if mask is not None:
        seen = seen * ~mask.unsqueeze(-2)
        v = v * ~mask.unsqueeze(-1)
    affinity, beta = (q @ k.mT) * seen, Affinity.of(bias, q.shape[-1]).constant(q.shape[-1])
    numerator = affinity @ v + beta * (seen @ v)
    denominator = (affinity + beta * seen).sum(dim=-1, keepdim=True)
    assert numerator.abs().max() < 2**24, "the test must stay where fp32 counts every integer"
    return torch.where(denominator == 0, 0, numerator.float() / denominator.clamp(min=1).float())


@given(call=calls())
def test_whole_numbers_are_exact_and_packed_codes_agree_bit_for_bit(call, make_inputs, make_mask):
    lead, shapes, seed, share, options = call
    x = make_inputs(*lead, **shapes, seed=seed, dtype=torch.float32, whole=True)
    mask = None if share is None else make_mask(*lead, shapes["n_k"], seed=seed, share=share)
    exact = whole_number_result(x, mask, **options)
    packed = [pack_codes(c) for c in (x.codes_q, x.codes_k)]
    mixed = [(x.codes_q, x.codes_k), packed, (x.codes_q, packed[1]), (packed[0], x.codes_k.to(torch.int8))]
    for codes in mixed:
        ours = hash_attention(*codes, x.v, key_padding_mask=mask, bits=shapes["bits"], **options)
        torch.testing.assert_close(ours, exact, rtol=0, atol=0)
    for dtype in HALVES:
        ours = hash_attention(*packed, x.v.to(dtype), key_padding_mask=mask, bits=shapes["bits"], **options)
        torch.testing.assert_close(ours, exact.to(dtype), rtol=0, atol=0)


@CAUSAL
@BIAS
@pytest.mark.parametrize("bits", [8, 16, 33, 63])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_error_is_at_most_twice_that_of_the_plain_formula(dtype, bits, bias, is_causal, make_inputs):
    x = make_inputs(2, 2, n=300, dim=8, bits=bits, dtype=dtype).requires_grad()
    weight = torch.randn(2, 2, 300, 8).to(dtype)

    def with_gradients(attention, inputs):
        out = attention(*inputs, is_causal=is_causal, bias=bias)
        return out, *inputs.gradients(out, weight)

    truths = with_gradients(reference.hash_attention, x.to(torch.float64).requires_grad())
    plain, ours = (with_gradients(f, x) for f in (reference.hash_attention, hash_attention))
    for name, true, theirs, mine in zip(("out", "q", "k", "v"), truths, plain, ours, strict=True):
        assert mine.dtype == dtype
        error, allowed = (mine - true).norm(), 2 * (theirs - true).norm()
        assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("bits", [15, 16, 63, 64])
@CAUSAL
def test_opposite_codes_lose_no_more_than_the_condition_of_the_sum(
    bits, is_causal, make_inputs, ground_truth
):
    # h S + beta sum(v) cancels from (beta + b) N down to (beta - b) N: the worst that codes can do.
    k = torch.ones(1, 1, 1000, bits)
    v = make_inputs(1, 1, n=1000, dtype=torch.float32).v.abs()
    ours, truth = hash_attention(-k, k, v, is_causal=is_causal), ground_truth(-k, k, v, is_causal=is_causal)
    beta = Affinity.paper(bits).constant(bits)
    condition = (beta + bits) / (beta - bits)
    assert (ours - truth).abs().max() <= 4 * torch.finfo(v.dtype).eps * condition * v.max()


@CAUSAL
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 6e4), (torch.bfloat16, 1e33)], ids=str)
def test_sums_that_half_precision_cannot_hold(dtype, size, is_causal, make_inputs, ground_truth):
    x = make_inputs(1, 2, n=4099, dim=3, dtype=dtype)
    x = x._replace(v=(x.v.abs().clamp(0.1, 1) * size).to(dtype))
    ours, truth = hash_attention(*x, is_causal=is_causal), ground_truth(*x, is_causal=is_causal)
    torch.testing.assert_close(ours.double(), truth, rtol=0.51 * torch.finfo(dtype).eps, atol=0)


@CAUSAL
@BIAS
def test_autocast_changes_nothing(is_causal, bias, make_inputs):
    x = make_inputs(2, 2, n=70, dtype=torch.float32).requires_grad()
    weight = torch.randn(2, 2, 70, 5)
    plain = hash_attention(*x, is_causal=is_causal, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = hash_attention(*x, is_causal=is_causal, bias=bias)
    gradients = x.gradients(cast, weight)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)
    assert all(map(torch.equal, gradients, x.gradients(plain, weight)))


LAYOUTS = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "features before tokens": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "every other token": lambda x: x.repeat_interleave(2, dim=-2)[..., 1::2, :],
}


@CAUSAL
@BIAS
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_of_memory_does_not_matter(layout, is_causal, bias, make_inputs, make_mask):
    x = make_inputs(2, 3, n=70, dtype=torch.float32, whole=True)
    odd = type(x)(*map(layout, x))
    assert not any(t.is_contiguous() for t in odd)
    mask = make_mask(2, 3, 70)
    strided_mask = mask.repeat_interleave(2, dim=-1)[..., ::2]
    ours = hash_attention(*odd, key_padding_mask=strided_mask, is_causal=is_causal, bias=bias)
    assert torch.equal(ours, whole_number_result(x, mask, is_causal, bias))


@CAUSAL
@BIAS
def test_expanded_heads_and_a_mask_per_sample(is_causal, bias, make_inputs, make_mask):
    x = make_inputs(2, 1, n=70, dtype=torch.float32, whole=True)
    wide = type(x)(*(t.expand(-1, 4, -1, -1) for t in x)).requires_grad()
    mask = make_mask(2, 70)
    out = hash_attention(*wide, key_padding_mask=mask, is_causal=is_causal, bias=bias)
    exact = whole_number_result(x, mask[:, None], is_causal, bias).expand_as(out)
    assert torch.equal(out, exact)
    assert out[0].eq(0).all(), "the first sample sees no key"
    assert all(g.isfinite().all() for g in wide.gradients(out, exact))


@CAUSAL
@BIAS
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0, 2), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_any_leading_dimensions_and_nothing_at_all(lead, n, is_causal, bias, make_inputs):
    x = make_inputs(*lead, n=n, dtype=torch.float32, whole=True).requires_grad()
    out = hash_attention(*x, is_causal=is_causal, bias=bias)
    assert out.shape == (*lead, n, 5)
    if out.numel():
        assert torch.equal(out, whole_number_result(x, None, is_causal, bias))
    assert [g.shape for g in x.gradients(out, torch.ones_like(out))] == [t.shape for t in x]


@pytest.mark.parametrize("dim", [0, 5])
def test_queries_without_keys_read_zero(dim, make_inputs):
    x = make_inputs(2, 3, n=4, n_k=0, dim=dim).requires_grad()
    out = hash_attention(*x)
    assert torch.equal(out, torch.zeros(2, 3, 4, dim, dtype=torch.float64))
    assert x.gradients(out, torch.ones_like(out))[0].eq(0).all()


@pytest.mark.parametrize("bits", range(1, 65))
def test_codes_survive_packing(bits, make_inputs):
    codes = make_inputs(2, 3, n=7, bits=bits).codes_q
    codes[0, 0, :2] = torch.tensor([[1.0], [-1.0]])
    packed = pack_codes(codes)
    assert packed.shape == (2, 3, 7)
    assert packed.dtype == {8: torch.uint8, 16: torch.int16, 32: torch.int32}.get(bits, torch.int64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8):
        unpacked = unpack_codes(packed, bits, dtype=dtype)
        assert unpacked.dtype == dtype
        assert torch.equal(unpacked, codes.to(dtype))
        assert torch.equal(pack_codes(codes.to(dtype)), packed)
    if bits in (8, 16, 32):
        assert torch.equal(unpack_codes(packed), codes.float())


def test_bit_r_of_the_integer_is_bit_r_of_the_code():
    one_hot = 2 * torch.eye(64) - 1
    assert pack_codes(one_hot).tolist() == [1 << r for r in range(63)] + [-(1 << 63)]
    assert pack_codes(one_hot[:8, :8]).tolist() == [1 << r for r in range(8)]
    assert unpack_codes(torch.tensor(5), 4).tolist() == [1, -1, 1, -1]
    assert pack_codes(torch.ones(0, 8)).shape == (0,)


SPECIAL = [-torch.inf, -6e4, -1.0, -1e-7, -0.0, 0.0, 1e-7, 0.3, 1.0, 1.5, 6e4, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_sign_is_exact_and_its_gradient_is_that_of_hard_tanh(dtype):
    x = torch.tensor(SPECIAL, dtype=dtype).requires_grad_()
    out = sign_ste(x)
    assert out.dtype == dtype
    assert out.tolist() == sign_ste(x.detach()).tolist() == [1.0 if y >= 0 else -1.0 for y in x.tolist()]
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().abs().le(1).to(dtype))
    hole = torch.tensor([torch.nan, 1.0], dtype=dtype)
    for x in (hole, hole.clone().requires_grad_()):
        assert sign_ste(x).isnan().tolist() == [True, False]


@pytest.mark.parametrize("reach", [1.0, 0.7])
def test_reach_is_the_width_of_the_gradients_window(reach):
    y = torch.tensor([[0.5, -0.5, 3.0, -1.0], [5.0, 9.0, 0.1, -7.0]]).requires_grad_()
    (found,) = torch.autograd.grad(sign_ste(y, reach).sum(), y)
    width = reach * y.detach().square().mean(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(found, torch.where(y.detach().abs() <= width, 1 / width, 0))
    (longer,) = torch.autograd.grad(sign_ste(1e3 * y, reach).sum(), y)
    torch.testing.assert_close(longer, found)
    zero = torch.zeros(1, 4, requires_grad=True)
    assert torch.autograd.grad(sign_ste(zero, reach).sum(), zero)[0].isfinite().all()
    infinite = torch.tensor([[1.0, torch.inf, -2.0, -1e30]], requires_grad=True)
    assert sign_ste(infinite, reach).tolist() == [[1, 1, -1, -1]]
