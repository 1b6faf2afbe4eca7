import pytest
import torch
from linformer import LinformerSelfAttention

from ecoformer.attention.linformer import LinformerAttention
from ecoformer.attention.registry import create_attention

B, H, N, D, K = 2, 3, 37, 16, 12
LENGTHS = (37, 21)


def make(seed=0, seq_len=N, k=K, **kwargs):
    torch.manual_seed(seed)
    return LinformerAttention(H * D, H, seq_len=seq_len, k=k, **kwargs)


def heads(n=N, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=generator, dtype=dtype) for _ in range(3)]


def tokens(n=N):
    return torch.randn(B, n, H * D, generator=torch.Generator().manual_seed(0))


def padding(n=N):
    return torch.arange(n) >= torch.tensor(LENGTHS)[:, None]


def twin(ours):
    """linformer's module with the weights of ours."""
    theirs = LinformerSelfAttention(H * D, ours.seq_len, k=ours.k, heads=H)
    with torch.no_grad():
        for linear, weight in zip(
            (theirs.to_q, theirs.to_k, theirs.to_v), ours.qkv.weight.chunk(3), strict=True
        ):
            linear.weight.copy_(weight)
        theirs.proj_k.copy_(ours.proj_k)
        theirs.proj_v.copy_(ours.proj_v)
        theirs.to_out.load_state_dict(ours.proj.state_dict())
    return theirs


@pytest.mark.parametrize("n", [1, 20, N])
def test_equals_linformer(n):
    ours = make(qkv_bias=False)
    x = tokens(n)
    torch.testing.assert_close(ours(x), twin(ours)(x), rtol=1e-4, atol=1e-6)


def test_gradients_equal_linformer():
    ours = make(qkv_bias=False)
    theirs = twin(ours)
    ours(tokens()).square().sum().backward()
    theirs(tokens()).square().sum().backward()
    stacked = torch.cat([linear.weight.grad for linear in (theirs.to_q, theirs.to_k, theirs.to_v)])
    torch.testing.assert_close(ours.qkv.weight.grad, stacked, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.proj_k.grad, theirs.proj_k.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.proj_v.grad, theirs.proj_v.grad, rtol=1e-3, atol=1e-5)


def test_rows_that_see_no_key_read_zero():
    q, k, v = (x.requires_grad_() for x in heads())
    out = make().attend(q, k, v, torch.tensor([[True], [False]]).expand(B, N), False)
    out.sum().backward()
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_by_name_and_bad_arguments():
    attention = create_attention("linformer", 32, 2, seq_len=10)
    assert attention.proj_k.shape == (10, 256)
    with pytest.raises(ValueError, match=r"seq_len=10, got N=11 tokens$"):
        attention(torch.zeros(1, 11, 32))
    with pytest.raises(ValueError, match="causal"):
        attention(torch.zeros(1, 10, 32), is_causal=True)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        LinformerAttention(32, 2, seq_len=0)
    with pytest.raises(ValueError, match="k must be at least 1, got -1"):
        LinformerAttention(32, 2, seq_len=8, k=-1)
