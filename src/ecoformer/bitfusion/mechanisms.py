"""The matrix products of each attention mechanism, between its projections.

Products with weights that all samples share run once over the rows of all samples. Products of a sample's own
queries, keys and values run once for each sample and head: their second operand stands where weights stand.
Softmax, exponentials, signs, maxima and sums without products are not the array's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ecoformer.attention import Attention
from ecoformer.hashing import KernelHasher, LshHasher, SignHasher

from .ops import FullyConnected
from .workloads import Work

__all__ = ["Sizes", "attend_work", "softmax_work"]


@dataclass(frozen=True)
class Sizes:
    """A call of an attention layer: samples, heads, tokens, channels of a head, and the operands' bits."""

    batch: int
    heads: int
    tokens: int
    channels: int
    activation_bits: int = 8
    weight_bits: int = 8
    code_bits: int = 8

    @property
    def groups(self) -> int:
        """Heads of all samples."""
        return self.batch * self.heads

    def shared(self, rows: int, inputs: int, outputs: int) -> FullyConnected:
        """A product with weights of the model."""
        return FullyConnected(rows, inputs, outputs, self.activation_bits, self.weight_bits)

    def own(self, rows: int, inputs: int, outputs: int) -> FullyConnected:
        """A product of two things that were computed."""
        return FullyConnected(rows, inputs, outputs, self.activation_bits, self.activation_bits)

    def coded(self, rows: int, inputs: int, outputs: int) -> FullyConnected:
        """A product of codes with something that was computed."""
        return FullyConnected(rows, inputs, outputs, self.code_bits, self.activation_bits)


def attend_work(layer: Attention, sizes: Sizes) -> Work | None:
    """What `layer` computes between its projections, or None where its products are not known."""
    rule = _RULES.get(layer.name)
    return None if rule is None else rule(layer, sizes)


def softmax_work(sizes: Sizes, keys: int, groups: int | None = None) -> Work:
    """Scores and the weighted sum of values, with so many keys for the tokens of each group."""
    count = sizes.groups if groups is None else groups
    scores, mix = (sizes.tokens, sizes.channels, keys), (sizes.tokens, keys, sizes.channels)
    return [(sizes.own(*scores), count), (sizes.own(*mix), count)]


def _softmax(layer: Attention, s: Sizes) -> Work:
    return softmax_work(s, s.tokens)


def _hashed(layer: Any, s: Sizes) -> Work | None:
    """Hash functions, the sum of codes and values over the keys, its read, and the denominator."""
    hashing, bits = _hashing(layer.hasher, s), layer.hasher.bits
    if hashing is None:
        return None
    context = s.coded(bits, s.tokens, s.channels)
    read, denominator = s.coded(s.tokens, bits, s.channels), s.coded(s.tokens, bits, 1)
    return [*hashing, (context, s.groups), (read, s.groups), (denominator, s.groups)]


def _hashing(hasher: Any, s: Sizes) -> Work | None:
    rows, bits = s.batch * s.tokens, hasher.bits
    if isinstance(hasher, KernelHasher):
        distances = s.shared(rows, s.channels, hasher.support)
        return [(distances, s.heads), (s.shared(rows, hasher.support, bits), s.heads)]
    if isinstance(hasher, SignHasher) and hasher.features == "channels":
        return []
    if isinstance(hasher, LshHasher | SignHasher):
        return [(s.shared(rows, s.channels, bits), s.heads)]
    return None


def _performer(layer: Any, s: Sizes) -> Work:
    """Features of queries and of keys, by one projection of all heads; then as linear attention does."""
    features = layer.features
    maps = (s.shared(s.groups * s.tokens, s.channels, features), 2)
    context = (s.own(features, s.tokens, s.channels), s.groups)
    read = (s.own(s.tokens, features, s.channels), s.groups)
    return [maps, context, read, (s.own(s.tokens, features, 1), s.groups)]


def _linformer(layer: Any, s: Sizes) -> Work:
    """Keys and values of all heads and samples are mixed over tokens by the same weights."""
    mixtures = s.shared(s.groups * s.channels, s.tokens, layer.k)
    return [(mixtures, 2), *softmax_work(s, layer.k)]


def _reformer(layer: Any, s: Sizes) -> Work:
    """Rotations of all rounds, then each chunk of each round attends to itself and the one before."""
    size = layer.bucket_size
    padded = -(-s.tokens // (2 * size)) * 2 * size
    half = min(padded // size, layer.max_buckets) // 2
    rotations = s.shared(s.groups * padded, s.channels, layer.rounds * half)
    chunks = s.groups * layer.rounds * padded // size
    return [
        (rotations, 1),
        (s.own(size, s.channels, 2 * size), chunks),
        (s.own(size, 2 * size, s.channels), chunks),
    ]


def _combiner(layer: Any, s: Sizes) -> Work:
    """Within blocks, the blocks' summaries, and from every token to the summaries."""
    size = layer.block or math.isqrt(s.tokens - 1) + 1
    blocks = -(-s.tokens // size)
    tokens, each = blocks * size, s.groups * blocks
    within = [(s.own(size, s.channels, size), each), (s.own(size, size, s.channels), each)]
    summaries = [(s.own(1, s.channels, size), each), (s.own(1, size, s.channels), each)]
    across = [
        (s.own(tokens, s.channels, blocks), s.groups),
        (s.own(tokens, blocks, s.channels), s.groups),
    ]
    return [*within, *summaries, *across]


_RULES: dict[str, Callable[[Any, Sizes], Work | None]] = {
    "softmax": _softmax,
    "eco": _hashed,
    "klsh_eco": _hashed,
    "lsh_eco": _hashed,
    "bi_eco": _hashed,
    "performer": _performer,
    "fp_eco": _performer,
    "linformer": _linformer,
    "reformer": _reformer,
    "combiner": _combiner,
}
