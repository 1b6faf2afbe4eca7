import warnings

import pytest
import torch

from ecoformer.attention.performer import PerformerAttention, orthogonal_gaussian
from ecoformer.attention.registry import create_attention

with warnings.catch_warnings():
    # performer-pytorch compares versions with distutils and imports torch.cuda.amp.
    warnings.simplefilter("ignore", DeprecationWarning)
    from performer_pytorch import FastAttention

B, H, N, D = 2, 3, 37, 16
LENGTHS = (37, 21)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


def make(start=0, **kwargs):
    torch.manual_seed(start)
    return PerformerAttention(H * D, H, **kwargs)


def heads(n=N, d=D, scale=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(B, H, n, d, generator=generator, dtype=dtype) for _ in range(3)]


def tokens(n=N, seed=0):
    return torch.randn(B, n, H * D, generator=torch.Generator().manual_seed(seed))


def padding(n=N):
    return torch.arange(n) >= torch.tensor(LENGTHS)[:, None]


def dense_causal(q, k, v, weights, mask):
    """Every weight of the N x N matrix on its own, from the definition of the features."""
    q, k = (x * x.shape[-1] ** -0.25 for x in (q, k))
    of_q = torch.exp(q @ weights.mT - q.square().sum(-1, keepdim=True) / 2)
    of_q = of_q / torch.exp((q @ weights.mT).amax(-1, keepdim=True)) + 1e-4
    of_k = torch.exp(k @ weights.mT - k.square().sum(-1, keepdim=True) / 2) + 1e-4
    affinity = (of_q @ of_k.mT).tril() * ~mask[:, None, None]
    return affinity @ v / affinity.sum(-1, keepdim=True)


@pytest.mark.parametrize(("features", "dim_head"), [(64, 16), (40, 16), (7, 16), (256, 32)])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_equals_performer_pytorch(features, dim_head, scale):
    ours = PerformerAttention(H * dim_head, H, features=features, seed=3)
    theirs = FastAttention(dim_head, features, causal=False)
    theirs.projection_matrix.copy_(ours.projection)
    q, k, v = heads(n=100, d=dim_head, scale=scale)
    torch.testing.assert_close(ours.attend(q, k, v, None, False), theirs(q, k, v), rtol=1e-4, atol=1e-5)


def test_gradients_equal_performer_pytorch():
    ours = make(features=32)
    theirs = FastAttention(D, 32, causal=False)
    theirs.projection_matrix.copy_(ours.projection)
    mine, peer = ([x.requires_grad_() for x in heads()] for _ in range(2))
    ours.attend(*mine, None, False).square().sum().backward()
    theirs(*peer).square().sum().backward()
    for a, b in zip(mine, peer, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n", [1, 64, 150])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_equals_dense(n, masked):
    attention = make(features=48).double()
    q, k, v = heads(n=n, dtype=torch.float64)
    mask = padding(n) if masked else torch.zeros(B, n, dtype=torch.bool)
    expected = dense_causal(q, k, v, attention.projection, mask)
    torch.testing.assert_close(attention.attend(q, k, v, mask if masked else None, True), expected)
    single = attention.attend(q.float(), k.float(), v.float(), mask if masked else None, True)
    torch.testing.assert_close(single, expected.float(), rtol=1e-4, atol=1e-5)


@CAUSAL
def test_many_features_approach_softmax(is_causal):
    q, k, v = heads(scale=0.4)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    few, many = (make(features=m).attend(q, k, v, None, is_causal) for m in (16, 8192))
    assert (many - exact).abs().mean() < 0.02 * exact.abs().mean()
    assert (many - exact).abs().mean() < (few - exact).abs().mean() / 10


@CAUSAL
def test_padding_changes_nothing(is_causal):
    attention, x, mask = make(features=32), tokens(), padding()
    x[mask] = 1e3  # would dominate the maximum of the keys
    out = attention(x, key_padding_mask=mask, is_causal=is_causal)
    for b, length in enumerate(LENGTHS):
        alone = attention(x[b : b + 1, :length], is_causal=is_causal)
        torch.testing.assert_close(out[b, :length], alone[0], rtol=1e-4, atol=1e-5)
    x[mask] = float("nan")
    poisoned = attention(x, key_padding_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(poisoned[~mask], out[~mask])


@CAUSAL
@pytest.mark.parametrize("features", [1, 32])
def test_rows_that_see_no_key_read_zero(is_causal, features):
    attention = make(features=features)
    q, k, v = (x.requires_grad_() for x in heads(scale=30.0))
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0] = True
    mask[1, :5] = True
    out = attention.attend(q, k, v, mask, is_causal)
    out.sum().backward()
    assert (out[0] == 0).all()
    assert (out[1, :, 5:] != 0).all()
    if is_causal:
        assert (out[1, :, :5] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@CAUSAL
@pytest.mark.parametrize("scale", [1e-3, 10.0, 1e3])
@pytest.mark.parametrize("dim_head", [16, 256])
def test_any_scale_is_finite(is_causal, scale, dim_head):
    attention = PerformerAttention(H * dim_head, H, features=64)
    q, k, v = heads(d=dim_head, scale=scale)
    # Keys along a projection have the largest features there are.
    k[:, :, 3] = attention.projection[7] * dim_head**0.25
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention.attend(*leaves, None, is_causal)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
    assert (out.abs() <= v.abs().amax(dim=-2, keepdim=True) * 1.001).all()


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(is_causal, dtype):
    attention = make(features=32)
    q, k, v = (x.to(dtype) for x in heads())
    out = attention.attend(q, k, v, padding(), is_causal)
    assert out.dtype == dtype
    exact = attention.double().attend(q.double(), k.double(), v.double(), padding(), is_causal)
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@CAUSAL
def test_autocast_keeps_features_in_full_precision(is_causal):
    attention, x = make(features=32), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = attention._project(x)
        out = attention.attend(q, k, v, None, is_causal)
    assert q.dtype == out.dtype == torch.bfloat16
    exact = attention.attend(q.float(), k.float(), v.float(), None, is_causal)
    torch.testing.assert_close(out, exact.bfloat16(), rtol=0.01, atol=1e-5)


def test_projection_is_orthogonal_in_blocks():
    w = orthogonal_gaussian(40, 16, seed=1)
    for block in w.split(16):
        gram = block @ block.mT
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-10)
    norms = orthogonal_gaussian(4096, 16, seed=1).square().sum(-1)
    assert abs(norms.mean() - 16) < 0.5  # chi-squared with 16 degrees
    assert abs(norms.var() - 32) < 4


def test_seed_decides_and_redraw_replaces():
    a, b, c = make(1, seed=0), make(2, seed=0), make(1, seed=5)
    assert torch.equal(a.projection, b.projection)
    assert torch.equal(make(1).projection, make(1).projection)  # made after the same torch.manual_seed
    assert not torch.equal(make(1).projection, make(2).projection)
    assert not torch.equal(a.projection, c.projection)
    a.redraw(5)
    assert torch.equal(a.projection, c.projection)


def test_by_name_and_bad_arguments():
    assert create_attention("performer", 32, 2, features=8).projection.shape == (8, 16)
    with pytest.raises(ValueError, match="features must be at least 1, got 0"):
        PerformerAttention(32, 2, features=0)
    with pytest.raises(ValueError, match="attn_drop"):
        PerformerAttention(32, 2, attn_drop=0.1)
