"""Combiner: attention within blocks of s tokens, and to summaries of n blocks."""

from __future__ import annotations

import math

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms.parts import Heads, around, copy, floats, product, softmax
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import CombinerAttention


@register_formula("combiner")
def combiner(layer: CombinerAttention, batch: int, tokens: int) -> Counts:
    """Tokens are padded to whole blocks; from there on padding costs what tokens cost."""
    h = Heads.of(layer, batch, tokens)
    size = layer.block or math.isqrt(tokens - 1) + 1
    blocks = -(-tokens // size)
    padded = Heads(batch, h.heads, blocks * size, h.channels)
    return (
        around(layer, h, padded.tokens)
        + _prepare(h, padded)
        + _summaries(padded, blocks)
        + _hidden(batch, size, blocks)
        + _attend(padded, size, blocks)
        + _aligned(h, blocks, blocks * size)
    )


def _aligned(h: Heads, blocks: int, padded: int) -> Counts:
    """Without padding, queries keep the projection's layout, and both of their products copy them first."""
    if padded != h.tokens:
        return Counts()
    by_blocks = h.heads > 1 and (blocks > 1 or h.interleaved)
    return copy(h.numbers, by_blocks) + copy(h.numbers, h.interleaved)


def _prepare(h: Heads, padded: Heads) -> Counts:
    """Padding is removed from keys and values, queries are scaled, all three and the mask are padded."""
    n, flags, all_flags = h.numbers, h.batch * h.tokens, h.batch * padded.tokens
    cleaned = Counts(compare=n, bytes=floats(n, n) + flags) * 2
    pads = Counts(bytes=3 * floats(n, padded.numbers) + flags + all_flags)
    return Counts(bytes=flags) + cleaned + Counts(mul=n) + copy(n) + pads


def _summaries(p: Heads, blocks: int) -> Counts:
    """Each block's query and key are maxima, with places; its value is their attention within the block."""
    n, t, flags = p.numbers, p.rows, p.batch * p.tokens
    one, marks = p.groups * blocks * p.channels, p.batch * blocks
    highest = Counts(compare=2 * n, bytes=floats(n, n) + flags + floats(n, one) + 8 * one)
    highest += Counts(compare=flags + one, bytes=flags + marks + floats(one, one) + marks)
    weights = product(one, n, t, p.channels) + _masked_softmax(t, flags)
    return highest * 2 + weights + product(t, n, one, p.tokens // blocks)


def _masked_softmax(numbers: int, flags: int) -> Counts:
    """Hidden scores are replaced before softmax, and their weights after it."""
    return softmax(numbers) + Counts(compare=numbers, bytes=floats(numbers, numbers) + flags) * 2


def _hidden(batch: int, size: int, blocks: int) -> Counts:
    """Flags of one byte: which tokens and summaries a token must not see."""
    tokens, square = batch * blocks * size, blocks * blocks
    empty = Counts(compare=tokens, bytes=tokens + batch * blocks)
    barred = Counts(shift=batch * square, bytes=square + batch * blocks + square + batch * square)
    return empty + barred + Counts(bytes=tokens + batch * square + tokens * (size + blocks))


def _attend(p: Heads, size: int, blocks: int) -> Counts:
    """One softmax over the tokens of the block and the summaries."""
    n, t, one = p.numbers, p.rows, p.groups * blocks * p.channels
    scores = product(n, n, t * size, p.channels) + product(n, one, t * blocks, p.channels)
    pairs, flags = t * (size + blocks), p.batch * p.tokens * (size + blocks)
    values = product(t * size, n, n, size) + product(t * blocks, one, n, blocks)
    total = Counts(add=n, bytes=floats(n, n, n))
    return scores + copy(pairs) + _masked_softmax(pairs, flags) + values + total
