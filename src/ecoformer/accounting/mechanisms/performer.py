"""Performer, and EcoFormer without binarisation: linear attention over F random features."""

from __future__ import annotations

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms.parts import Heads, around, copy, floats, product, unit_length
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import PerformerAttention


@register_formula("performer")
def performer(layer: PerformerAttention, batch: int, tokens: int) -> Counts:
    """Features of queries and keys, the keys' context, its read, and the division."""
    h = Heads.of(layer, batch, tokens)
    return around(layer, h, tokens) + _attend(h, layer.features)


@register_formula("fp_eco")
def fp_eco(layer: PerformerAttention, batch: int, tokens: int) -> Counts:
    """As the Performer, on unit tokens that are scaled by the temperature."""
    h = Heads.of(layer, batch, tokens)
    unit = unit_length(h.rows, h.channels) + Counts(mul=h.numbers) + copy(h.numbers)
    return around(layer, h, tokens) + unit + _attend(h, layer.features)


def _attend(h: Heads, f: int) -> Counts:
    groups, t, out, context = h.groups, h.rows, h.rows * (h.channels + 1), h.groups * f * (h.channels + 1)
    guard = Counts(compare=2 * groups, bytes=5 * groups + 9 * groups)  # a sample of nothing but padding
    ones = Counts(bytes=floats(t) + floats(out, out))  # a column of ones beside the values
    sums = product(t * f, out, context, h.tokens) + product(t * f, context, out, f)
    nonzero = Counts(compare=2 * t, bytes=5 * t + 9 * t)
    division = Counts(mul=h.numbers, bytes=floats(h.numbers, t, h.numbers))
    return _features(h, f, t) + _features(h, f, groups) + guard + ones + sums + nonzero + division


def _features(h: Heads, f: int, maxima: int) -> Counts:
    """exp(w x - |x|^2 / 2 - maximum) + floor; the maximum is of a query, or of all keys of a head."""
    n, t, tf = h.numbers, h.rows, h.rows * f
    scaling = Counts(mul=n) + copy(n)
    products = copy(n, h.interleaved) + product(n, h.channels * f, tf, h.channels)
    half = Counts(mul=n + t, add=n, bytes=floats(n, n) + floats(n, t) + floats(t, t))
    highest = Counts(compare=tf, bytes=floats(tf, maxima))
    differences = Counts(add=2 * tf, bytes=floats(tf, t, tf) + floats(tf, maxima, tf))
    return scaling + products + half + highest + differences + Counts(exp=tf, add=tf) + copy(2 * tf)
