# mypy: ignore-errors
"""Features of a code, and the affinity of groups of bits: see `ecoformer.affinity`.

SIZE is the number of bits of a group. 0 stands for the paper's affinity, whose F features are the bits
themselves as ±1. Otherwise there is a feature for each of the 2^SIZE values of every group: 1 for the value
that a code has, 0 for the others. A state then has F rows, the *buckets*, and queries read the *table*, the
buckets mixed by scale * ratio^(number of differing bits).

BF is F rounded up to a power of two of at least 16. Mixing stays within a group, thus within BS rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import (
    INTERPRETED,
    NARROWEST,
    dot,
    launched,
    load_packed,
    plain_dot,
    product,
    unpack,
)

MIX, WALSH, SLOPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def positive_part(x, HALF: tl.constexpr):
    """max(x, 0) in bf16, or in fp16 if HALF: one instruction for two numbers."""
    if INTERPRETED:
        result = tl.maximum(x, 0.0).to(tl.float16 if HALF else tl.bfloat16)
    elif HALF:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return result


@triton.jit
def patterns(SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr):
    """The bits ±1 of each feature's value (BB, BF) in bf16, zero for the bits of other groups."""
    bit, feature = tl.arange(0, BB)[:, None], tl.arange(0, BF)[None, :]
    own = (bit // SIZE == feature // (1 << SIZE)) & (bit < BITS) & (feature < F)
    signs = tl.where((feature >> (bit % SIZE)) & 1 != 0, 1.0, -1.0)
    return tl.where(own, signs, 0.0).to(tl.bfloat16)


@triton.jit
def features_of(
    h, SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr
):
    """Features (BLOCK, BF) of codes ±1 (BLOCK, BB), both in bf16.

    A product counts the bits of a group that agree with a value, less those that do not: SIZE if all do.
    """
    if SIZE == 0:
        features = h
    else:
        missing = tl.full((h.shape[0], BF), 1.0 - SIZE, tl.float32)
        features = positive_part(plain_dot(h, patterns(SIZE, F, BITS, BF, BB), "ieee", missing), False)
    return features


@triton.jit
def turned_features(
    h, HALF: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """The same (BF, BLOCK) for groups of bits, in fp16 if HALF. WIDE: see `tall_product`."""
    missing = tl.full((BF, h.shape[0]), 1.0 - SIZE, tl.float32)
    turned = tl.trans(patterns(SIZE, F, BITS, BF, BB))
    return positive_part(tall_product(turned, tl.trans(h), 1, "ieee", WIDE, missing), HALF)


@triton.jit
def turned_multiples(
    h, factors, WIDE: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """The same in bf16, times `factors` (BLOCK,), which are exact in bf16 and not negative."""
    missing = tl.broadcast_to(((1.0 - SIZE) * factors)[None, :], (BF, h.shape[0]))
    turned = tl.trans(patterns(SIZE, F, BITS, BF, BB))
    multiples = (h.to(tl.float32) * factors[:, None]).to(tl.bfloat16)
    return positive_part(tall_product(turned, tl.trans(multiples), 1, "ieee", WIDE, missing), False)


@triton.jit
def load_features(
    codes, start, n,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of a tile as ±1 in bf16, and their features."""
    h = unpack(load_packed(codes, start, n, BLOCK), BITS, BB)
    return h, features_of(h, SIZE, F, BITS, BF, BB)


@triton.jit
def tall_product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, onto=None):
    """`a` (BF, BLOCK) in bf16 or fp16, times `b` of any dtype, plus `onto`.

    WIDE: by four warps or more, where 64 rows would become a `wgmma`, see `configs`; they go in groups of 32.
    """
    if WIDE and a.shape[0] >= 64:
        stacks: tl.constexpr = a.shape[0] // 32
        stacked = tl.reshape(a, (stacks, 32, a.shape[1]))
        repeated = tl.broadcast_to(b[None, :, :], (stacks, b.shape[0], b.shape[1]))
        result = tl.reshape(product(stacked, repeated, PIECES, PRECISION), (a.shape[0], b.shape[1]))
        if onto is not None:
            result += onto
    else:
        result = product(a, b, PIECES, PRECISION, onto)
    return result


@triton.jit
def tall_sums(a, weights, PIECES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, onto=None):
    """`a` (BF, BLOCK) times weights (BLOCK,), plus `onto`: NARROWEST equal columns, see `column_of`."""
    columns = tl.broadcast_to(weights[:, None], (weights.shape[0], NARROWEST))
    return tall_product(a, columns, PIECES, PRECISION, WIDE, onto)


@triton.jit
def column_of(columns):
    """The column (BF,) of which there are NARROWEST equal ones."""
    return tl.sum(columns, axis=1) * (1.0 / NARROWEST)


@triton.jit
def mixing(
    scales, ratios, head, first, KIND: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr, BS: tl.constexpr
):
    """scale * ratio^(differing bits) for pairs of a group's values, rows first ... first + BS: (BS, BS).

    KIND WALSH: row S gives the coefficient of the product of the bits in S instead of what the value S reads,
    with the sign that `to_bits` expects: turned around for two or three bits, and for six or seven.
    KIND SLOPE: the derivative by ratio.
    """
    row = first + tl.arange(0, BS)
    group = row // (1 << SIZE)
    place = head * (F >> SIZE) + group
    scale = tl.load(scales + place, mask=row < F, other=0.0)[:, None]
    ratio = tl.load(ratios + place, mask=row < F, other=0.0)[:, None]
    rows, columns = row[:, None], row[None, :]
    matrix = tl.where(group[:, None] == columns // (1 << SIZE), scale, 0.0)
    slope = matrix * 0.0
    bits = tl.zeros_like(rows)
    for bit in tl.static_range(SIZE):
        if KIND == WALSH:
            bits += (rows >> bit) & 1
            even, odd = 0.5 + 0.5 * ratio, 0.5 - 0.5 * ratio
            signed = tl.where((columns >> bit) & 1 != 0, odd, -odd)
            matrix *= tl.where((rows >> bit) & 1 != 0, signed, even)
        else:
            differ = ((rows ^ columns) >> bit) & 1 != 0
            slope = tl.where(differ, slope * ratio + matrix, slope)
            matrix *= tl.where(differ, ratio, 1.0)
    if KIND == WALSH:
        matrix = tl.where(bits & 2 != 0, -matrix, matrix)
    if KIND == SLOPE:
        matrix = slope
    return matrix


@triton.jit
def mix_rows(
    partial, parts, state, mixed, walsh, scales, ratios, head, first, column,
    KEEP: tl.constexpr, MIXED: tl.constexpr, WALSHED: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up `parts` of rows first ... first + BS and COLUMNS columns of buckets, and mix them.

    Stores the sum if KEEP, what it gives mixed if MIXED, and coefficients of that if WALSHED.
    """
    rows, columns = first + tl.arange(0, BS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    inside, places = (rows < F) & (columns <= E), rows * (E + 1) + columns
    if PARTS == 1:
        total = tl.load(partial + places, mask=inside, other=0.0)
    else:
        total = tl.zeros((BS, COLUMNS), tl.float32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)[:, None, None]
            found = (part < parts) & inside[None, :, :]
            total += tl.sum(
                tl.load(partial + part * (F * (E + 1)) + places[None, :, :], mask=found, other=0.0), axis=0
            )
    if KEEP:
        tl.store(state + places, total, mask=inside)
    if MIXED:
        matrix = mixing(scales, ratios, head, first, MIX, SIZE, F, BS)
        tl.store(mixed + places, dot(matrix, total, "ieee"), mask=inside)
    if WALSHED:
        matrix = mixing(scales, ratios, head, first, WALSH, SIZE, F, BS)
        tl.store(walsh + places, dot(matrix, total, "ieee"), mask=inside)


@triton.jit
def mix_all(
    base, mixed, walsh, scales, ratios, head, MIXED: tl.constexpr, WALSHED: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Mix the buckets of a head, by one program."""
    BS: tl.constexpr = 16 if SIZE < 4 else 1 << SIZE
    for first in range(0, F, BS):
        for column in range(0, E + 1, 16):
            mix_rows(
                base, 1, base, mixed, walsh, scales, ratios, head, first, column,
                False, MIXED, WALSHED, SIZE, E, F, BS, 16, 1,
            )  # fmt: skip


@launched
def mix_parts(
    partial, state, mixed, walsh, other, other_walsh, scales, ratios, heads, parts,
    KEEP: tl.constexpr, WALSHED: tl.constexpr, OTHER: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program adds up and mixes BS rows and 16 columns of a head; OTHER: of `other` the coefficients."""
    stretches = tl.cdiv(E + 1, 16)
    blocks = tl.cdiv(F, BS)
    row = (tl.program_id(0) // (stretches * blocks)).to(tl.int64)
    first = tl.program_id(0) // stretches % blocks * BS
    column = tl.program_id(0) % stretches * 16
    place = row * (F * (E + 1))
    head = row % heads
    mix_rows(
        partial + place * parts, parts, state + place, mixed + place, walsh + place,
        scales, ratios, head, first, column, KEEP, True, WALSHED, SIZE, E, F, BS, 16, PARTS,
    )  # fmt: skip
    if OTHER:
        mix_rows(
            other + place, 1, other, other, other_walsh + place,
            scales, ratios, head, first, column, False, False, True, SIZE, E, F, BS, 16, 1,
        )  # fmt: skip


@triton.jit
def smallest(base, floor, head, SIZE: tl.constexpr, E: tl.constexpr):
    """The smallest denominator of a head, and the sum of its keys' weights, from buckets.

    Every key is in one bucket of the first group.
    """
    count = tl.sum(tl.load(base + tl.arange(0, 1 << SIZE) * (E + 1) + E), axis=0)
    return tl.load(floor + head) * count, count


@triton.jit
def to_bits(
    to_features, h, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Gradient of the bits (BLOCK, BB), half the difference between a bit's two values.

    `to_features` are coefficients of products of bits, as `mixing` of KIND WALSH makes them. The derivative
    by a bit is the sum of those terms that contain it, times the bit.
    """
    members = tl.where(patterns(SIZE, F, BITS, BF, BB).to(tl.float32) > 0, 1.0, 0.0)
    # The product of a subset's bits is negative where an odd number of them is -1. Their sum shows that by
    # its second bit, up to a sign that `mixing` has put into the coefficients. On top of 1.5 * 2^16 that is
    # bit 8 of the fp32 number.
    counts = tl.full(to_features.shape, 98304.0, tl.float32)
    counts = plain_dot(h, members.to(tl.bfloat16), "ieee", counts)
    sign = (counts.to(tl.int32, bitcast=True) << 23) & -2147483648
    terms = (to_features.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return product(terms, tl.trans(members.to(tl.bfloat16)), PIECES, PRECISION) * h.to(tl.float32)
