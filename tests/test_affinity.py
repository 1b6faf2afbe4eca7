"""Groups of bits: `hash_attention` with any affinity against the reference, its gradients, and its floor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from ecoformer import (
    Affinity,
    HashAttentionState,
    LshHasher,
    eco_attention,
    hash_attention,
    pack_codes,
    reference,
)
from ecoformer.affinity import FLOOR

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@st.composite
def grouped_calls(draw):
    """Shapes, groups, and options of one call."""
    groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    heads, n = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 20, 65]))
    tensors = draw(st.sampled_from(["numbers", "tensors", "one row"]))
    share, weighted = draw(st.sampled_from([None, 0.3])), draw(st.booleans())
    return groups, size, heads, n, tensors, share, weighted, draw(st.booleans()), draw(st.integers(0, 99))


def make_numbers(kind, heads, groups, seed):
    g = torch.Generator().manual_seed(seed)
    if kind == "numbers":
        return 0.7, 1.3
    rows = heads if kind == "tensors" else 1
    beta = 0.05 + 0.95 * torch.rand(rows, groups, generator=g, dtype=torch.float64)
    return beta, 0.1 + torch.rand(rows, groups, generator=g, dtype=torch.float64)


@given(call=grouped_calls())
def test_equals_the_reference_with_all_gradients(call, make_inputs, make_mask):
    groups, size, heads, n, kind, share, weighted, is_causal, seed = call
    x = make_inputs(2, heads, n=n, bits=groups * size, dim=3, seed=seed).requires_grad()
    beta, weight = make_numbers(kind, heads, groups, seed)
    leaves = list(x)
    if isinstance(beta, torch.Tensor):
        leaves += [beta.requires_grad_(), weight.requires_grad_()]
    key_weight = None
    if weighted:
        key_weight = (0.1 + torch.rand(2, heads, n, dtype=torch.float64)).requires_grad_()
        leaves.append(key_weight)
    mask = None if share is None else make_mask(2, heads, n, seed=seed, share=share)
    affinity, options = Affinity(groups, beta, weight), {"is_causal": is_causal, "key_weight": key_weight}
    ours = hash_attention(*x, affinity=affinity, key_padding_mask=mask, **options)
    true = reference.grouped_attention(*x, groups, beta, weight, mask, **options)
    torch.testing.assert_close(ours, true, rtol=0, atol=1e-11)
    factor = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(seed))
    for mine, theirs in zip(
        *(torch.autograd.grad((out * factor).sum(), leaves, materialize_grads=True) for out in (ours, true)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bits", [1, 3, 8, 10, 16, 33, 64])
def test_the_papers_affinity_is_a_special_case(bits, make_inputs):
    x = make_inputs(2, 2, n=20, bits=bits)
    for bias, named in (("paper", Affinity.paper(bits)), ("tight", Affinity.tight(bits))):
        constant = named.constant(bits)
        assert constant == (reference.bias_of(bits) if bias == "paper" else bits + 1)
        assert not named.needs_floor(bits)
        torch.testing.assert_close(
            reference.grouped_affinity(*x[:2], bits, named.beta, named.weight), x[0] @ x[1].mT + constant
        )
        assert torch.equal(hash_attention(*x, affinity=named), hash_attention(*x, bias=bias))


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_numbers_are_exact_and_packed_codes_agree(dtype, is_causal, make_inputs):
    # With beta 1 and two-bit groups affinities are 0 or 4, so all sums are whole numbers.
    x = make_inputs(2, 2, n=70, bits=8, dtype=torch.float32, whole=True)
    affinity = Affinity(4, 1.0)
    true = reference.grouped_attention(*x.to(torch.float64), 4, 1.0, is_causal=is_causal).to(dtype)
    for codes in (x[:2], [pack_codes(c) for c in x[:2]]):
        ours = hash_attention(*codes, x.v.to(dtype), affinity=affinity, is_causal=is_causal)
        torch.testing.assert_close(ours, true, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_gradient_of_a_bit_is_half_the_difference_of_its_two_values(make_inputs):
    x = make_inputs(1, 1, n=6, bits=6, dim=1).requires_grad()
    affinity = Affinity(2, 0.8)

    def numerator(q):
        agree = reference.grouped_affinity(q, x.codes_k, 2, 0.8, 1.0)
        return (agree @ x.v).sum()

    (gradient,) = torch.autograd.grad(numerator(x.codes_q), x.codes_q)
    for bit in ((0, 0, 2, 1), (0, 0, 5, 4)):
        up, down = x.codes_q.detach().clone(), x.codes_q.detach().clone()
        up[bit], down[bit] = 1, -1
        torch.testing.assert_close(gradient[bit], (numerator(up) - numerator(down)) / 2)
    gradcheck(lambda q: hash_attention(q, x.codes_k, x.v, affinity=affinity), (x.codes_q,))


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_query_that_is_close_to_no_key_gives_no_nan(dtype, is_causal):
    # beta 1: all affinities are exactly zero, and so are all sums.
    k = torch.ones(1, 1, 90, 8, dtype=dtype, requires_grad=True)
    q = (-torch.ones(1, 1, 90, 8, dtype=dtype)).requires_grad_()
    v = torch.randn(1, 1, 90, 4, dtype=dtype, requires_grad=True)
    out = hash_attention(q, k, v, affinity=Affinity(2, 1.0), is_causal=is_causal)
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_floor_is_a_share_of_the_mean_affinity():
    # All keys differ in all four bits: affinities are 1e-16, far below the floor.
    q, k, v = -torch.ones(1, 4).double(), torch.ones(100, 4).double(), torch.ones(100, 1).double()
    out = hash_attention(q, k, v, affinity=Affinity(1, 0.9999))
    torch.testing.assert_close(out, torch.full((1, 1), 1e-16 / FLOOR, dtype=torch.float64), rtol=1e-9, atol=0)


@CAUSAL
@pytest.mark.parametrize("steps", [[20], [1] * 20, [7, 13]], ids=str)
def test_streams_and_ranks_exchange_the_same_state(steps, is_causal, make_inputs):
    x = make_inputs(2, 3, n=20, bits=12)
    affinity = Affinity(3, torch.full((3, 3), 0.9).double(), 2.0)
    key_weight = 0.5 + torch.rand(2, 3, 20, dtype=torch.float64)
    state, outs = HashAttentionState(affinity=affinity), []
    for part in torch.split(torch.arange(20), steps):
        tokens = (t[:, :, part] for t in x)
        outs.append(state.update(*tokens, key_weight=key_weight[:, :, part]))
    whole = hash_attention(*x, affinity=affinity, key_weight=key_weight, is_causal=True)
    torch.testing.assert_close(torch.cat(outs, dim=2), whole)
    assert state.numbers_per_head() == (3 * 2**4 + 1) * (x.v.shape[-1] + 1)


def test_soft_codes_give_the_formula_as_it_stands(make_inputs):
    x = make_inputs(1, 2, n=9, bits=8)
    q, k = (torch.tanh(torch.randn_like(c)) for c in x[:2])
    torch.testing.assert_close(
        hash_attention(q, k, x.v, affinity=Affinity(2, 0.9)), reference.grouped_attention(q, k, x.v, 2, 0.9)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 0}, "groups must be"),
        ({"groups": 4, "beta": 0.0}, "beta must be positive and at most 1"),
        ({"groups": 4, "beta": 1.5}, "beta must be"),
        ({"groups": 4, "weight": -1.0}, "weight must be positive"),
        ({"groups": 4, "beta": torch.ones(2, 3)}, r"beta must be a number or \(H, G\) with G = 4"),
        ({"groups": 4, "weight": torch.zeros(2, 4)}, r"weight \(2, 4\) must be positive"),
    ],
)
def test_bad_affinities_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        Affinity(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"affinity": Affinity(5)}, "groups=5 must divide codes of 16 bits"),
        ({"affinity": Affinity(1)}, "groups of 1 to 8 bits"),
        (
            {"affinity": Affinity(4, torch.ones(3, 4))},
            r"affinity.beta \(3, 4\) must have a row for each of the 2",
        ),
        ({"affinity": Affinity(4), "bias": "tight"}, "leave it out where affinity is given"),
        ({"key_weight": torch.ones(1, 2, 8)}, r"key_weight must be floats of shape \(1, 2, 9\)"),
        ({"key_weight": torch.ones(1, 2, 9).int()}, "key_weight must be floats"),
    ],
)
def test_bad_calls_are_refused(options, message, make_inputs):
    with pytest.raises(ValueError, match=message) as caught:
        hash_attention(*make_inputs(1, 2), **options)
    assert "\n" not in str(caught.value)


def test_prepared_numbers_follow_changes_and_gradients():
    hasher = LshHasher(2, 8, 16, seed=0)
    tokens = torch.randn(1, 2, 30, 8)
    beta = torch.full((2, 4), 0.5)
    affinity = Affinity(4, beta)
    first = eco_attention(tokens, tokens, hasher, affinity=affinity)
    assert torch.equal(first, eco_attention(tokens, tokens, hasher, affinity=affinity))
    beta.fill_(0.9)
    changed = eco_attention(tokens, tokens, hasher, affinity=affinity)
    assert torch.equal(changed, eco_attention(tokens, tokens, hasher, affinity=Affinity(4, beta.clone())))
    assert not torch.equal(changed, first)
    beta.requires_grad_()
    out = eco_attention(tokens, tokens, hasher, affinity=affinity)
    assert torch.autograd.grad(out.square().sum(), beta)[0].abs().sum() > 0


def test_nothing_prepared_in_inference_mode_is_used_for_training():
    affinity, device = Affinity(4, 0.9), torch.device("cpu")
    with torch.inference_mode():
        assert affinity.prepared(16, 2, device)[0].is_inference()
    assert not affinity.prepared(16, 2, device)[0].is_inference()
    assert affinity.prepared(16, 2, device)[0] is affinity.prepared(16, 2, device)[0]
