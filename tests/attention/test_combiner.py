import math

import pytest
import torch
from largest import LargestTensor

from ecoformer.attention.combiner import CombinerAttention
from ecoformer.attention.registry import create_attention

B, H, N, D = 2, 3, 37, 16
LENGTHS = (37, 21)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


def make(start=0, **kwargs):
    torch.manual_seed(start)
    return CombinerAttention(H * D, H, **kwargs)


def heads(n=N, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=generator, dtype=dtype) for _ in range(3)]


def tokens(n=N):
    return torch.randn(B, n, H * D, generator=torch.Generator().manual_seed(0))


def padding(n=N):
    return torch.arange(n) >= torch.tensor(LENGTHS)[:, None]


def probabilities(q, k, block, is_causal, padded):
    """p(j | i) of one head, token by token, from the paper's factorisation: (N, N)."""
    n, d = q.shape
    scale = d**-0.5
    real = [j for j in range(n) if not padded[j]]
    members = [[j for j in real if j // block == r] for r in range(math.ceil(n / block))]
    p = q.new_zeros(n, n)
    for i in range(n):
        own = i // block
        direct = [j for j in members[own] if not is_causal or j <= i]
        others = [r for r, tokens in enumerate(members) if tokens and r != own and (not is_causal or r < own)]
        logits = [q[i] @ k[j] * scale for j in direct]
        logits += [q[i] @ k[members[r]].amax(0) * scale for r in others]
        if not logits:
            continue
        weights = torch.stack(logits).softmax(0)
        p[i, direct] += weights[: len(direct)]
        for weight, r in zip(weights[len(direct) :], others, strict=True):
            inside = (k[members[r]] @ q[members[r]].amax(0) * scale).softmax(0)
            p[i, members[r]] += weight * inside
    return p


def dense(q, k, v, block, is_causal, mask):
    out = torch.zeros_like(v)
    for b in range(B):
        for h in range(H):
            p = probabilities(q[b, h], k[b, h], block, is_causal, mask[b])
            rows = p.sum(-1)
            torch.testing.assert_close(rows, (rows > 0).to(rows))
            out[b, h] = p @ v[b, h]
    return out


@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "block"), [(N, None), (N, 5), (25, None), (12, 1), (12, 20), (1, None)])
def test_equals_dense(is_causal, masked, n, block):
    q, k, v = heads(n, torch.float64)
    mask = torch.zeros(B, n, dtype=torch.bool)
    if masked:  # a hole, a whole block of padding and, in the second sample, a short sequence
        mask = padding(n) | (torch.arange(n) == 1) | ((torch.arange(n) >= 5) & (torch.arange(n) < 10))
        mask[1, : n // 3] = True
    out = make(block=block).attend(q, k, v, mask if masked else None, is_causal)
    expected = dense(q, k, v, block or math.ceil(n**0.5), is_causal, mask)
    torch.testing.assert_close(out, expected)


@CAUSAL
def test_one_block_is_softmax(is_causal):
    q, k, v = heads()
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(make(block=64).attend(q, k, v, None, is_causal), exact)


@CAUSAL
def test_rows_that_see_no_key_read_zero(is_causal):
    q, k, v = (x.requires_grad_() for x in heads())
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0] = True
    mask[1, :9] = True
    out = make(block=6).attend(q, k, v, mask, is_causal)
    out.sum().backward()
    assert (out[0] == 0).all()
    assert (out[1, :, 9:] != 0).all()
    if is_causal:
        assert (out[1, :, :9] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert not v.grad[mask[:, None].expand(B, H, N)].any()


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(is_causal, dtype):
    attention = make()
    q, k, v = heads(dtype=dtype)
    out = attention.attend(q, k, v, padding(), is_causal)
    assert out.dtype == dtype
    exact = attention.attend(q.double(), k.double(), v.double(), padding(), is_causal)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_memory_grows_with_n_to_the_power_of_three_halves():
    largest = []
    for n in (1024, 4096):
        with LargestTensor() as mode:
            make()(torch.randn(1, n, H * D), is_causal=True).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 8 * largest[0]
    assert largest[1] < H * 4096 * 4096 / 16


def test_by_name_and_bad_arguments():
    assert create_attention("combiner", 32, 2).block is None
    with pytest.raises(ValueError, match="block must be at least 1 or None, got 0"):
        CombinerAttention(32, 2, block=0)
