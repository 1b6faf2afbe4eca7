# mypy: ignore-errors
"""Features of a code, and the affinity of groups of bits: see `ecoformer.affinity`.

SIZE is the number of bits of a group. 0 stands for the paper's affinity, whose F features are the bits themselves
as ±1. Otherwise there is a feature for each of the 2^SIZE values of every group: 1 for the value that a
code has, 0 for the others. A state then has F rows, the *buckets*, and queries read the *table*, the
buckets mixed by scale * ratio^(number of differing bits).

BF is F rounded up to a power of two of at least 16. Mixing stays within a group, so matrices that mix are
kept as BF / BS blocks of BS x BS numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import INTERPRETED, NARROWEST, dot, plain_dot, product, unpack


@triton.jit
def digits(packed, SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, TURNED: tl.constexpr = False):
    """The value of each feature's group, (BLOCK, BF), or (BF, BLOCK) if TURNED."""
    shifts = tl.arange(0, BF) // (1 << SIZE) * SIZE
    if (F >> SIZE) * SIZE <= 32:
        wide = packed.to(tl.int32)
    else:
        wide = packed.to(tl.int64)
        shifts = shifts.to(tl.int64)
    if TURNED:
        values = wide[None, :] >> shifts[:, None]
    else:
        values = wide[:, None] >> shifts[None, :]
    return values.to(tl.int32) & ((1 << SIZE) - 1)


