# mypy: ignore-errors
"""Features of a code, and the affinity of groups of bits: see `ecoformer.affinity`.

SIZE is the number of bits of a group. 0 stands for the paper's affinity, whose F features are the bits
themselves as ±1. Otherwise each of the 2^SIZE values of every group has a feature: 1 for the value in the
code, 0 for the others. The F rows of a state are then *buckets*, and queries read the *table*: the buckets
mixed by scale * ratio^(number of differing bits). Mixing stays within a group, thus within BS rows.
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
    reciprocal,
    unpack,
)
from ecoformer.backends.triton.state import state_size

MIX, WALSH, SLOPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def ramp(x, offset, HALF: tl.constexpr):
    """max(x / 2 + offset, 0) in bf16, or in fp16 if HALF, where offset is of that dtype: exact features."""
    if INTERPRETED:
        result = tl.maximum(x * 0.5 + offset.to(tl.float32), 0.0).to(tl.float16 if HALF else tl.bfloat16)
    elif HALF:
        result = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            mov.b32 b, 0x38003800;
            cvt.rn.f16x2.f32 a, $2, $1;
            fma.rn.relu.f16x2 $0, a, b, $3; }""",
            "=r,f,f,r", [x, offset], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        result = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            mov.b32 b, 0x3f003f00;
            cvt.rn.bf16x2.f32 a, $2, $1;
            fma.rn.relu.bf16x2 $0, a, b, $3; }""",
            "=r,f,f,r", [x, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
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
        return h
    else:
        offset = tl.full((1, 1), 1.0 - 0.5 * SIZE, tl.float32).to(tl.bfloat16)
        return ramp(plain_dot(h, patterns(SIZE, F, BITS, BF, BB), "ieee"), offset, False)


@triton.jit
def turned_features(
    h, HALF: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    factors=None,
):  # fmt: skip
    """The same (BF, BLOCK) for groups of bits, in fp16 if HALF. WIDE: see `tall_product`.

    With `factors` (BLOCK,) features are multiplied by these, which are not negative. They and SIZE times
    them must be exact in bf16, so SIZE is 1, 2 or 4.
    """
    if factors is None:
        offset = tl.full((1, 1), 1.0 - 0.5 * SIZE, tl.float32).to(tl.float16 if HALF else tl.bfloat16)
    else:
        offset = ((1.0 - 0.5 * SIZE) * factors).to(tl.bfloat16)[None, :]
        if INTERPRETED:  # which has no bf16 arithmetic
            h = (h.to(tl.float32) * factors[:, None]).to(tl.bfloat16)
        else:
            h = h * factors.to(tl.bfloat16)[:, None]
    turned = tl.trans(patterns(SIZE, F, BITS, BF, BB))
    return ramp(tall_product(turned, tl.trans(h), 1, "ieee", WIDE), offset, HALF)


@triton.jit
def add_multiples(
    h, factors, b, column, sums, columns,
    PIECES: tl.constexpr, COLUMN_PIECES: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Sums of features times `factors` times b (BLOCK, BE) in bf16, and the same with `column` (BLOCK,).

    Factors are not negative, and go in with the features as one or two PIECES, bf16 numbers. See `tall_sums`
    for columns.
    """
    high = factors.to(tl.bfloat16).to(tl.float32)
    if PIECES == 2:  # cut, so that the rest is not negative
        high = (factors.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    turned = turned_features(h, False, WIDE, SIZE, F, BITS, BF, BB, high)
    sums = tall_product(turned, b, 1, "ieee", WIDE, sums)
    columns = tall_sums(turned, column, COLUMN_PIECES, "ieee", WIDE, columns)
    if PIECES == 2:
        rest = ((factors - high) * reciprocal(tl.where(high == 0, 1.0, high)))[None, :]
        if INTERPRETED:
            turned = (turned.to(tl.float32) * rest).to(tl.bfloat16)
        else:
            turned = turned * rest.to(tl.bfloat16)
        sums = tall_product(turned, b, 1, "ieee", WIDE, sums)
        columns = tall_sums(turned, column, 1, "ieee", WIDE, columns)
    return sums, columns


@triton.jit
def load_features(
    codes, start, n,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stored codes of a tile as ±1 in bf16, and their features."""
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
    with the sign that `to_bits` expects: reversed for two or three bits, and for six or seven.
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
def load_block(
    base, parts, first, column, SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BS rows and COLUMNS columns of a state, and the rows' ones (BS,), added up over `parts` states.

    PARTS states are loaded at a time.
    """
    rows, columns = first + tl.arange(0, BS), column + tl.arange(0, COLUMNS)
    places = rows[:, None] * E + columns[None, :]
    inside = (rows < F)[:, None] & (columns < E)[None, :]
    if PARTS == 1:
        sums = tl.load(base + places, mask=inside, other=0.0)
        ones = tl.load(base + F * E + rows, mask=rows < F, other=0.0)
    else:
        sums, ones = tl.zeros((BS, COLUMNS), tl.float32), tl.zeros((BS,), tl.float32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)
            exists = part < parts
            offsets = part * state_size(SIZE, E, F)
            found = tl.load(
                base + offsets[:, None, None] + places[None, :, :],
                mask=exists[:, None, None] & inside[None, :, :],
                other=0.0,
            )
            sums += tl.sum(found, axis=0)
            found = tl.load(
                base + offsets[:, None] + (F * E + rows)[None, :],
                mask=exists[:, None] & (rows < F)[None, :],
                other=0.0,
            )
            ones += tl.sum(found, axis=0)
    return sums, ones


@triton.jit
def store_block(
    base, sums, ones, first, column, E: tl.constexpr, F: tl.constexpr, BS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store BS rows and COLUMNS columns of a state; the ones with the first columns."""
    rows, columns = first + tl.arange(0, BS), column + tl.arange(0, COLUMNS)
    inside = (rows < F)[:, None] & (columns < E)[None, :]
    tl.store(base + rows[:, None] * E + columns[None, :], sums, mask=inside)
    tl.store(base + F * E + rows, ones, mask=(rows < F) & (column == 0))


@triton.jit
def apply(matrix, sums, ones):
    """A matrix (BS, BS) times rows (BS, COLUMNS) of a state and their ones (BS,)."""
    PRECISION: tl.constexpr = "ieee" if matrix.shape[0] > 16 else "tf32x3"
    return dot(matrix, sums, PRECISION), tl.sum(matrix * ones[None, :], axis=1)


@triton.jit
def mix_block(
    partial, parts, keep, table, walsh, other, other_walsh, to_levels, scales, ratios, head, first, column,
    KEEP: tl.constexpr, WALSHED: tl.constexpr, LEVELS: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up `parts` states and mix BS rows and COLUMNS columns of the sum: see `mix_parts`."""
    # All loads come before all stores, because the compiler does not move them past each other.
    sums, ones = load_block(partial, parts, first, column, SIZE, E, F, BS, COLUMNS, PARTS)
    matrix = mixing(scales, ratios, head, first, MIX, SIZE, F, BS)
    if WALSHED or LEVELS:
        others, other_ones = load_block(other, 1, first, column, SIZE, E, F, BS, COLUMNS, 1)
    if WALSHED:
        transform = mixing(scales, ratios, head, first, WALSH, SIZE, F, BS)
        above, below = apply(transform, sums, ones)
        other_above, other_below = apply(transform, others, other_ones)
    if LEVELS:
        slope = mixing(scales, ratios, head, first, SLOPE, SIZE, F, BS)
        by_scale, by_scale_ones = apply(matrix, others, other_ones)
        by_ratio, by_ratio_ones = apply(slope, others, other_ones)
        to_scale = tl.sum(sums * by_scale, axis=1) + tl.where(column == 0, ones * by_scale_ones, 0.0)
        to_ratio = tl.sum(sums * by_ratio, axis=1) + tl.where(column == 0, ones * by_ratio_ones, 0.0)
    mixed, mixed_ones = apply(matrix, sums, ones)
    store_block(table, mixed, mixed_ones, first, column, E, F, BS, COLUMNS)
    if KEEP:
        store_block(keep, sums, ones, first, column, E, F, BS, COLUMNS)
    if WALSHED:
        store_block(walsh, above, below, first, column, E, F, BS, COLUMNS)
        store_block(other_walsh, other_above, other_below, first, column, E, F, BS, COLUMNS)
    if LEVELS:
        rows = first + tl.arange(0, BS)
        tl.store(to_levels + rows, to_scale, mask=rows < F)
        tl.store(to_levels + F + rows, to_ratio, mask=rows < F)


@triton.jit
def mix_all(
    partial, table, walsh, other, other_walsh, to_levels, scales, ratios, head,
    WALSHED: tl.constexpr, LEVELS: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """`mix_parts` for one state by one program."""
    BS: tl.constexpr = 16 if SIZE < 4 else 1 << SIZE
    for first in range(0, F, BS):
        mix_block(
            partial, 1, partial, table, walsh, other, other_walsh, to_levels, scales, ratios, head, first, 0,
            False, WALSHED, LEVELS, SIZE, E, F, BS, BE, 1,
        )  # fmt: skip


@launched
def mix_parts(
    partial, keep, table, walsh, other, other_walsh, to_levels, scales, ratios, heads, parts,
    KEEP: tl.constexpr, WALSHED: tl.constexpr, LEVELS: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up `parts` states and mix the sum: one program for BS rows and COLUMNS columns of a head.

    KEEP stores the sum. WALSHED stores coefficients of products of bits for `to_bits`, of the sum and of the
    state `other`. LEVELS stores terms of the gradients of scale and ratio, (2, F) for each COLUMNS columns:
    then the sum is the table's gradient, and `other` the buckets.
    """
    stretches = tl.cdiv(E, COLUMNS)
    blocks = tl.cdiv(F, BS)
    row = (tl.program_id(0) // (stretches * blocks)).to(tl.int64)
    first = tl.program_id(0) // stretches % blocks * BS
    stretch = tl.program_id(0) % stretches
    place = row * state_size(SIZE, E, F)
    mix_block(
        partial + place * parts, parts, keep + place, table + place, walsh + place,
        other + place, other_walsh + place, to_levels + (row * stretches + stretch) * (2 * F),
        scales, ratios, row % heads, first, stretch * COLUMNS,
        KEEP, WALSHED, LEVELS, SIZE, E, F, BS, COLUMNS, PARTS,
    )  # fmt: skip


@launched
def sum_levels(
    terms, scales, to_scale, to_ratio, heads, parts, stretches,
    SIZE: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Gradients of scale and ratio (H, G) from their terms (parts / stretches, heads, stretches, 2, F).

    One program for each head and group.
    """
    groups: tl.constexpr = F >> SIZE
    head, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    feature = tl.arange(0, BS)
    exists = feature < (1 << SIZE)
    first, second = tl.zeros((ROWS, BS), tl.float64), tl.zeros((ROWS, BS), tl.float64)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        found = (part < parts)[:, None] & exists[None, :]
        row = ((part // stretches).to(tl.int64) * heads + head) * stretches + part % stretches
        places = terms + row[:, None] * (2 * F)
        places += (group << SIZE) + feature[None, :]
        first += tl.load(places, mask=found, other=0.0)
        second += tl.load(places + F, mask=found, other=0.0)
    place = head * groups + group
    total = tl.sum(tl.sum(first, axis=1), axis=0) / tl.load(scales + place)
    tl.store(to_scale + place, total.to(tl.float32))
    tl.store(to_ratio + place, tl.sum(tl.sum(second, axis=1), axis=0).to(tl.float32))


@triton.jit
def smallest(base, floor, head, SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """The smallest denominator of a head, and the sum of its keys' weights, from buckets.

    Every key is in one bucket of the first group.
    """
    count = tl.sum(tl.load(base + F * E + tl.arange(0, 1 << SIZE)), axis=0)
    return tl.load(floor + head) * count, count


@triton.jit
def signed_pairs(x, counts):
    """x in bf16, negative where bit 7 of `counts` is set."""
    if INTERPRETED:
        sign = (counts.to(tl.int32, bitcast=True) << 24) & -2147483648
        result = (x.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        result = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            cvt.rn.bf16x2.f32 a, $2, $1;
            prmt.b32 b, $3, $4, 0x4400;
            lop3.b32 $0, a, b, 0x80008000, 0x78; }""",
            "=r,f,f,f,f", [x, counts], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return result


@triton.jit
def to_bits(
    to_features, h, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Gradient of the bits (BLOCK, BB): half the difference between a bit's two values.

    `to_features` are coefficients of products of bits, as `mixing` of KIND WALSH makes them. The derivative
    by a bit is the sum of the terms that contain it, times the bit.
    """
    members = tl.where(patterns(SIZE, F, BITS, BF, BB).to(tl.float32) > 0, 1.0, 0.0).to(tl.bfloat16)
    # The product of a subset's bits is negative where an odd number of them is -1. The second bit of their
    # sum tells, up to a sign that `mixing` has put into the coefficients. Added to 1.5 * 2^17 that is bit 7
    # of the fp32 number.
    counts = plain_dot(h, members, "ieee", tl.full(to_features.shape, 196608.0, tl.float32))
    if PIECES == 1:
        terms = signed_pairs(to_features, counts)
    else:
        sign = (counts.to(tl.int32, bitcast=True) << 24) & -2147483648
        terms = (to_features.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return product(terms, tl.trans(members), PIECES, PRECISION) * h.to(tl.float32)
