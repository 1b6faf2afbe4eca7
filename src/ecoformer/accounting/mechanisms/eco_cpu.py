"""EcoFormer on the CPU's fused kernels: what they execute, padding of rows included.

Additions of integers count as additions; a token's offsets and a head's few constants are not counted, as
elsewhere. Buckets and tables are look-ups of rows: one an element, and one addition, but for the first of two
rows that a query reads. Bytes are those of tokens, values, output and hash functions: all else stays in the
cache. Keys that are padding count like others.
"""

from __future__ import annotations

from ecoformer.accounting.counts import Counts, mac
from ecoformer.accounting.mechanisms.parts import Heads, around, floats
from ecoformer.accounting.unfitted import taken_for_fitted
from ecoformer.attention import HashedAttention
from ecoformer.backends.cpu.problem import STRETCH, digit_of, digits, padded
from ecoformer.hashing import KernelHasher, LshHasher
from ecoformer.hashing.kernel import MAX_BITS


def eco_on_cpu(layer: HashedAttention, batch: int, tokens: int) -> Counts:
    """A layer's forward pass where the "cpu" backend computes its attention, in one thread."""
    why = refusal(layer)
    if why is not None:
        raise ValueError(f"the CPU kernels do not compute this layer: {why}")
    h = Heads.of(layer, batch, tokens)
    return around(layer, h, None) + operator(
        h, layer.hasher.bits, samples_of(layer), own_value=layer.bias == "official"
    )


def refusal(layer: HashedAttention) -> str | None:
    """Why the "cpu" backend does not compute this layer's attention; None where it does."""
    hasher = layer.hasher
    if type(layer).attend is not HashedAttention.attend:
        return f"{type(layer).__name__} attends in its own way"
    if not isinstance(hasher, (KernelHasher, LshHasher)):
        return f"the kernels do not know {type(hasher).__name__}"
    if not hasher.token_wise:
        return 'sigma="input"'
    if hasher.bits > MAX_BITS:
        return f"more than {MAX_BITS} bits"
    with taken_for_fitted([hasher]):
        known = hasher.functions() is not None
    return None if known else "its hash functions have hooks, or a sign or a gradient of their own"


def samples_of(layer: HashedAttention) -> int:
    """m, or 0 for plain hyperplanes."""
    return layer.hasher.support if isinstance(layer.hasher, KernelHasher) else 0


def operator(h: Heads, bits: int, samples: int, *, own_value: bool = False) -> Counts:
    """From tokens to output; `samples` is m, or 0 for plain hyperplanes; `own_value` as in the fused call."""
    digit = digit_of(bits, h.channels, h.tokens)
    of_codes = hashing(h, bits, samples)
    passes = 4 if own_value else 3  # values are read twice
    functions = h.heads * _numbers_of_functions(h.channels, bits, samples)
    moved = Counts(bytes=floats(passes * h.numbers, functions))
    written = tables(h, bits, digit, own_value=own_value) + read(h, bits, digit, own_value=own_value)
    return of_codes + sums(h, bits, digit) + written + moved


def _numbers_of_functions(dim: int, bits: int, samples: int) -> int:
    return samples * (dim + 1 + bits) + 1 if samples else dim * bits


def hashing(h: Heads, bits: int, samples: int) -> Counts:
    """Lengths, products with support samples, the kernel by a polynomial, products with A, signs."""
    dim, wide_m, wide_b = h.channels, padded(samples), padded(bits)
    length = Counts(mul=dim, add=dim + 16)
    signs = Counts(compare=2 * wide_b)
    if not samples:
        return (length + mac(dim * wide_b) + signs) * h.rows
    root = Counts(exp=1, mul=1)
    kernel = Counts(mul=11, add=14, compare=4, shift=1) * wide_m
    token = length + root + mac(dim * wide_m) + kernel + mac(samples * wide_b) + signs
    once = (length + Counts(mul=2)) * samples
    return token * h.rows + once * h.heads


def sums(h: Heads, bits: int, digit: int) -> Counts:
    """A bucket a digit for every token, and the folding of the buckets."""
    wide = padded(h.channels)
    token = Counts(lookup=h.channels, add=h.channels + 1) * digits(bits, digit)
    fold = Counts(add=wide + 1)
    for width in _widths(bits, digit):
        fold += Counts(add=3 * wide + 3) * ((1 << width) - 1)
    return token * h.rows + fold * (h.groups * -(-h.tokens // STRETCH))


def tables(h: Heads, bits: int, digit: int, *, own_value: bool = False) -> Counts:
    """A row for every value of every digit, and the bias on those of the first, unless it is the queries'."""
    wide, widths = padded(h.channels), _widths(bits, digit)
    total = Counts(mul=1) if own_value else Counts(mul=1) + mac(wide) * (1 << widths[0])
    for width in widths:
        first = (mac(wide) + Counts(add=1)) * width
        total += first + (mac(wide) + mac(1)) * ((1 << width) - 1)
    return total * h.groups


def read(h: Heads, bits: int, digit: int, *, own_value: bool = False) -> Counts:
    """A row a digit for every token, its own value where that is the bias, and the division."""
    number = digits(bits, digit)
    own = mac(h.channels) + Counts(lookup=h.channels, add=h.channels) if own_value else Counts()
    added = 1 if number == 2 and not own_value else number
    rows = Counts(lookup=h.channels) * number + Counts(add=h.channels + 1) * added
    return (rows + own + Counts(mul=h.channels)) * h.rows


def _widths(bits: int, digit: int) -> list[int]:
    """Bits of each digit: the last may have fewer."""
    return [min(digit, bits - start) for start in range(0, bits, digit)]
