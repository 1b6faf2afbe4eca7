"""Reformer: R rounds sort the tokens by hash; a chunk of s tokens attends to itself and the one before."""

from __future__ import annotations

from ecoformer.accounting.counts import Counts, mac
from ecoformer.accounting.mechanisms.parts import Heads, around, copy, floats, product, softmax
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import ReformerAttention

_INDEX = 8
"""Bytes of a token's number."""


@register_formula("reformer")
def reformer(layer: ReformerAttention, batch: int, tokens: int) -> Counts:
    """Tokens are padded to whole pairs of chunks; from there on padding costs what tokens cost."""
    h = Heads.of(layer, batch, tokens)
    pair = 2 * layer.bucket_size
    padded = Heads(batch, h.heads, -(-tokens // pair) * pair, h.channels)
    return (
        around(layer, h, padded.tokens)
        + _prepare(h, padded)
        + _order(padded, layer)
        + _gather(padded, layer.rounds)
        + _attend(padded, layer.rounds, layer.bucket_size)
        + _merge(padded, layer.rounds)
    )


def _prepare(h: Heads, padded: Heads) -> Counts:
    """Padding is removed from tokens and values; both and the mask are padded."""
    n, flags = h.numbers, h.batch * h.tokens
    each = Counts(compare=n, bytes=floats(n, n) + flags + floats(n, padded.numbers))
    return Counts(bytes=flags) + each * 2 + Counts(bytes=flags + padded.batch * padded.tokens)


def _order(p: Heads, layer: ReformerAttention) -> Counts:
    """Hashes (the largest of a rotation and its negative) of every round, and their sort."""
    rounds = layer.rounds
    half = min(p.tokens // layer.bucket_size, layer.max_buckets) // 2
    rotations, rotated, hashes = p.channels * rounds * half, p.rows * rounds * half, p.rows * rounds
    # The part of the rotations that is used is copied, unless it is all of them or of one stride.
    cut = rounds > 1 and 1 < half < layer.max_buckets // 2
    rotate = copy(rotations, cut) + product(p.numbers, rotations, rotated, p.channels)
    if p.channels == 1:  # nothing to sum over: einsum multiplies in place
        rotate = Counts(mul=rotated, bytes=floats(p.numbers, rotations, rotated))
    both = copy(rotated) + copy(2 * rotated)
    largest = Counts(compare=2 * rotated, bytes=floats(2 * rotated) + _INDEX * hashes)
    last = Counts(compare=hashes, bytes=2 * _INDEX * hashes + p.batch * p.tokens)
    return rotate + both + largest + last + _sort(hashes, p.tokens)


def _sort(numbers: int, length: int) -> Counts:
    """Sorted numbers and where each came from."""
    return Counts(compare=numbers * (length - 1).bit_length(), bytes=3 * _INDEX * numbers)


def _gather(p: Heads, rounds: int) -> Counts:
    """Tokens, values and padding in sorted order; keys are unit tokens; every chunk gets the one before.

    The chunk before is made by a roll and a concatenation, of keys, values, flags and token numbers.
    """
    n, t = p.numbers * rounds, p.rows * rounds
    taken = take(n, t) * 2 + Counts(lookup=t, bytes=2 * t + _INDEX * t)
    norms = Counts(mul=n, add=n, exp=t, compare=t, bytes=floats(n, t) + floats(t, t))
    keys = norms + Counts(mul=n, bytes=floats(n, t, n))
    before = (copy(n) + copy(2 * n)) * 2 + Counts(bytes=(1 + _INDEX) * (2 * t + 4 * t))
    return taken + keys + before


def take(numbers: int, rows: int) -> Counts:
    """fp32 numbers by the numbers of their rows."""
    return Counts(lookup=numbers, bytes=floats(numbers, numbers) + _INDEX * rows)


def _attend(p: Heads, rounds: int, size: int) -> Counts:
    """Softmax over two chunks; a token's own key has a fixed logit, padding has none."""
    n, t = p.numbers * rounds, p.rows * rounds
    pairs = t * 2 * size
    scores = product(n, 2 * n, pairs, p.channels) + Counts(mul=pairs) + copy(pairs)
    itself = Counts(compare=2 * pairs, bytes=_INDEX * 3 * t + pairs + floats(pairs, pairs) + pairs)
    padding = Counts(compare=pairs, bytes=floats(pairs, pairs) + 2 * t) * 2
    mass = Counts(compare=pairs, add=2 * pairs + t, exp=pairs + t, bytes=floats(pairs, t))
    values = mac(pairs * p.channels) + Counts(bytes=floats(pairs, 2 * n, n))
    return scores + itself + padding + mass + softmax(pairs) + values


def _merge(p: Heads, rounds: int) -> Counts:
    """Outputs go back to their tokens, and rounds are averaged by softmax of their mass."""
    n, t = p.numbers * rounds, p.rows * rounds
    back = _sort(t, p.tokens) + take(n, t) + take(t, t)
    weighted = Counts(mul=n, bytes=floats(n, t, n))
    return back + softmax(t) + weighted + Counts(add=n, bytes=floats(n, p.numbers))
