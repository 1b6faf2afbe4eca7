"""`HashAttentionState`: any way of cutting a sequence gives what one causal call gives, in a fixed size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer import HashAttentionState, hash_attention, pack_codes
from ecoformer.affinity import Affinity

BIAS = pytest.mark.parametrize("bias", ["paper", "tight"])


def stream(state, steps, x, mask=None, **options):
    """Feed x to the state in steps of the given lengths; returns all outputs in order."""
    assert sum(steps) == x[2].shape[-2]
    tokens = [torch.split(t, steps, dim=x[2].ndim - 2) for t in x]
    masks = [None] * len(steps) if mask is None else torch.split(mask, steps, dim=-1)
    outs = [
        state.update(*token, key_padding_mask=padding, **options)
        for *token, padding in zip(*tokens, masks, strict=True)
    ]
    return torch.cat(outs, dim=-2)


@given(
    steps=st.lists(st.one_of(st.integers(0, 9), st.integers(60, 70)), min_size=1, max_size=8),
    lead=st.lists(st.integers(1, 3), max_size=3),
    bits=st.integers(1, 64),
    dim=st.integers(1, 5),
    bias=st.sampled_from(["paper", "tight"]),
    share=st.sampled_from([None, 0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_any_steps_give_the_causal_call(steps, lead, bits, dim, bias, share, seed, make_inputs, make_mask):
    n = sum(steps)
    x = make_inputs(*lead, n=n, bits=bits, dim=dim, dtype=torch.float32, whole=True, seed=seed)
    mask = None if share is None else make_mask(*lead, n, seed=seed, share=share)
    expected = hash_attention(*x, key_padding_mask=mask, is_causal=True, bias=bias)
    packed = (pack_codes(x.codes_q), pack_codes(x.codes_k), x.v)
    for tensors in (x, packed):
        state = HashAttentionState(bias)
        # The values are whole numbers, so all sums are exact and so is the comparison.
        assert torch.equal(stream(state, steps, tensors, mask, bits=bits), expected)
        assert state.numbers_per_head() == bits * dim + bits + dim + 1
        assert state.sums.numel() == math.prod(lead) * state.numbers_per_head()


@BIAS
@pytest.mark.parametrize("steps", [[1] * 12, [12], [5, 1, 6], [3, 0, 9]], ids=str)
def test_gradients_flow_through_the_state(steps, bias, make_inputs, make_mask):
    x, mask = make_inputs(2, 3, n=12).requires_grad(), make_mask(2, 12)
    weight = torch.randn(2, 3, 12, 5, dtype=torch.float64)
    whole = hash_attention(*x, key_padding_mask=mask, is_causal=True, bias=bias)
    streamed = stream(HashAttentionState(bias), steps, x, mask)
    torch.testing.assert_close(streamed, whole)
    torch.testing.assert_close(x.gradients(streamed, weight), x.gradients(whole, weight))


def test_detach_cuts_the_gradient_but_not_the_memory(make_inputs):
    x = make_inputs(2, 3, n=10).requires_grad()
    first, second = (type(x)(*(t[:, :, part] for t in x)) for part in (slice(0, 6), slice(6, 10)))
    state = HashAttentionState()
    state.update(*first)
    assert state.sums.requires_grad
    assert state.detach() is state
    out = state.update(*second)
    torch.testing.assert_close(out, hash_attention(*x, is_causal=True)[:, :, 6:])
    for gradient in x.gradients(out, torch.ones_like(out)):
        assert gradient[:, :, :6].eq(0).all()
        assert gradient[:, :, 6:].ne(0).any()


def test_reset_forgets_and_takes_another_shape(make_inputs):
    x, other = make_inputs(2, 3, n=7), make_inputs(1, n=4, dim=2, bits=5)
    state = HashAttentionState()
    assert state.detach().numbers_per_head() == 0
    state.update(*x)
    assert state.reset() is state
    assert state.numbers_per_head() == 0
    torch.testing.assert_close(state.update(*other), hash_attention(*other, is_causal=True))


@pytest.mark.parametrize(
    "shape",
    [{"lead": (3, 3)}, {"lead": (2, 1)}, {"lead": (2,)}, {"bits": 8}, {"dim": 4}],
    ids=["batch", "heads", "axes", "bits", "dim"],
)
def test_another_shape_is_refused_and_leaves_the_state_alone(shape, make_inputs):
    x, state = make_inputs(2, 3, n=7), HashAttentionState()
    state.update(*x)
    before = state.sums.clone()
    lead = shape.pop("lead", (2, 3))
    with pytest.raises(ValueError, match=r"the state holds \(2, 3, 17, 6\)") as caught:
        state.update(*make_inputs(*lead, n=1, **shape))
    assert "\n" not in str(caught.value)
    assert torch.equal(state.sums, before)


@BIAS
@pytest.mark.parametrize("step", [1, 3])
def test_counts_every_token_beyond_the_integers_of_fp32(step, bias, make_inputs, ground_truth):
    x, more = (
        make_inputs(1, 2, n=2, dtype=torch.float32),
        make_inputs(1, 2, n=6, dtype=torch.float32, whole=True),
    )
    state = HashAttentionState(bias)
    state.update(*x)
    # As if 2^24 tokens had gone by, whose codes and values cancelled: only their number is left.
    state.sums = torch.zeros_like(state.sums)
    state.sums[..., -1, -1] = 1 << 24
    out = stream(state, [step] * (6 // step), more)
    assert state.sums.dtype == torch.float64
    assert state.sums[..., -1, -1].eq((1 << 24) + 6).all()
    assert out.dtype == torch.float32
    # Eq. (9) for token t: the numerator is its causal one, the denominator has 2^24 more keys of affinity 0.
    own = torch.cat([more.v, torch.ones(1, 2, 6, 1)], dim=-1).double()
    product = (more.codes_q.double() @ more.codes_k.double().mT).tril() @ own
    top = product + Affinity.of(bias, 16).constant(16) * own.cumsum(dim=-2)
    denominator = top[..., -1:] + Affinity.of(bias, 16).constant(16) * (1 << 24)
    torch.testing.assert_close(out.double(), top[..., :-1] / denominator, rtol=1e-6, atol=0)


def test_compiled_steps_do_not_recompile(make_inputs):
    x, state = make_inputs(1, 2, n=24, dtype=torch.float32), HashAttentionState()
    step = torch.compile(state.update, fullgraph=True, backend="eager")
    with torch.no_grad():
        parts = [step(*(t[:, :, i : i + 1] for t in x)) for i in range(24)]
    torch.testing.assert_close(torch.cat(parts, dim=-2), hash_attention(*x, is_causal=True))
