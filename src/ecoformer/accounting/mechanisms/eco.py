"""EcoFormer: hash functions with b bits, m support samples where they have a kernel, and linear sums."""

from __future__ import annotations

from typing import Any

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms.parts import Heads, around, copy, floats, product, unit_length
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import HashedAttention
from ecoformer.hashing import KernelHasher, LshHasher, SignHasher


@register_formula("eco", "klsh_eco", "lsh_eco", "bi_eco")
def eco(layer: HashedAttention, batch: int, tokens: int) -> Counts:
    """Codes of the shared queries and keys, the sums over keys, and the read."""
    h = Heads.of(layer, batch, tokens)
    bits = layer.hasher.bits
    codes = hashing(layer.hasher, h) + signs(h.rows * bits)
    # Bits that are channels themselves lie in memory as the projection left them.
    channels = isinstance(layer.hasher, SignHasher) and layer.hasher.features == "channels"
    copies = copy(h.rows * bits, channels and h.interleaved) * 2
    attention = sums(h, bits) + read(h, bits, own_value=layer.bias == "official")
    return around(layer, h, tokens) + codes + copies + attention


def hashing(hasher: Any, h: Heads) -> Counts:
    """What a hasher computes before it takes signs."""
    if isinstance(hasher, KernelHasher):
        return kernel(h, hasher.bits, hasher.support, hasher.sigma_from == "input")
    if isinstance(hasher, LshHasher):
        return unit_length(h.rows, h.channels) + _planes(h, hasher.bits)
    if isinstance(hasher, SignHasher) and hasher.features == "channels":
        return Counts()
    if isinstance(hasher, SignHasher):
        tb = h.rows * hasher.bits
        phases = Counts(add=tb, bytes=floats(tb, h.heads * hasher.bits, tb))
        waves = Counts(exp=tb, mul=tb) + copy(2 * tb)
        return unit_length(h.rows, h.channels) + _planes(h, hasher.bits) + phases + waves
    raise ValueError(f"no formula is known for {type(hasher).__name__}")


def _planes(h: Heads, bits: int) -> Counts:
    """Products with b vectors of each head."""
    return copy(h.numbers, h.interleaved) + shared_product(h, h.rows, h.channels, bits)


def shared_product(h: Heads, rows: int, length: int, columns: int) -> Counts:
    """A product with one matrix a head, which PyTorch first repeats for every sample."""
    own, all_samples = h.heads * length * columns, h.groups * length * columns
    repeated = Counts(bytes=floats(own, all_samples)) if h.repeats else Counts()
    return repeated + product(rows * length, all_samples if h.repeats else own, rows * columns, length)


def kernel(h: Heads, bits: int, m: int, width_of_input: bool) -> Counts:
    """exp(-|x - s|^2 / (2 sigma)) of unit tokens and m support samples, centred and mixed to b bits.

    The distance is |x|^2 + |s|^2 - 2 x s, so the m C products of a token are here.
    """
    t, n, tm, hm = h.rows, h.numbers, h.rows * m, h.heads * m
    samples = hm * h.channels
    squares = Counts(mul=n, add=n, bytes=floats(n, n) + floats(n, t))
    squares += Counts(mul=samples, add=samples, bytes=floats(samples, samples) + floats(samples, hm))
    outer = Counts(add=tm, bytes=floats(t, hm, tm))
    doubled = Counts(mul=n) + copy(n) + copy(n, h.interleaved)
    products = shared_product(h, t, h.channels, m)
    difference = Counts(add=tm, compare=tm, bytes=floats(tm, tm, tm) + floats(tm, tm))
    widths = h.groups if width_of_input else h.heads
    exponent = Counts(mul=widths + tm, bytes=floats(tm, tm) + floats(widths, widths) + floats(tm, widths, tm))
    centred = Counts(exp=tm, add=tm, bytes=floats(tm, tm) + floats(tm, hm, tm))
    total = squares + outer + doubled + products + difference + exponent + centred
    if width_of_input:
        total += _width(h, m)
    return unit_length(t, h.channels) + total + shared_product(h, t, m, bits)


def _width(h: Heads, m: int) -> Counts:
    """The mean distance of a sample, over tokens and then over support samples, and its guard."""
    tm, gm, g = h.rows * m, h.groups * m, h.groups
    means = Counts(add=tm + gm, mul=gm + g, bytes=floats(tm, gm) + floats(gm, g))
    return means + Counts(compare=2 * g, bytes=5 * g + 9 * g)


def signs(numbers: int) -> Counts:
    """Three comparisons with zero and three choices: NaN stays NaN, and the sign of zero is chosen."""
    return Counts(compare=6 * numbers, bytes=3 * 5 * numbers + 3 * 9 * numbers)


def sums(h: Heads, bits: int) -> Counts:
    """The state: sums of h v, of h, of v, and the number of keys, joined to one (b + 1) x (C + 1) matrix."""
    g, c, tb = h.groups, h.channels, h.rows * bits
    context = copy(h.numbers, h.interleaved) + product(tb, h.numbers, g * bits * c, h.tokens)
    of_codes = Counts(add=tb, bytes=floats(tb, g * bits))
    of_values = Counts(add=h.numbers, bytes=floats(h.numbers, g * c))
    joined = copy(g * bits * (c + 1)) + copy(g * (c + 1)) + copy(g * (bits + 1) * (c + 1))
    return Counts(bytes=floats(g)) + context + of_codes + of_values + joined


def read(h: Heads, bits: int, own_value: bool) -> Counts:
    """Codes times the state, plus the bias times its last row (or the token's own value), divided."""
    g, t, c = h.groups, h.rows, h.channels
    out = t * (c + 1)
    products = product(t * bits, g * bits * (c + 1), out, bits)
    row = out if own_value else g * (c + 1)
    bias = Counts(mul=row, add=out, bytes=floats(row, row) + floats(out, row, out))
    if own_value:
        seen = Counts(compare=g + h.numbers, bytes=5 * g + g + floats(h.numbers, h.numbers))
        bias += seen + Counts(bytes=floats(h.numbers, g, out))
    nonzero = Counts(compare=g + t, bytes=5 * g + g + floats(t, t))
    return products + bias + nonzero + Counts(mul=h.numbers, bytes=floats(h.numbers, t, h.numbers))
