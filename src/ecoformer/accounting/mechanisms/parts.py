"""What several mechanisms share: projections, heads in memory, unit vectors, softmax, local branch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from ecoformer.accounting.conventions import softmax_counts
from ecoformer.accounting.counts import Counts, mac
from ecoformer.attention import Attention


@dataclass(frozen=True)
class Heads:
    """Sizes of a call: samples, heads, tokens, and channels of a head."""

    batch: int
    heads: int
    tokens: int
    channels: int

    @classmethod
    def of(cls, layer: Attention, batch: int, tokens: int) -> Heads:
        """Those of a layer and its input."""
        return cls(batch, layer.num_heads, tokens, layer.head_dim)

    @property
    def groups(self) -> int:
        """B H: heads of all samples."""
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        """T = B H N: tokens of all heads of all samples."""
        return self.groups * self.tokens

    @property
    def numbers(self) -> int:
        """T C: numbers of all heads."""
        return self.rows * self.channels

    @property
    def interleaved(self) -> bool:
        """Whether a projection's heads lie so between each other that a batched product copies them first."""
        return self.batch > 1 and self.heads > 1 and self.tokens > 1

    @property
    def repeats(self) -> bool:
        """Whether a batched product must copy what all samples share but heads do not."""
        return self.batch > 1 and self.heads > 1


def floats(*numbers: int) -> int:
    """Bytes of so many fp32 numbers."""
    return 4 * sum(numbers)


def copy(numbers: int, needed: bool = True) -> Counts:
    """fp32 numbers read and written."""
    return Counts(bytes=floats(numbers, numbers) if needed else 0)


def product(left: int, right: int, out: int, length: int) -> Counts:
    """A matrix product of so many numbers by so many, each of the `out` results a sum over `length`."""
    return mac(out * length) + Counts(bytes=floats(left, right, out))


def softmax(numbers: int) -> Counts:
    """Softmax as an operator of its own, in whatever rows."""
    return softmax_counts(numbers) + copy(numbers)


def fused_attention(h: Heads, keys: int) -> Counts:
    """Softmax attention of every row to `keys` keys: scores stay where they are computed."""
    pairs, read = h.rows * keys, h.groups * keys * h.channels
    products = mac(2 * pairs * h.channels) + Counts(mul=pairs)
    return products + softmax_counts(pairs) + Counts(bytes=floats(h.numbers, read, read, h.numbers))


def linear(rows: int, inputs: int, outputs: int, bias: bool, flat: bool = True) -> Counts:
    """A linear layer. Where its rows do not lie densely in memory, it adds its bias in a second pass."""
    out = rows * outputs
    counts = product(rows * inputs, inputs * outputs, out, inputs)
    if bias:
        counts += Counts(add=out, bytes=floats(outputs) if flat else floats(out, outputs, out))
    return counts


def unit_length(rows: int, channels: int) -> Counts:
    """x / |x|: squares, their sum, two guards (a comparison and a choice each), one root, the scaling."""
    n = rows * channels
    squares = Counts(mul=n, add=n, bytes=floats(n, n) + floats(n, rows))
    guards = Counts(compare=4 * rows, bytes=2 * (5 * rows + 9 * rows))
    root = Counts(exp=rows, bytes=floats(rows, rows))
    return squares + guards + root + Counts(mul=n, bytes=floats(n, rows, n))


def around(layer: Attention, h: Heads, stored: int | None) -> Counts:
    """Projections before and after attention, and the local branch.

    `stored` are the tokens of a head that the attended values lie in memory with, N or N and padding, head by
    head; None if they lie token by token, as fused attention leaves them.
    """
    tokens = h.batch * h.tokens
    if layer.shared_qk:
        before = linear(tokens, layer.dim, layer.dim, layer.qk.bias is not None) + linear(
            tokens, layer.dim, layer.dim, layer.v.bias is not None
        )
    else:
        before = linear(tokens, layer.dim, 3 * layer.dim, layer.qkv.bias is not None)
    joined = stored is not None and min(h.heads, h.channels, stored) > 1
    merge = copy(h.numbers, joined)
    flat = stored is None or joined or layer.local is not None or _dense(h, stored)
    after = Counts()
    if isinstance(layer.proj, nn.Linear):
        after = linear(tokens, layer.dim, layer.dim, layer.proj.bias is not None, flat)
        # PyTorch copies rows that are not dense only for a weight that can be trained, without gradients too.
        copied = layer.proj.weight.requires_grad and min(h.batch, h.tokens) > 1
        after += copy(h.numbers, copied and not flat)
    return before + merge + local_branch(layer, h) + after


def _dense(h: Heads, stored: int) -> bool:
    """Whether heads that need no joining lie as one block of tokens."""
    if h.heads == 1:
        return stored == h.tokens or h.batch == 1
    return stored == 1


def local_branch(layer: Attention, h: Heads) -> Counts:
    """Depth-wise convolution of the values over neighbours, and its sum with what was attended.

    Of a sequence, what is convolved is padded before; of an image (without other tokens) the result is.
    """
    if layer.local is None:
        return Counts()
    n, width, taps = h.numbers, h.batch * layer.dim, math.prod(layer.local.sizes)
    given, padding = n, copy(n)
    if len(layer.local.sizes) == 1:
        given = width * (h.tokens + taps - 1)
        padding = Counts(bytes=floats(n, given))
    convolution = mac(n * taps) + Counts(bytes=floats(given, layer.dim * taps, n))
    return padding + convolution + Counts(add=n, bytes=floats(n, n, n))
