"""Hashed attention counted as the "cpu" backend executes it, padding of rows included.

Additions of integers count as additions; a token's offsets and a head's few constants are not counted.
Buckets and tables are lookups of rows: one an element, and one addition, except for the first of two rows
that a query reads. Bytes are those of tokens, values, output and hash functions: everything else stays in the
cache. Padded keys count like others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ecoformer.attention import HashedAttention
from ecoformer.backends.cpu.problem import STRETCH, digit_of, padded
from ecoformer.backends.fused import empty_out
from ecoformer.hashing import Hasher, KernelHasher, LshHasher, SignHasher
from ecoformer.hashing.kernel import MAX_BITS
from ecoformer.operations import Counts, mac


class CpuKernels:
    """Replaces hashed attention by the count of the CPU kernels; numba need not be installed."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        """Hashed layers that the kernels do not compute, by name, and why. They run in single steps."""

    @contextmanager
    def replace(self, model: nn.Module, count: Callable[[Counts], None]) -> Iterator[None]:
        """Hashed layers call `count` with what the kernels execute, wherever the kernels can be used."""
        found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, HashedAttention)]
        layers = [(name, layer) for name, layer in found if "attend" not in layer.__dict__]
        self.refused |= {
            name: "its attend was replaced" for name, layer in found if "attend" in layer.__dict__
        }
        try:
            for name, layer in layers:
                layer.__dict__["attend"] = partial(self._attend, name, layer, count, refusal(layer))
            yield
        finally:
            for _, layer in layers:
                layer.__dict__.pop("attend", None)

    def _attend(
        self,
        name: str,
        layer: HashedAttention,
        count: Callable[[Counts], None],
        why: str | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        key_weight: Tensor | None = None,
    ) -> Tensor:
        if why is None and is_causal:
            why = "causal order has no formula"
        if why is None and torch.float64 in (q.dtype, v.dtype):
            why = "the kernels compute in fp32"
        if why is not None or not q.numel():
            if why is not None:
                self.refused[name] = why
            more = {} if key_weight is None else {"key_weight": key_weight}
            return type(layer).attend(layer, q, k, v, key_padding_mask, is_causal, **more)
        dtype, q, v = v.dtype, q.float(), v.float()
        flags = 0 if key_padding_mask is None else key_padding_mask.numel()
        count(kernel_counts(layer, q.shape[0], q.shape[-2]) + Counts(bytes=flags))
        return empty_out(q, v).to(dtype)


def refusal(layer: HashedAttention) -> str | None:
    """Why the "cpu" backend does not compute this layer's attention; None where it does."""
    hasher = layer.hasher
    if type(layer).attend is not HashedAttention.attend:
        return f"{type(layer).__name__} overrides attend"
    channels = isinstance(hasher, SignHasher) and hasher.features == "channels"
    if not channels and not isinstance(hasher, (KernelHasher, LshHasher)):
        return f"the kernels do not support {type(hasher).__name__}"
    if hasher.bits > MAX_BITS:
        return f"more than {MAX_BITS} bits"
    if hasher.functions() is None:
        return "its hash functions have hooks, or a sign or a gradient of their own"
    return None


def kernel_counts(layer: HashedAttention, batch: int, tokens: int) -> Counts:
    """From tokens of the heads to the output."""
    hasher, rows, codes = layer.hasher, batch * layer.num_heads * tokens, 2 if layer.separate else 1
    numbers = rows * (codes * hasher.head_dim + 2 * layer.head_dim) + layer.num_heads * function_size(hasher)
    weighting = Counts()
    if layer.key_weights is not None:
        numbers, weighting = numbers + rows, Counts(mul=layer.head_dim) * rows
    counts = hashing_counts(hasher, batch, tokens) * codes + weighting + Counts(bytes=4 * numbers)
    return counts + code_counts(layer, batch, tokens)


def function_size(hasher: Hasher) -> int:
    """Numbers of a head's hash functions."""
    if isinstance(hasher, KernelHasher):
        return hasher.support * (hasher.head_dim + 1 + hasher.bits) + 1
    return hasher.head_dim * hasher.bits if isinstance(hasher, LshHasher) else 0


def hashing_counts(hasher: Hasher, batch: int, tokens: int) -> Counts:
    """Lengths, products with support samples, the kernel by a polynomial, products with A, signs."""
    dim, rows = hasher.head_dim, batch * hasher.num_heads * tokens
    samples = hasher.support if isinstance(hasher, KernelHasher) else 0
    wide_m, wide_b = padded(samples), padded(hasher.bits)
    length = Counts(mul=dim, add=dim + 16)
    signs = Counts(compare=2 * wide_b)
    if isinstance(hasher, SignHasher):
        return signs * rows
    if not samples:
        return (length + mac(dim * wide_b) + signs) * rows
    root = Counts(exp=1, mul=1)
    kernel = Counts(mul=11, add=14, compare=4, shift=1) * wide_m
    token = length + root + mac(dim * wide_m) + kernel + mac(samples * wide_b) + signs
    once = (length + Counts(mul=2)) * samples
    return token * rows + once * hasher.num_heads