@triton.jit
def group_values(
    packed, SIZE: tl.constexpr, HOPPER: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    HALF: tl.constexpr = False, TURNED: tl.constexpr = False,
):  # fmt: skip
    """1 where a code has a feature's value, else 0, in bf16 (fp16 if HALF): (BLOCK, BF), turned (BF, BLOCK)."""
    column = tl.arange(0, BF)
    wanted = column & ((1 << SIZE) - 1)
    if F < BF:
        wanted = tl.where(column < F, wanted, 0x3FFF)
    found = digits(packed, SIZE, F, BF, TURNED)
    if TURNED:
        wanted = tl.broadcast_to(wanted[:, None], found.shape)
    else:
        wanted = tl.broadcast_to(wanted[None, :], found.shape)
    # One instruction compares two pairs of 16-bit numbers and gives two ones or zeros. The bit 14 makes normal
    # numbers of them.
    if INTERPRETED or not (HALF or HOPPER):
        ones = (found == wanted).to(tl.float32)
        ones = ones.to(tl.float16) if HALF else ones.to(tl.bfloat16)
    elif HALF:
        ones = tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r",
            [(found | 0x4000).to(tl.int16), (wanted | 0x4000).to(tl.int16)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        ones = tl.inline_asm_elementwise(
            "set.eq.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r",
            [(found | 0x4000).to(tl.int16), (wanted | 0x4000).to(tl.int16)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return ones


@triton.jit
def features_of(packed, SIZE: tl.constexpr, HOPPER: tl.constexpr, F: tl.constexpr, BF: tl.constexpr):
    """Features of packed codes (BLOCK, BF) in bf16."""
    if SIZE == 0:
        features = unpack(packed, F, BF)
    else:
        features = group_values(packed, SIZE, HOPPER, F, BF)
    return features


@triton.jit
def tall_product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """`a` (BF, BLOCK) in bf16 or fp16, times `b` of any dtype. WIDE: by four warps or more, where 64 rows would
    become a `wgmma`, see `configs`; they go in groups of 32."""
    if WIDE and a.shape[0] >= 64:
        stacks: tl.constexpr = a.shape[0] // 32
        stacked = tl.reshape(a, (stacks, 32, a.shape[1]))
        repeated = tl.broadcast_to(b[None, :, :], (stacks, b.shape[0], b.shape[1]))
        result = tl.reshape(product(stacked, repeated, PIECES, PRECISION), (a.shape[0], b.shape[1]))
    else:
        result = product(a, b, PIECES, PRECISION)
    return result


@triton.jit
def tall_sums(a, weights, PIECES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """`a` (BF, BLOCK) times weights (BLOCK,): NARROWEST equal columns, of which `column_of` makes one."""
    columns = tl.broadcast_to(weights[:, None], (weights.shape[0], NARROWEST))
    return tall_product(a, columns, PIECES, PRECISION, WIDE)


@triton.jit
def column_of(columns):
    """The column (BF,) of which there are NARROWEST equal ones."""
    return tl.sum(columns, axis=1) * (1.0 / NARROWEST)


MIX, WALSH, SLOPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def mixing(
    scales, ratios, head, KIND: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    BLOCKS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """scale * ratio^(differing bits) for pairs of a group's values: (BLOCKS, BS, BS).

    KIND WALSH: row S gives the coefficient of the product of the bits in S instead of what the value S reads.
    KIND SLOPE: the derivative by ratio.
    """
    row = tl.arange(0, BLOCKS)[:, None] * BS + tl.arange(0, BS)[None, :]
    group = row // (1 << SIZE)
    place = head * (F >> SIZE) + group
    scale = tl.load(scales + place, mask=row < F, other=0.0)[:, :, None]
    ratio = tl.load(ratios + place, mask=row < F, other=0.0)[:, :, None]
    rows, columns = row[:, :, None], row[:, None, :]
    matrix = tl.where(group[:, :, None] == columns // (1 << SIZE), scale, 0.0)
    slope = matrix * 0.0
    for bit in tl.static_range(SIZE):
        if KIND == WALSH:
            even, odd = 0.5 + 0.5 * ratio, 0.5 - 0.5 * ratio
            signed = tl.where((columns >> bit) & 1 != 0, odd, -odd)
            matrix *= tl.where((rows >> bit) & 1 != 0, signed, even)
        else:
            differ = ((rows ^ columns) >> bit) & 1 != 0
            slope = tl.where(differ, slope * ratio + matrix, slope)
            matrix *= tl.where(differ, ratio, 1.0)
    if KIND == SLOPE:
        matrix = slope
    return matrix


@triton.jit
def load_buckets(
    base, parts, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BLOCKS: tl.constexpr, BS: tl.constexpr
):
    """Buckets of values (BLOCKS, BS, BE) and of weights (BLOCKS, BS), added up over `parts` of them."""
    row = tl.arange(0, BLOCKS)[:, None] * BS + tl.arange(0, BS)[None, :]
    channel = tl.arange(0, BE)
    places = base + row[:, :, None] * (E + 1) + channel[None, None, :]
    inside = (row < F)[:, :, None] & (channel < E)[None, None, :]
    sums = tl.load(places, mask=inside, other=0.0)
    ones = tl.load(base + row * (E + 1) + E, mask=row < F, other=0.0)
    for part in range(1, parts):
        sums += tl.load(places + part * (F * (E + 1)), mask=inside, other=0.0)
        ones += tl.load(base + part * (F * (E + 1)) + row * (E + 1) + E, mask=row < F, other=0.0)
    return sums, ones


@triton.jit
def store_buckets(base, sums, ones, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr):
    """The inverse of `load_buckets`."""
    BLOCKS: tl.constexpr = sums.shape[0]
    BS: tl.constexpr = sums.shape[1]
    row = tl.arange(0, BLOCKS)[:, None] * BS + tl.arange(0, BS)[None, :]
    channel = tl.arange(0, BE)
    inside = (row < F)[:, :, None] & (channel < E)[None, None, :]
    tl.store(base + row[:, :, None] * (E + 1) + channel[None, None, :], sums, mask=inside)
    tl.store(base + row * (E + 1) + E, ones, mask=row < F)


@triton.jit
def mixed(
    sums, ones, scales, ratios, head, KIND: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """What codes read of buckets of values (BF, BE) and of weights (BF,), or coefficients of that: `mixing`."""
    BLOCKS: tl.constexpr = sums.shape[0]
    BS: tl.constexpr = sums.shape[1]
    matrix = mixing(scales, ratios, head, KIND, SIZE, F, BF, BLOCKS, BS)
    table = tl.reshape(plain_dot(matrix, sums, PRECISION), (BF, BE))
    return table, tl.reshape(tl.sum(matrix * ones[:, None, :], axis=2), (BF,))


@triton.jit
def load_table(
    base, parts, scales, ratios, floor, head, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The table (BF, BE) and (BF,), the smallest denominator, and the sum of the keys' weights.

    Also the buckets themselves.
    """
    BS: tl.constexpr = 16 if SIZE < 4 else 1 << SIZE
    sums, ones = load_buckets(base, parts, E, F, BE, BF // BS, BS)
    table, below = mixed(sums, ones, scales, ratios, head, MIX, PRECISION, SIZE, F, BE, BF)
    # Every key is in one bucket of the first group.
    row = tl.arange(0, BF // BS)[:, None] * BS + tl.arange(0, BS)[None, :]
    count = tl.sum(tl.sum(tl.where(row < (1 << SIZE), ones, 0.0), axis=1), axis=0)
    return table, below, tl.load(floor + head) * count, count, sums, ones


@triton.jit
def to_bits(
    to_features, packed, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Gradient of the bits (BLOCK, BB), half the difference between a bit's two values.

    `to_features` are coefficients of products of bits, as `mixing` of KIND WALSH makes them. The derivative by a
    bit is the sum of those terms that contain it, times the bit.
    """
    column = tl.arange(0, BF)
    subset = column & ((1 << SIZE) - 1)
    zeros = digits(packed, SIZE, F, BF) ^ ((1 << SIZE) - 1)
    # The term is negative where an odd number of the subset's bits is zero.
    if SIZE <= 5:
        # Bit z of a subset's word says so for the zeros z.
        words = tl.zeros((BF,), tl.int32)
        for z in tl.static_range(1 << SIZE):
            both = subset & z
            both ^= both >> 4
            both ^= both >> 2
            words |= ((both ^ (both >> 1)) & 1) << z
        sign = (words[None, :] >> zeros) << 31
    else:
        both = subset[None, :] & zeros
        both ^= both >> 4
        both ^= both >> 2
        sign = (both ^ (both >> 1)) << 31
    terms = (to_features.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    bit = tl.arange(0, BB)[None, :]
    contained = (subset[:, None] >> (bit % SIZE)) & 1 != 0
    contained = contained & (bit // SIZE == (column // (1 << SIZE))[:, None])
    member = tl.where(contained & (column < F)[:, None], 1.0, 0.0).to(tl.bfloat16)
    return product(terms, member, PIECES, PRECISION) * unpack(packed, BITS, BB).to(tl.float32)
