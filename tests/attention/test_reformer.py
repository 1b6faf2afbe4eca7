import pytest
import torch
from largest import LargestTensor
from reformer_pytorch import LSHAttention

from ecoformer.attention.reformer import ReformerAttention

B, H, N, D = 2, 3, 64, 16
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


def make(start=0, bucket_size=8, **kwargs):
    torch.manual_seed(start)
    return ReformerAttention(H * D, H, bucket_size=bucket_size, **kwargs)


def heads(n=N, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=generator, dtype=dtype) for _ in range(2)]


def tokens(n=N):
    return torch.randn(B, n, H * D, generator=torch.Generator().manual_seed(0))


def padding(n=N):
    return torch.arange(n) >= torch.tensor([n, n - 11])[:, None]


def run(attention, qk, v, mask=None, is_causal=False):
    return attention.attend(qk, qk, v, mask, is_causal)


class Peer(LSHAttention):
    """reformer-pytorch's attention with our rotations, our cap on buckets, and padding sorted last."""

    def __init__(self, ours, is_causal, padded, monkeypatch):
        super().__init__(bucket_size=ours.bucket_size, n_hashes=ours.rounds, causal=is_causal, dropout=0.0)
        self.ours, self.padded, self.monkeypatch = ours, padded, monkeypatch

    def hash_vectors(self, n_buckets, vecs, **kwargs):
        n_buckets = min(n_buckets, self.ours.max_buckets)
        with self.monkeypatch.context() as patch:
            rotations = self.ours.rotations[..., : n_buckets // 2]
            patch.setattr(torch, "randn", lambda shape, **_: rotations.reshape(shape))
            hashes = super().hash_vectors(n_buckets, vecs, **kwargs)
        if self.padded is None:
            return hashes
        hashes = hashes.reshape(len(vecs), self.n_hashes, -1)
        rounds = torch.arange(self.n_hashes)[:, None]
        last = (n_buckets + 1) * rounds + n_buckets
        return torch.where(self.padded[:, None], last, hashes + rounds).flatten(1)


@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("bucket_size", "rounds", "max_buckets"), [(8, 1, 512), (8, 3, 512), (4, 2, 4), (32, 2, 2)]
)
def test_equals_reformer_pytorch(is_causal, masked, bucket_size, rounds, max_buckets, monkeypatch):
    # In fp64: theirs takes differences of logits of -5e4, where fp32 is good for only two digits.
    ours = make(bucket_size=bucket_size, rounds=rounds, max_buckets=max_buckets, seed=3).double()
    qk, v = heads(dtype=torch.float64)
    mask = padding() if masked else None
    flat = mask[:, None].expand(B, H, N).flatten(0, 1) if masked else None
    peer = Peer(ours, is_causal, flat, monkeypatch)
    arguments = {"input_mask": ~flat} if masked else {}
    expected = peer(qk.flatten(0, 1), v.flatten(0, 1), **arguments)[0].reshape(v.shape)
    real = ~mask[:, None, :, None] if masked else torch.tensor(True)
    out = run(ours, qk, v, mask, is_causal)
    torch.testing.assert_close(out * real, expected * real)
    single = run(ours.float(), qk.float(), v.float(), mask, is_causal)
    torch.testing.assert_close(single, out.float(), rtol=1e-4, atol=1e-5)


def test_gradients_equal_reformer_pytorch(monkeypatch):
    ours = make().double()
    mine, peer = ([x.requires_grad_() for x in heads(dtype=torch.float64)] for _ in range(2))
    run(ours, *mine, is_causal=True).square().sum().backward()
    flat = [x.flatten(0, 1) for x in peer]
    Peer(ours, True, None, monkeypatch)(*flat)[0].square().sum().backward()
    for a, b in zip(mine, peer, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@CAUSAL
@pytest.mark.parametrize("n", [3, 16])
def test_two_chunks_are_full_attention(is_causal, n):
    """With one round and two chunks every token sees every other, and itself only if there is none."""
    attention = make(rounds=1).double()
    qk, v = heads(n, torch.float64)
    logits = qk @ torch.nn.functional.normalize(qk, dim=-1).mT / D**0.5
    logits = logits.masked_fill(torch.eye(n, dtype=torch.bool), -5e4)
    if is_causal:
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(run(attention, qk, v, None, is_causal), logits.softmax(-1) @ v)


@CAUSAL
@pytest.mark.parametrize("length", [64, 57, 49])
def test_padding_changes_nothing(is_causal, length):
    """As long as the number of chunks, and with it of buckets, stays the same."""
    attention, x = make(), tokens()
    mask = (torch.arange(N) >= length).expand(B, N)
    out = attention(x, key_padding_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out[:, :length], attention(x[:, :length], is_causal=is_causal))


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_see_no_key_read_zero(is_causal, dtype):
    qk, v = (x.to(dtype).requires_grad_() for x in heads())
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0] = True
    mask[1, :7] = True
    out = run(make(), qk, v, mask, is_causal)
    out.sum().backward()
    assert (out[0] == 0).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(qk.grad).all()
    assert torch.isfinite(v.grad).all()
    assert not v.grad[mask[:, None].expand(B, H, N)].any()
    if is_causal:
        assert (out[1, :, :7] == 0).all()


@pytest.mark.parametrize("t", [1, 20, 63])
def test_causal_reads_no_later_token(t):
    qk, v = (x.requires_grad_() for x in heads())
    run(make(), qk, v, None, True)[:, :, :t].square().sum().backward()
    assert not qk.grad[:, :, t:].any()
    assert not v.grad[:, :, t:].any()
    assert v.grad[:, :, :t].any()


def test_causal_ignores_later_tokens_within_two_chunks():
    """In longer sequences later tokens decide which earlier ones share a chunk, as in the original."""
    attention, x = make(rounds=1), tokens(16)
    changed = x.clone()
    changed[:, 9:] *= -7
    before, after = (attention(t, is_causal=True)[:, :9] for t in (x, changed))
    torch.testing.assert_close(before, after)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(is_causal, dtype):
    attention = make()
    qk, v = heads(dtype=dtype)
    out = run(attention, qk, v, padding(), is_causal)
    assert out.dtype == dtype
    exact = run(attention.double(), qk.double(), v.double(), padding(), is_causal)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_memory_grows_with_n_not_its_square():
    attention = make(bucket_size=16, max_buckets=16)
    largest = []
    for n in (1024, 4096):
        with LargestTensor() as mode:
            attention(torch.randn(1, n, H * D), is_causal=True).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < H * 4096 * 4096 / 16


@pytest.mark.parametrize(
    ("argument", "value"),
    [("bucket_size", 0), ("rounds", 0), ("max_buckets", 7), ("max_buckets", 0), ("max_buckets", -2)],
)
def test_bad_arguments(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be .*, got {value}$"):
        ReformerAttention(32, 2, **{argument: value})
