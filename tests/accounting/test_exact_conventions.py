"""What single operators cost, by hand; what the counting mode sees, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import executed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ecoformer
from ecoformer.accounting.exact import count_operators
from ecoformer.backends import eager
from ecoformer.operations import Counts

X = torch.ones(3, 4)
Y = torch.ones(4, 5)
ROW = torch.ones(1, 4)
BIAS = torch.ones(5)
NUMBERS = torch.arange(12).reshape(3, 4)
FLAGS = NUMBERS > 5
IMAGE = torch.ones(1, 2, 6, 6)

BY_HAND: list[tuple[str, Callable[[], Any], Counts]] = [
    ("mm", lambda: X @ Y, Counts(mul=60, add=60, bytes=4 * (12 + 20 + 15))),
    ("addmm", lambda: torch.addmm(BIAS, X, Y), Counts(mul=60, add=75, bytes=4 * (5 + 12 + 20 + 15))),
    (
        "addmm scaled",
        lambda: torch.addmm(BIAS, X, Y, alpha=2, beta=3),
        Counts(mul=90, add=75, bytes=4 * 52),
    ),
    ("dot", lambda: torch.dot(X[0], X[1]), Counts(mul=4, add=4, bytes=32)),
    ("mul", lambda: X * X, Counts(mul=12, bytes=144)),
    ("mul by a number", lambda: X * 3, Counts(mul=12, bytes=96)),
    ("div", lambda: X / ROW, Counts(mul=12, bytes=4 * 28)),
    ("add in place", lambda: X.clone().add_(ROW), Counts(add=12, bytes=96 + 4 * 28)),
    ("add alpha", lambda: torch.add(X, X, alpha=2), Counts(add=12, mul=12, bytes=144)),
    ("sum", lambda: X.sum(dim=0), Counts(add=12, bytes=64)),
    ("sum to a scalar", lambda: X.sum(), Counts(add=12, bytes=48)),
    ("mean", lambda: X.mean(dim=1), Counts(add=12, mul=3, bytes=60)),
    ("var", lambda: X.var(dim=1), Counts(add=36, mul=18, bytes=60)),
    ("std", lambda: X.std(dim=1), Counts(add=36, mul=18, exp=3, bytes=60)),
    ("square", lambda: X.square(), Counts(mul=12, bytes=96)),
    ("cube", lambda: X**3, Counts(mul=24, bytes=96)),
    ("inverse square", lambda: X**-2, Counts(mul=24, bytes=96)),
    ("pow", lambda: X**1.5, Counts(exp=12, bytes=96)),
    ("exp", lambda: X.exp(), Counts(exp=12, bytes=96)),
    ("neg", lambda: -X, Counts(bytes=96)),
    ("comparison", lambda: X > 1, Counts(compare=12, bytes=48 + 12)),
    ("where", lambda: torch.where(FLAGS, X, 0.0), Counts(compare=12, bytes=12 + 96)),
    ("clamp", lambda: X.clamp(0, 1), Counts(compare=24, bytes=96)),
    ("clamp_min", lambda: X.clamp_min(0), Counts(compare=12, bytes=96)),
    ("amax", lambda: X.amax(dim=1), Counts(compare=12, bytes=60)),
    ("argmax", lambda: X.argmax(dim=1), Counts(compare=12, bytes=48 + 24)),
    ("sort 4", lambda: X.sort(dim=1), Counts(compare=24, bytes=96 + 96)),
    ("sort 3", lambda: X.sort(dim=0), Counts(compare=24, bytes=96 + 96)),
    ("shift", lambda: NUMBERS >> 1, Counts(shift=12, bytes=192)),
    ("and", lambda: NUMBERS & 1, Counts(shift=12, bytes=192)),
    ("gather", lambda: X.gather(1, NUMBERS[:, :2] % 4), Counts(lookup=6, mul=6, bytes=96 + 24 + 48 + 24)),
    ("index", lambda: X[torch.tensor([0, 2])], Counts(lookup=8, bytes=32 + 16 + 32)),
    ("embedding", lambda: F.embedding(torch.tensor([1]), X), Counts(lookup=4, bytes=8 + 32)),
    ("softmax", lambda: X.softmax(dim=1), Counts(compare=12, add=24, exp=12, mul=12, bytes=96)),
    ("log_softmax", lambda: X.log_softmax(dim=1), Counts(compare=12, add=36, exp=15, bytes=96)),
    ("logsumexp", lambda: X.logsumexp(dim=1), Counts(compare=12, add=27, exp=15, bytes=60)),
    ("layer norm", lambda: F.layer_norm(X, (4,)), Counts(mul=30, add=39, exp=3, bytes=96)),
    ("linear", lambda: F.linear(X, Y.T, BIAS), Counts(mul=60, add=75, bytes=4 * (5 + 12 + 20 + 15))),
    (
        "batch norm",
        lambda: F.batch_norm(IMAGE, BIAS[:2], BIAS[:2], BIAS[:2], BIAS[:2]),
        Counts(mul=144, add=146, exp=2, bytes=4 * (72 + 8 + 72)),
    ),
    ("gelu", lambda: F.gelu(X), Counts(mul=36, add=12, exp=12, bytes=96)),
    ("gelu by tanh", lambda: F.gelu(X, approximate="tanh"), Counts(mul=72, add=24, exp=12, bytes=96)),
    ("relu", lambda: F.relu(X), Counts(compare=12, bytes=96)),
    ("normalize", lambda: X.norm(dim=1), Counts(mul=12, add=12, exp=3, bytes=60)),
    ("sigmoid", lambda: X.sigmoid(), Counts(exp=12, add=12, mul=12, bytes=96)),
    ("silu", lambda: F.silu(X), Counts(exp=12, add=12, mul=24, bytes=96)),
    ("average pooling", lambda: F.avg_pool2d(IMAGE, 2), Counts(add=72, mul=18, bytes=4 * (72 + 18))),
    ("max pooling", lambda: F.max_pool2d(IMAGE, 3), Counts(compare=72, bytes=4 * (72 + 8) + 64)),
    ("adaptive pooling", lambda: F.adaptive_avg_pool2d(IMAGE, 4), Counts(add=128, mul=32, bytes=4 * 104)),
    ("convolution", lambda: F.conv2d(IMAGE, IMAGE[..., :3, :3]), Counts(mul=288, add=288, bytes=4 * 106)),
    ("concatenation", lambda: torch.cat([X, ROW]), Counts(bytes=4 * 32)),
    ("pad", lambda: F.pad(X, (0, 1)), Counts(bytes=4 * 27)),
    ("cast", lambda: X.half(), Counts(bytes=48 + 24)),
    ("no cast", lambda: X.float(), Counts()),
    ("half precision", lambda: X.half() * X.half(), Counts(mul=12, bytes=2 * 72 + 72)),
    ("zeros", lambda: torch.zeros(3, 4), Counts(bytes=48)),
    ("empty", lambda: torch.empty(3, 4), Counts()),
    ("fill in place", lambda: torch.empty(3, 4).fill_(1), Counts(bytes=48)),
    ("copy in place", lambda: torch.empty(3, 4).copy_(ROW), Counts(bytes=16 + 48)),
    (
        "a reshape that copies",
        lambda: X.t().reshape(12)[1:].unsqueeze(0).expand(5, 11).split(1),
        Counts(bytes=96),
    ),
    ("only views", lambda: X.view(4, 3).mT[1:].unsqueeze(0).expand(5, 2, 4), Counts()),
    ("an expanded operand", lambda: ROW.expand(3, 4) * 2, Counts(mul=12, bytes=16 + 48)),
    ("overlapping windows", lambda: X[0].unfold(0, 2, 1) * 2, Counts(mul=6, bytes=16 + 24)),
    ("dropout in eval", lambda: F.dropout(X, 0.5, training=False), Counts()),
]


@pytest.mark.parametrize(
    ("call", "counts"), [case[1:] for case in BY_HAND], ids=[case[0] for case in BY_HAND]
)
def test_by_hand(call: Callable[[], Any], counts: Counts) -> None:
    assert executed(call) == (counts, ())


def test_an_unknown_operator_is_listed_and_the_rest_is_counted() -> None:
    counts, uncounted = executed(lambda: torch.fft.fft(X + X))
    assert counts.add == 12
    assert uncounted == ("aten._fft_r2c",)


def _attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)


def test_fused_attention_by_hand() -> None:
    q, k, v = _attention_inputs()
    pairs = 2 * 3 * 5 * 7
    expected = Counts(
        mul=8 * pairs + 2 * pairs, add=8 * pairs + 2 * pairs, compare=pairs, exp=pairs, bytes=4 * (240 + 336)
    )
    assert executed(F.scaled_dot_product_attention, q, k, v) == (expected, ())
    allowed = torch.ones(5, 7, dtype=torch.bool)
    masked = Counts(compare=pairs, bytes=35)
    assert executed(F.scaled_dot_product_attention, q, k, v, allowed) == (expected + masked, ())


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_fused_attention_costs_the_same_in_every_kernel(backend: SDPBackend) -> None:
    layer = ecoformer.create_attention("softmax", 12, 3).eval()
    x = torch.randn(2, 10, 12)
    plain = executed(layer, x)
    with sdpa_kernel(backend):
        assert executed(layer, x) == plain


def test_counting_changes_no_result() -> None:
    for name in ("softmax", "lsh_eco", "reformer"):
        layer, x = ecoformer.create_attention(name, 12, 3).eval(), torch.randn(2, 10, 12)
        expected = layer(x)
        with torch.no_grad(), count_operators() as counting:
            counting.enter("")
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_registered_operators_count_as_plain_pytorch() -> None:
    codes, v = torch.ones(2, 9, 16), torch.randn(2, 9, 4)
    plain = executed(eager.sums, codes, v, None, None)
    assert plain[0].mul == 2 * 9 * 16 * 4
    for causal in (False, True):
        counts, uncounted = executed(ecoformer.hash_attention, codes, codes, v, is_causal=causal)
        assert counts.mul > plain[0].mul
        assert uncounted == ()
    a, b, c = torch.randn(2, 70, 3), torch.randn(2, 70, 3), torch.randn(2, 70, 5)
    expected = executed(eager.causal_product, a, b, c, False)
    assert executed(eager.registered_product, a, b, c, False) == expected
    assert expected[1] == ()


def test_packed_codes_are_unpacked_by_shifts() -> None:
    packed, v = torch.zeros(2, 9, dtype=torch.int16), torch.randn(2, 9, 4)
    counts, uncounted = executed(ecoformer.hash_attention, packed, packed, v)
    assert counts.shift == 2 * (2 * 9 * 16)  # a shift and a mask a bit, once for queries and keys
    assert uncounted == ()


def test_pytorchs_fast_path_is_off_while_counting_only() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    counts, uncounted = executed(layer, torch.randn(2, 5, 8))
    assert uncounted == ()
    assert counts.mul > 2 * 5 * (4 * 64 + 2 * 128)
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        executed(lambda: X @ X)
    assert torch.backends.mha.get_fastpath_enabled()
    with count_operators() as counting:
        pass
    assert (X + X).sum() == 24
    assert counting.counts == {}


def test_names() -> None:
    with count_operators() as counting:
        counting.enter("a")
        X + X
        counting.enter("b")
        X * X
        counting.leave()
        X + X
        counting.leave()
        X * X
    assert counting.counts == {"a": Counts(add=24, bytes=288), "b": Counts(mul=12, bytes=144)}