def code_counts(layer: HashedAttention, batch: int, tokens: int) -> Counts:
    """Buckets of values, their folding, tables of sums, the read and the division."""
    dim, bits, heads = layer.head_dim, layer.hasher.bits, batch * layer.num_heads
    group = bits // layer.groups if layer.groups else 0
    widths = _widths(bits, dim, tokens, group or 1)
    fold, table = _group_tables(widths, group, padded(dim)) if group else _bit_tables(widths, padded(dim))
    each = _bucket(dim, widths) + _read(dim, widths) + Counts(mul=dim)
    return each * (heads * tokens) + fold * (heads * -(-tokens // STRETCH)) + table * heads


def integer_counts(
    heads: int, queries: int, keys: int, dim: int, groups: int, group: int, weighted: bool
) -> Counts:
    """Integer attention of `heads` heads in all samples, in int32, with the buckets and tables of the others.

    Tables have a product for every distance and value of a group, queries one division, and outputs one
    product of int16.
    """
    widths, wide = _widths(groups * group, dim, keys, group), padded(dim)
    shifts, rounded = Counts(shift=dim if weighted else 0), Counts(shift=1, add=1)
    numbers = groups * (wide + 1) << group
    mix = Counts(mul=group + 1, add=group * (group + 1) // 2) * numbers
    narrow = (Counts(compare=1) + rounded) * (groups * wide << group)
    join = Counts(add=wide + 1) * sum(sum(_shared(width, group)[1:]) << group for width in widths)
    divide = Counts(mul=1, compare=1, shift=3) + (rounded * 2 + Counts(compare=2)) * dim
    table = _group_fold(widths, group, wide) + mix + narrow + join
    tokens = (_bucket(dim, widths) + shifts) * keys + (_read(dim, widths) + divide) * queries
    return (tokens + table).of("int32") * heads + Counts(mul=heads * queries * dim).of("int16")


def _widths(bits: int, dim: int, keys: int, group: int) -> list[int]:
    """Bits of each digit of a code."""
    digit = digit_of(bits, dim, keys, group)
    return [min(digit, bits - start) for start in range(0, bits, digit)]


def _bucket(dim: int, widths: list[int]) -> Counts:
    """A key's values into one bucket per digit."""
    return Counts(lookup=dim, add=dim + 1) * len(widths)


def _read(dim: int, widths: list[int]) -> Counts:
    """A query's rows, one per digit; of two, the first is not added to anything."""
    added = 1 if len(widths) == 2 else len(widths)
    return Counts(lookup=dim) * len(widths) + Counts(add=dim + 1) * added


def _bit_tables(widths: list[int], wide: int) -> tuple[Counts, Counts]:
    """Buckets to the sums of single bits, and these to tables."""
    fold = Counts(add=wide + 1) + Counts(add=3 * wide + 3) * sum((1 << width) - 1 for width in widths)
    table = Counts(mul=1) + mac(wide << widths[0])
    for width in widths:
        first = (mac(wide) + Counts(add=1)) * width
        table += first + (mac(wide) + mac(1)) * ((1 << width) - 1)
    return fold, table


def _group_tables(widths: list[int], group: int, wide: int) -> tuple[Counts, Counts]:
    """Buckets to the sums of each group's values; these mixed, and joined to tables."""
    values, table = 1 << group, Counts()
    for width in widths:
        sizes = _shared(width, group)
        mix = Counts(mul=values * (wide + 1)) + mac(group * values * (wide + 1))
        join = Counts(mul=values * wide) + (mac(wide) + Counts(add=1)) * (values * sum(sizes[1:]))
        table += mix * len(sizes) + join
    return _group_fold(widths, group, wide), table


def _group_fold(widths: list[int], group: int, wide: int) -> Counts:
    """Buckets to the sums of each group's values."""
    values = 1 << group
    sizes = [size for width in widths for size in _shared(width, group)]
    return Counts(add=wide + 1) * sum(values if size == 1 else (2 * values - 1) * size for size in sizes)


def _shared(width: int, group: int) -> list[int]:
    """For each group in a digit, how many rows share a value of it."""
    return [1 << (i * group) for i in range(width // group)]
