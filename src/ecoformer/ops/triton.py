# mypy: ignore-errors
"""Kernels in Triton, for NVIDIA GPUs. `TRITON_INTERPRET=1`, set before the import, runs them on CPU tensors.

Without causal order: `scatter` adds a stretch of tokens to the rows they pick, `mix` adds the stretches up and
lets rows exchange, `gather` reads. The backward scatters gradients in the same way, and `flips` reads what a
bit changes. In causal order `scan` makes running sums of the stretches, and `causal` walks through each.

Products are of bf16 numbers and exact; a wider number goes in as the sum of two or three (`product`). What a
bit changes is read from a group's Walsh coefficients, not as the difference of two reads, so the affinity's
constant part costs no digits. Programs have at most two warps: with four, 64 rows become asynchronous products
(wgmma), which assemblers before CUDA 13.3 get wrong.

Sizes known to the compiler: BITS of a code, G groups of S bits, F = G 2^S rows, D channels; BF, BE, CB are the
rows, the channels and the bits of a chunk, T the tokens of a tile; P the pieces that a sum goes in as, PV those
of a value. Sums of a head lie in memory as (F, LD), the count of keys in column D.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ecoformer.affinity import group_size
from ecoformer.ops import eager
from ecoformer.ops.eager import FLOOR, Gradients

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

COUNTS = ("n", "heads", "splits", "span", "batches")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if triton is None:
    jit = kernel = lambda function: function
else:
    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
    jit = triton.jit
    kernel = partial(triton.jit, do_not_specialize=COUNTS)  # nothing is compiled anew for another length
    INTERPRETED = tl.constexpr(INTERPRETED)
    LOW = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)  # the interpreter's bf16 product is wrong
    NARROW = tl.constexpr(8 if VERSION >= (3, 5) else 16)  # columns that a product must have
    LEAST = tl.constexpr(FLOOR)

CHUNK = 64
"""Rows and channels of a state that one program holds."""
STRETCH = 256
"""Tokens in causal order that share one state before them."""
LONGEST = 4096
"""Tokens of a sum in one piece."""


# ---- Tiles and products --------------------------------------------------------------------------------------


@jit
def far(start):
    """Where a tile begins, in 64 bits; offsets within one fit 32. The interpreter's loops count in Python."""
    return start if INTERPRETED else start.to(tl.int64)


@jit
def load_tile(at, start, n, stride, first, WIDTH: tl.constexpr, BW: tl.constexpr, T: tl.constexpr):
    """Columns first, ... of the tokens start, ...; zero beyond the last."""
    rows, columns = tl.arange(0, T), tl.arange(0, BW)
    inside = (start + rows < n)[:, None]
    if WIDTH % BW != 0:
        inside = inside & (first + columns < WIDTH)[None, :]
    return tl.load(
        at + far(start) * stride + first + rows[:, None] * stride + columns[None, :], mask=inside, other=0
    )


@jit
def store_tile(at, tile, start, n, stride, first, WIDTH: tl.constexpr, BW: tl.constexpr, T: tl.constexpr):
    """The inverse of `load_tile`."""
    rows, columns = tl.arange(0, T), tl.arange(0, BW)
    inside = (start + rows < n)[:, None] & (first + columns < WIDTH)[None, :]
    at += far(start) * stride + first
    tl.store(at + rows[:, None] * stride + columns[None, :], tile.to(at.dtype.element_ty), mask=inside)


@jit
def load_narrow(at, start, n, stride, T: tl.constexpr):
    """One fp32 number of each token, zero beyond the last."""
    rows = tl.arange(0, T)
    return tl.load(at + far(start) * stride + rows * stride, mask=start + rows < n, other=0).to(tl.float32)


@jit
def load_rows(at, chunk, first, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr):
    """A chunk of the rows of a state, and their counts (BF,)."""
    LD: tl.constexpr = (D + 4) // 4 * 4
    rows, columns = chunk * BF + tl.arange(0, BF), first + tl.arange(0, BE)
    inside = (rows < F)[:, None] & (columns < D)[None, :]
    sums = tl.load(at + rows[:, None] * LD + columns[None, :], mask=inside, other=0)
    return sums, tl.load(at + rows * LD + D, mask=rows < F, other=0)


@jit
def product(a, b, onto, A: tl.constexpr, B: tl.constexpr):
    """onto + a @ b, where a goes in as the sum of A bf16 numbers and b as that of B."""
    if INTERPRETED:
        onto = tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision="ieee")
    else:
        for i in tl.static_range(A):
            high = a.to(tl.bfloat16)
            rest = b
            for j in tl.static_range(B):
                if (i + j < A) | (i + j < B):
                    piece = rest.to(tl.bfloat16)
                    onto = tl.dot(high, piece, onto)
                    if j + 1 < B:
                        rest = rest.to(tl.float32) - piece.to(tl.float32)
            if i + 1 < A:
                a = a.to(tl.float32) - high.to(tl.float32)
    return onto


@jit
def columns_of(x):
    """Numbers (N,) as NARROW exact columns that add up to them."""
    high = x.to(LOW).to(tl.float32)
    middle = (x - high).to(LOW).to(tl.float32)
    column = tl.arange(0, NARROW)[None, :]
    low = tl.where(column == 2, (x - high - middle)[:, None], 0.0)
    return tl.where(column == 0, high[:, None], tl.where(column == 1, middle[:, None], low)).to(LOW)


@jit
def patterns(chunk, S: tl.constexpr, BF: tl.constexpr, CB: tl.constexpr):
    """The bits ±1 of each row's value (CB, BF); zero for the bits of other groups."""
    bit, row = tl.arange(0, CB)[:, None], tl.arange(0, BF)[None, :]
    signs = tl.where(((chunk * BF + row) >> (bit % S)) & 1 != 0, 1.0, -1.0)
    return tl.where(bit // S == row >> S, signs, 0.0).to(LOW)


@jit
def one_hot(codes, signs, S: tl.constexpr):
    """Which rows codes pick, of the product of both with their bits: all S bits agree."""
    agree = tl.dot(codes, signs)
    if INTERPRETED:
        result = tl.maximum(agree * 0.5 + (1.0 - 0.5 * S), 0.0)
    else:
        offset = tl.full((1, 1), 1.0 - 0.5 * S, tl.float32).to(tl.bfloat16)
        result = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            mov.b32 b, 0x3f003f00;
            cvt.rn.bf16x2.f32 a, $2, $1;
            fma.rn.relu.bf16x2 $0, a, b, $3; }""",
            "=r,f,f,r", [agree, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return result


@jit
def load_bits(
    x, start, n, stride, chunk, PACKED: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr,
    BF: tl.constexpr, CB: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The numbers (T, CB) whose signs are the bits of a chunk's groups, as loaded; bits past the last are -1."""
    first = ((chunk * BF) >> S) * S
    bit = tl.arange(0, CB)
    if PACKED:
        rows = tl.arange(0, T)
        code = tl.load(x + far(start) * stride + rows * stride, mask=start + rows < n, other=0).to(tl.int64)
        y = (((code >> first).to(tl.int32)[:, None] >> bit[None, :]) & 1).to(tl.float32) - 0.5
    else:
        y = load_tile(x, start, n, stride, first, BITS, CB, T)
    return y if BITS % CB == 0 else tl.where((first + bit < BITS)[None, :], y.to(tl.float32), -1.0)


@jit
def signs_of(y):
    """±1; sign(0) is +1."""
    return tl.where(y >= 0, 1.0, -1.0).to(LOW)


@jit
def walsh(x, S: tl.constexpr):
    """Rows (R, C), indexed by the bits of groups, as coefficients of the products of a group's bits ±1."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    for r in tl.static_range(S):
        pairs = tl.permute(tl.reshape(x, (R >> (r + 1), 2, C << r)), (0, 2, 1))
        zero, one = tl.split(pairs)
        pairs = tl.join(0.5 * (one + zero), 0.5 * (one - zero))
        x = tl.reshape(tl.permute(pairs, (0, 2, 1)), (R, C))
    return x


@jit
def to_bits(z, codes, signs, P: tl.constexpr):
    """Half the difference of each bit's two values (T, CB), from coefficients z (T, BF) of products of bits.

    The terms that contain the bit count, times the bit. A term is negative where an odd number of its bits is;
    their number, added to 1.5 * 2^16, has its lowest bit at place 7 of the fp32 number.
    """
    members = tl.where(signs.to(tl.float32) > 0, 1.0, 0.0).to(LOW)
    negative = tl.where(codes.to(tl.float32) < 0, 1.0, 0.0).to(LOW)
    odd = tl.dot(negative, members, tl.full(z.shape, 98304.0, tl.float32))
    flipped = z.to(tl.int32, bitcast=True) ^ ((odd.to(tl.int32, bitcast=True) << 24) & -2147483648)
    found = tl.zeros(codes.shape, tl.float32)
    found = product(flipped.to(tl.float32, bitcast=True), tl.trans(members), found, P, 1)
    return found * codes.to(tl.float32)


@jit
def load_values(
    v, w, e, start, n, v_n, w_n, first, GRAD: tl.constexpr, WEIGHTED: tl.constexpr,
    D: tl.constexpr, BE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Values times weights, and the weights (T,); if GRAD, gradients over denominators w, and e.

    A key whose weight is zero may hold anything.
    """
    values = load_tile(v, start, n, v_n, first, D, BE, T)
    if GRAD:
        scale, one = inverse_of(load_narrow(w, start, n, w_n, T)), load_narrow(e, start, n, 1, T)
        values = values.to(tl.float32) * scale[:, None]
    elif WEIGHTED:
        one = load_narrow(w, start, n, w_n, T)
        values = tl.where(one[:, None] == 0, 0.0, values.to(tl.float32) * one[:, None])
    else:
        one = tl.where(start + tl.arange(0, T) < n, 1.0, 0.0)
    return values, one


@jit
def inverse_of(below):
    """One over denominators, zero where no key was seen; they are negative where they were at their floor."""
    return tl.where(below == 0, 0.0, 1.0 / tl.where(below == 0, 1.0, tl.abs(below)))


@jit
def bounded(below, floor):
    """Denominators; minus their floor where they are below it."""
    return tl.where(below < floor, -floor, below)


@jit
def matrix(
    f,
    rows,
    columns,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
    BITS: tl.constexpr,
    S: tl.constexpr,
    F: tl.constexpr,
):
    """What rows read from columns: the mixing of groups if KIND is 0, turned if 1; the identity if 2."""
    V: tl.constexpr = 1 << S
    u, w = rows[:, None], columns[None, :]
    if KIND == 2:
        found = tl.where((u == w) & (u < F), 1.0, 0.0)
    else:
        inside = (u >> S == w >> S) & (u < F)
        LAST: tl.constexpr = BITS - ((F >> S) - 1) * S
        inside &= (u < F - V) | (((u | w) & (V - 1)) < (1 << LAST))
        if FULL:
            places = u * V + (w & (V - 1)) if KIND == 0 else w * V + (u & (V - 1))
        else:
            places = (u >> S) * (S + 1) + differing(u ^ w, S)
        found = tl.load(f + places, mask=inside, other=0).to(tl.float32)
    return found


@jit
def differing(x, S: tl.constexpr):
    """How many of the S lowest bits are one."""
    count = x & 1
    for r in tl.static_range(1, S):
        count += (x >> r) & 1
    return count


# ---- Without causal order ------------------------------------------------------------------------------------


@kernel
def scatter(
    x, v, w, out, e, parts, n, heads, splits, span, x_b, x_h, x_n, v_b, v_h, v_n, w_b, w_h, w_n, o_b, o_h, o_n,
    GRAD: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr, PV: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of [v, 1] over a stretch of keys in the rows they pick, for a chunk of rows and channels.

    If GRAD, sums over queries of the gradients of what they read, and of its count e, which is stored.
    """
    row, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    chunk, first = tl.program_id(1), tl.program_id(2) * BE
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    v += batch * v_b + head * v_h
    w += batch * w_b + head * w_h
    out += batch * o_b + head * o_h
    e += row * n
    signs = tl.trans(patterns(chunk, S, BF, CB))
    sums, ones = tl.zeros((BF, BE), tl.float32), tl.zeros((BF, NARROW), tl.float32)
    for i in tl.range(split * span, tl.minimum(split * span + span, n), T, num_stages=STAGES):
        codes = signs_of(load_bits(x, i, n, x_n, chunk, PACKED, BITS, S, BF, CB, T))
        if GRAD:
            below = load_narrow(w, i, n, w_n, T)
            values = load_tile(v, i, n, v_n, first, D, BE, T).to(tl.float32) * inverse_of(below)[:, None]
            if D <= BE:
                one = tl.sum(values * load_tile(out, i, n, o_n, 0, D, BE, T).to(tl.float32), 1)
            else:
                one = tl.zeros((T,), tl.float32)
                for c in tl.range(0, D, BE):
                    found = load_tile(out, i, n, o_n, c, D, BE, T).to(tl.float32)
                    one += tl.sum(load_tile(v, i, n, v_n, c, D, BE, T).to(tl.float32) * found, 1)
                one *= inverse_of(below)
            one = tl.where(below > 0, -one, 0.0)  # a denominator at its floor has no gradient
            rows = i + tl.arange(0, T)
            tl.store(e + rows, one, mask=(rows < n) & (chunk == 0) & (first == 0))
        else:
            values, one = load_values(v, w, e, i, n, v_n, w_n, first, False, WEIGHTED, D, BE, T)
        hot = one_hot(signs, tl.trans(codes), S)
        sums = product(hot, values, sums, 1, PV)
        ones = tl.dot(hot, columns_of(one), ones)
    LD: tl.constexpr = (D + 4) // 4 * 4
    parts += (row * splits + split) * (F * LD)
    rows = chunk * BF + tl.arange(0, BF)
    columns = first + tl.arange(0, BE)
    tl.store(
        parts + rows[:, None] * LD + columns[None, :], sums, mask=(rows < F)[:, None] & (columns < D)[None, :]
    )
    tl.store(parts + rows * LD + D, tl.sum(ones, 1), mask=(rows < F) & (first == 0))


@kernel
def mix(
    parts, more, f, kept, table, coefficients, floors, heads, splits, f_h,
    KIND: tl.constexpr, FULL: tl.constexpr, MORE: tl.constexpr, KEPT: tl.constexpr, WALSH: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr, LI: tl.constexpr, LK: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add up the stretches' sums, keep them if KEPT, and mix: table, Walsh coefficients if WALSH, floors.

    `more` (F, D + 1) is added before mixing if MORE is 1, and after if 2.
    """
    row, block, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BC
    f += (row % heads) * f_h
    LD: tl.constexpr = (D + 4) // 4 * 4
    rows, columns = block * BR + tl.arange(0, BR), first + tl.arange(0, BC)
    mixed = tl.zeros((BR, BC), tl.float32)
    total, count = 0.0, 0.0
    for r in range(0, BR, 16):
        part = block * BR + r + tl.arange(0, 16)
        inside = (part < F)[:, None] & (columns <= D)[None, :]
        x = tl.zeros((16, BC), tl.float32)
        for i in range(0, splits, 4):
            for j in tl.static_range(4):
                at = parts + (row * splits + i + j) * (F * LI)
                x += tl.load(
                    at + part[:, None] * LI + columns[None, :], mask=inside & (i + j < splits), other=0
                )
        if KEPT:
            tl.store(kept + row * (F * LK) + part[:, None] * LK + columns[None, :], x, mask=inside)
        if MORE == 1:
            at = more + row * (F * (D + 1)) + part[:, None] * (D + 1) + columns[None, :]
            x += tl.load(at, mask=inside, other=0).to(tl.float32)
        weights = matrix(f, rows, part, KIND, FULL, BITS, S, F)
        mixed = product(weights, x, mixed, 3, 3)
        total += tl.sum(tl.sum(weights, 1), 0)
        group = (part < block * BR + (1 << S))[:, None] & (columns == D)[None, :]
        count += tl.sum(tl.sum(tl.where(group, x, 0.0), 1), 0)
    inside = (rows < F)[:, None] & (columns <= D)[None, :]
    if MORE == 2:
        at = more + row * (F * (D + 1)) + rows[:, None] * (D + 1) + columns[None, :]
        mixed += tl.load(at, mask=inside, other=0).to(tl.float32)
    places = row * (F * LD) + rows[:, None] * LD + columns[None, :]
    tl.store(table + places, mixed, mask=inside)
    if WALSH:
        tl.store(coefficients + places, walsh(mixed, S), mask=inside)
    floor = LEAST * total / (1 << (2 * S)) * count  # every group counts all keys: floors of blocks add up
    tl.store(floors + row * tl.num_programs(1) + block, floor, mask=(first <= D) & (first + BC > D))


@kernel
def gather(
    x, table, floors, out, below, n, heads, splits, span, x_b, x_h, x_n, o_b, o_h, o_n,
    PACKED: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a stretch of queries reads from the table, over its count: a chunk of the channels."""
    row, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    first = tl.program_id(1) * BE
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    out += batch * o_b + head * o_h
    below += row * n
    LD: tl.constexpr = (D + 4) // 4 * 4
    table += row * (F * LD)
    block = tl.arange(0, 128)
    floor = tl.sum(tl.load(floors + row * BLOCKS + block, mask=block < BLOCKS, other=0), 0)
    ONE: tl.constexpr = F <= BF
    if ONE:
        sums, ones = load_rows(table, 0, first, F, D, BF, BE)
    for i in tl.range(split * span, tl.minimum(split * span + span, n), T, num_stages=STAGES):
        top, counts = tl.zeros((T, BE), tl.float32), tl.zeros((T, NARROW), tl.float32)
        for chunk in range((F + BF - 1) // BF):
            codes = signs_of(load_bits(x, i, n, x_n, chunk, PACKED, BITS, S, BF, CB, T))
            hot = one_hot(codes, patterns(chunk, S, BF, CB), S)
            if ONE:
                read, counted = sums, ones
            else:
                read, counted = load_rows(table, chunk, first, F, D, BF, BE)
            top = product(hot, read, top, 1, P)
            counts = tl.dot(hot, columns_of(counted), counts)
        found = bounded(tl.sum(counts, 1), floor)
        store_tile(out, top * inverse_of(found)[:, None], i, n, o_n, first, D, BE, T)
        rows = i + tl.arange(0, T)
        tl.store(below + rows, found, mask=(rows < n) & (first == 0))


@kernel
def flips(
    x, grad, v, w, below, e, as_query, as_key, table, dx, dv, dw, n, heads, splits, span,
    x_b, x_h, x_n, g_b, g_h, g_n, v_b, v_h, v_n, w_b, w_h, w_n,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr,
    P: tl.constexpr, PV: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a stretch of tokens as QUERIES, as KEYS, or both; and of keys' values and weights."""
    row, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    grad += batch * g_b + head * g_h
    v += batch * v_b + head * v_h
    w += batch * w_b + head * w_h
    below += row * n
    e += row * n
    dx += row * n * BITS
    dv += row * n * D
    dw += row * n
    LD: tl.constexpr = (D + 4) // 4 * 4
    as_query += row * (F * LD)
    as_key += row * (F * LD)
    table += row * (F * LD)
    CHUNKS: tl.constexpr = (F + BF - 1) // BF
    SHARE: tl.constexpr = 1 if (1 << S) <= BF else (1 << S) // BF  # chunks of a group
    ONE: tl.constexpr = (F <= BF) & (D <= BE)
    if ONE:
        if QUERIES and not PACKED:
            queries, query_ones = load_rows(as_query, 0, 0, F, D, BF, BE)
        if KEYS:
            keys, key_ones = load_rows(as_key, 0, 0, F, D, BF, BE)
            reads, read_ones = load_rows(table, 0, 0, F, D, BF, BE)
    for i in tl.range(split * span, tl.minimum(split * span + span, n), T, num_stages=STAGES):
        weight = tl.full((T,), 1.0, tl.float32)
        if KEYS and WEIGHTED:
            weight = load_narrow(w, i, n, w_n, T)
        if ONE:
            tokens = load_bits(x, i, n, x_n, 0, PACKED, BITS, S, BF, CB, T)
            if KEYS:
                values = load_tile(v, i, n, v_n, 0, D, BE, T)
                if WEIGHTED:
                    values = tl.where(weight[:, None] == 0, 0.0, values.to(tl.float32)).to(values.dtype)
        if not PACKED:
            if QUERIES:
                inverse, to_count = inverse_of(load_narrow(below, i, n, 1, T)), load_narrow(e, i, n, 1, T)
            for unit in range(CHUNKS // SHARE):
                y = tokens if ONE else load_bits(x, i, n, x_n, unit * SHARE, PACKED, BITS, S, BF, CB, T)
                codes = signs_of(y)
                found = tl.zeros((T, CB), tl.float32)
                for share in range(SHARE):
                    chunk = unit * SHARE + share
                    z = tl.zeros((T, BF), tl.float32)
                    if QUERIES:
                        for c in range(0, D, BE):
                            if ONE:
                                sums, ones = queries, query_ones
                            else:
                                sums, ones = load_rows(as_query, chunk, c, F, D, BF, BE)
                            z = product(load_tile(grad, i, n, g_n, c, D, BE, T), tl.trans(sums), z, PV, P)
                            if c + BE >= D:
                                z = z * inverse[:, None] + to_count[:, None] * ones[None, :]
                    if KEYS:
                        more = tl.zeros((T, BF), tl.float32)
                        for c in range(0, D, BE):
                            if ONE:
                                sums, ones, tile = keys, key_ones, values
                            else:
                                sums, ones = load_rows(as_key, chunk, c, F, D, BF, BE)
                                tile = load_tile(v, i, n, v_n, c, D, BE, T)
                                if WEIGHTED:
                                    tile = tl.where(weight[:, None] == 0, 0.0, tile.to(tl.float32)).to(
                                        tile.dtype
                                    )
                            more = product(tile, tl.trans(sums), more, PV, P)
                            if c + BE >= D:
                                z += (more + ones[None, :]) * weight[:, None]
                    found += to_bits(z, codes, patterns(chunk, S, BF, CB), P)
                found = tl.where(tl.abs(y.to(tl.float32)) <= 1, found, 0.0)
                first = ((unit * SHARE * BF) >> S) * S
                store_tile(dx, found, i, n, BITS, first, BITS, CB, T)
        if KEYS:
            to_weight = tl.zeros((T,), tl.float32)
            for c in range(0, D, BE):
                read, counts = tl.zeros((T, BE), tl.float32), tl.zeros((T, NARROW), tl.float32)
                for chunk in range(CHUNKS):
                    y = tokens if ONE else load_bits(x, i, n, x_n, chunk, PACKED, BITS, S, BF, CB, T)
                    hot = one_hot(signs_of(y), patterns(chunk, S, BF, CB), S)
                    if ONE:
                        sums, ones = reads, read_ones
                    else:
                        sums, ones = load_rows(table, chunk, c, F, D, BF, BE)
                    read = product(hot, sums, read, 1, P)
                    if WEIGHTED:
                        counts = tl.dot(hot, columns_of(ones), counts)
                store_tile(dv, read * weight[:, None], i, n, D, c, D, BE, T)
                if WEIGHTED:
                    tile = values if ONE else load_tile(v, i, n, v_n, c, D, BE, T)
                    to_weight += tl.sum(tile.to(tl.float32) * read, 1)
                    if c + BE >= D:
                        to_weight += tl.sum(counts, 1)
            if WEIGHTED:
                rows = i + tl.arange(0, T)
                tl.store(dw + rows, tl.where(weight == 0, 0.0, to_weight), mask=rows < n)


@kernel
def pairs(
    left, right, out, heads, batches, r_b, r_h, FULL: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
    D: tl.constexpr, LI: tl.constexpr, SIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """How much each pair of a group's values adds to the result, summed over some samples."""
    SIDES: tl.constexpr = 1 if (1 << S) <= SIDE else (1 << S) // SIDE
    LD: tl.constexpr = (D + 4) // 4 * 4
    head, block, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block // SIDES * SIDE + tl.arange(0, SIDE)
    columns = (block // SIDES // SIDES * SIDES + block % SIDES) * SIDE + tl.arange(0, SIDE)
    found = tl.zeros((SIDE, SIDE), tl.float32)
    for batch in range(place, batches, tl.num_programs(2)):
        row = far(batch) * heads + head
        for first in range(0, D + 1, BC):
            c = first + tl.arange(0, BC)[None, :]
            at = left + row * (F * LD) + rows[:, None] * LD + c
            a = tl.load(at, mask=(rows < F)[:, None] & (c <= D), other=0)
            at = right + far(batch) * r_b + head * r_h + columns[:, None] * LI + c
            b = tl.load(at, mask=(columns < F)[:, None] & (c <= D), other=0)
            found = product(a, tl.trans(b), found, 3, 3)
    at = place * heads + head
    if not FULL:
        at = at * SIDES + block % SIDES
    store_pairs(out, at, found, rows, columns, FULL, S, F)


@jit
def store_pairs(out, entry, found, rows, columns, FULL: tl.constexpr, S: tl.constexpr, F: tl.constexpr):
    """Pairs of rows and columns of a group (F, 2^S); if not FULL, their sums by the bits that differ."""
    u, w = rows[:, None], columns[None, :]
    same = (u >> S == w >> S) & (u < F)
    if FULL:
        at = out + entry.to(tl.int64) * (F << S)
        tl.store(at + (u << S) + (w & ((1 << S) - 1)), found, mask=same)
    else:
        at = out + entry.to(tl.int64) * (F * (S + 1))
        for d in tl.static_range(S + 1):
            some = tl.sum(tl.where(same & (differing(u ^ w, S) == d), found, 0.0), 1)
            tl.store(at + rows * (S + 1) + d, some, mask=rows < F)


# ---- Causal order --------------------------------------------------------------------------------------------


@kernel
def scan(
    parts, state, before, own, splits, STATE: tl.constexpr, REVERSE: tl.constexpr,
    F: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The state and the sums of the stretches before each (after each if REVERSE); and of all, as (F, D + 1)."""
    LD: tl.constexpr = (D + 4) // 4 * 4
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    u, c = place // LD, place % LD
    inside = (u < F) & (c <= D)
    at = row * (F * (D + 1)) + u * (D + 1) + c
    start = tl.zeros((SIZE,), tl.float32)
    if STATE:
        start = tl.load(state + at, mask=inside, other=0).to(tl.float32)
    carry = tl.zeros((SIZE,), tl.float32)
    for i in range(0, splits + 1, 16):
        step = i + tl.arange(0, 16)
        target = splits - 1 - step if REVERSE else step
        source = target + 1 if REVERSE else target - 1
        from_ = parts + (row * splits + source)[:, None] * (F * LD) + place[None, :]
        found = tl.load(from_, mask=((step > 0) & (step <= splits))[:, None] & inside[None, :], other=0)
        to = before + (row * splits + target)[:, None] * (F * LD) + place[None, :]
        running = tl.cumsum(found, 0) + (carry + start)[None, :]
        tl.store(to, running, mask=(step < splits)[:, None] & inside[None, :])
        carry += tl.sum(found, 0)
    tl.store(own + at, carry, mask=inside)


@kernel
def matrices(
    f, out, f_h, FULL: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, BF: tl.constexpr
):
    """What the rows of a head read from all (BF, BF), and its Walsh coefficients: for queries, and for keys."""
    row, side = tl.arange(0, BF), tl.program_id(1)
    if side == 0:
        found = matrix(f + tl.program_id(0) * f_h, row, row, 0, FULL, BITS, S, F)
    else:
        found = matrix(f + tl.program_id(0) * f_h, row, row, 1, FULL, BITS, S, F)
    out += (tl.program_id(0) * 4 + side * 2) * (BF * BF)
    places = row[:, None] * BF + row[None, :]
    tl.store(out + places, found)
    tl.store(out + BF * BF + places, walsh(found, S))


@kernel
def causal(
    x, a, wa, ea, x2, c, wc, ec, before, mats, out, below, dx, dw, dpairs, n, heads, splits, span, mats_h,
    x_b, x_h, x_n, a_b, a_h, a_n, wa_b, wa_h, wa_n, x2_b, x2_h, x2_n, c_b, c_h, c_n, wc_b, wc_h, wc_n,
    o_b, o_h, o_n,
    KEYS: tl.constexpr, READ: tl.constexpr, FLIP: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr,
    WEIGHTED: tl.constexpr, PACKED: tl.constexpr, PACKED2: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Walk through a stretch: queries from its first tile on, or KEYS from its last one back.

    Tokens x read (READ) sums over the others, x2 with vectors c, that are in sight: those outside the stretch
    from `before`, those of the stretch so far from the same sums, and those of the tile pair by pair. FLIP:
    what the bits of x change, where the tokens have vectors a; PAIRS: how much each pair of values adds.
    """
    row, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    a += batch * a_b + head * a_h
    wa += batch * wa_b + head * wa_h
    ea += row * n
    x2 += batch * x2_b + head * x2_h
    c += batch * c_b + head * c_h
    wc += batch * wc_b + head * wc_h
    ec += row * n
    out += batch * o_b + head * o_h
    below += row * n
    dx += row * n * BITS
    dw += row * n
    mats += head * mats_h
    LD: tl.constexpr = (D + 4) // 4 * 4
    PA: tl.constexpr = PV if KEYS and not WEIGHTED else P
    PC: tl.constexpr = PV if not KEYS and not WEIGHTED else P
    sums, ones = load_rows(before + (row * splits + split) * (F * LD), 0, 0, F, D, BF, BE)
    ones = tl.where(tl.arange(0, NARROW)[None, :] == 0, ones[:, None], 0.0)
    row_ = tl.arange(0, BF)
    square = row_[:, None] * BF + row_[None, :]
    mixing, transform = tl.load(mats + square), tl.load(mats + BF * BF + square)
    share = LEAST / (1 << (2 * S)) * tl.sum(tl.sum(mixing, 1), 0)
    signs = patterns(0, S, BF, CB)
    added = tl.zeros((BF, BF), tl.float32)
    tiles = tl.cdiv(tl.minimum(span, n - split * span), T)
    t = tl.arange(0, T)
    sight = t[:, None] <= t[None, :] if KEYS else t[:, None] >= t[None, :]
    for tile in range(0, tiles):
        i = split * span + (tiles - 1 - tile if KEYS else tile) * T
        y = load_bits(x, i, n, x_n, 0, PACKED, BITS, S, BF, CB, T)
        codes = signs_of(y)
        hot = one_hot(codes, signs, S)
        hot2 = one_hot(signs_of(load_bits(x2, i, n, x2_n, 0, PACKED2, BITS, S, BF, CB, T)), signs, S)
        others, one = load_values(c, wc, ec, i, n, c_n, wc_n, 0, KEYS, WEIGHTED, D, BE, T)
        counted = tl.sum(ones, 1)
        if KEYS or FLIP:
            values, weight = load_values(a, wa, ea, i, n, a_n, wa_n, 0, not KEYS, WEIGHTED, D, BE, T)
        if READ:
            mixed = product(hot, mixing, tl.zeros((T, BF), tl.float32), 1, P)
            pair = product(mixed, tl.trans(hot2), tl.zeros((T, T), tl.float32), P, 1)
            pair = tl.where(sight, pair, 0.0)
            top = product(mixed, sums, tl.zeros((T, BE), tl.float32), P, P)
            top = product(pair, others, top, P, PC)
            count = tl.sum(mixed * counted[None, :], 1) + tl.sum(pair * one[None, :], 1)
            if KEYS:
                if WEIGHTED:
                    plain = load_tile(a, i, n, a_n, 0, D, BE, T).to(tl.float32)
                    to_weight = tl.sum(tl.where(weight[:, None] == 0, 0.0, plain) * top, 1) + count
                    tl.store(dw + i + t, tl.where(weight == 0, 0.0, to_weight), mask=i + t < n)
                top *= weight[:, None]
            else:
                seen = tl.sum(tl.where(row_ < (1 << S), counted, 0.0), 0) + tl.cumsum(one, 0)
                found = bounded(count, share * seen)
                tl.store(below + i + t, found, mask=i + t < n)
                top *= inverse_of(found)[:, None]
            store_tile(out, top, i, n, o_n, 0, D, BE, T)
        if FLIP:
            pair = product(values, tl.trans(others), tl.zeros((T, T), tl.float32), PA, PC)
            pair = tl.where(sight, pair + weight[:, None] * one[None, :], 0.0)
            held = product(values, tl.trans(sums), weight[:, None] * counted[None, :], PA, P)
            held = product(pair, hot2, held, P, 1)
            if not PACKED:
                z = product(held, tl.trans(transform), tl.zeros((T, BF), tl.float32), P, P)
                bits = tl.where(tl.abs(y.to(tl.float32)) <= 1, to_bits(z, codes, signs, P), 0.0)
                store_tile(dx, bits, i, n, BITS, 0, BITS, CB, T)
            if PAIRS:
                added = product(tl.trans(hot), held, added, 1, P)
        sums = product(tl.trans(hot2), others, sums, 1, PC)
        ones = tl.dot(tl.trans(hot2), columns_of(one), ones)
    if PAIRS:
        store_pairs(dpairs, row * splits + split, added, row_, row_, FULL, S, F)


# ---- Launches ------------------------------------------------------------------------------------------------


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED.value:
        return None if device.type == "cpu" else "Triton's interpreter runs on the CPU"
    if VERSION < (3, 3):
        return "it needs Triton 3.3 or newer"  # the compiler of 3.2 aborts the process on some kernels
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it is for NVIDIA GPUs, not for {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    bits: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `eager.forward`."""
    call = _Call(q, k, v, f, weight, bits)
    if is_causal and not call.walks:
        return eager.forward(q, k, v, f, weight, state, bits, is_causal)
    batch, heads, n = q.shape[:3]
    out = v.new_empty(batch, n, heads, v.shape[3]).transpose(1, 2)
    below = torch.empty(batch, heads, n, device=v.device)
    with call.device:
        if is_causal:
            before, own = call.scan(call.scatter(STRETCH), state)
            call.walk(before, out=out, below=below)
        else:
            table, _, floors, own = call.mix(call.scatter(), before=state, keep=v.shape[3] + 1)
            call.gather(table, floors, out, below)
    return out, own, below


def backward(
    grad: Tensor,
    grad_own: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    out: Tensor,
    own: Tensor,
    below: Tensor,
    bits: int,
    is_causal: bool,
) -> Gradients:
    """As `eager.backward`."""
    call = _Call(q, k, v, f, weight, bits)
    if is_causal and not call.walks:
        given = (grad, grad_own, q, k, v, f, weight, state, out, own, below, bits, is_causal)
        return eager.backward(*given)
    with call.device:
        call.grad, call.below = _last(grad), below.contiguous()
        if is_causal:
            before, _ = call.scan(call.scatter(STRETCH), state)
            after, grads = call.scan(call.scatter(STRETCH, _last(out)), None)
            grads = grads.unsqueeze(2)
            dq, pairs = call.walk(before)
            dk, dv, dw = call.walk(after, keys=True)
            if grad_own is not None:
                table, coefficients, *_ = call.mix(grad_own.float().contiguous().unsqueeze(2), 2, walsh=True)
                more = call.flips(None, coefficients, table)
                dk, dv, dw = (None if x is None else x + y for x, y in zip((dk, dv, dw), more, strict=True))
            if k is None and dq is not None:
                dq = dq + dk
        else:
            grads = call.scatter(None, _last(out))
            total = own if state is None else own + state.float()
            as_query = call.mix(total.contiguous().unsqueeze(2), walsh=True)[1]
            table, as_key, _, kept = call.mix(grads, 1, after=grad_own, keep=grads.shape[4], walsh=True)
            pairs = call.pairs(kept, total.contiguous())
            if k is None:
                dq, dv, dw = call.flips(as_query, as_key, table)
                dk = None
            else:
                dq = call.flips(as_query, None, None)[0]
                dk, dv, dw = call.flips(None, as_key, table)
        if state is not None:
            state = call.mix(grads, 1)[0][..., : v.shape[3] + 1].to(state.dtype)
    pairs = pairs.sum((0, 2)).unflatten(1, (f.shape[1], -1))
    pairs = (pairs if call.full else pairs.sum(2)).sum_to_size(f.shape)
    weighted = None if weight is None else dw.sum_to_size(weight.shape).to(weight.dtype)
    return (
        q.new_empty(0) if dq is None else dq,
        None if k is None else k.new_empty(0) if dk is None else dk,
        dv,
        pairs.to(f.dtype),
        weighted,
        state,
    )


class _Call:
    """What launches of a call share: its tensors as kernels take them, and sizes."""

    def __init__(self, q: Tensor, k: Tensor | None, v: Tensor, f: Tensor, weight: Tensor | None, bits: int):
        self.q, self.v, self.f, self.weight = _last(q), _last(v), f.contiguous(), weight
        self.k = self.q if k is None else _last(k)
        self.shared, self.full = k is None, f.ndim == 4
        (self.batch, self.heads), d = v.shape[:2], v.shape[3]
        size, self.stride = group_size(f), 0 if f.shape[0] == 1 else self.f.stride(0)
        self.rows = f.shape[1] << size
        chunk = min(CHUNK, _padded(self.rows))
        self.group = {"BITS": bits, "S": size, "F": self.rows}
        self.sizes = {
            **self.group, "D": d, "BF": chunk, "BE": min(CHUNK, _padded(d)), "CB": _padded(max(1, chunk >> size) * size),
        }  # fmt: skip
        self.walks = self.rows <= CHUNK and d <= CHUNK
        self.half = v.dtype != torch.float32
        self.pieces = {"P": 2 if self.half else 3, "PV": _pieces(v)}
        self.wide = self.rows > CHUNK or d > CHUNK
        self.device = torch.cuda.device(v.device) if v.is_cuda else nullcontext()
        self.grad = self.below = self.e = None

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.batch, self.heads, *shape, dtype=dtype, device=self.v.device)

    def split(self, n: int, tile: int) -> tuple[int, int]:
        """Into how many stretches of how many tokens a head is cut."""
        programs = 16
        if self.v.is_cuda:
            programs = 7 * torch.cuda.get_device_properties(self.v.device).multi_processor_count
        wanted = max(1, programs // max(1, self.batch * self.heads))
        span = min(max(-(-n // wanted), 2 * tile), LONGEST)
        span = -(-span // tile) * tile
        return max(1, -(-n // span)), span

    def scatter(self, span: int | None = None, out: Tensor | None = None) -> Tensor:
        """Sums of stretches (B, H, splits, F, LD): of the keys, or, if `out` is given, of the gradients of queries."""
        x, v, w, weighted = self.k, self.v, self.weight, self.weight is not None
        pieces = self.pieces["P"] if weighted else self.pieces["PV"]
        if out is not None:
            x, v, w, pieces = self.q, self.grad, self.below, self.pieces["P"]
            self.e = torch.empty_like(self.below)
        n, d = v.shape[2:]
        tile, warps, stages = (64, 1 if d <= 32 else 2, 3) if self.half and not self.wide else (32, 2, 2)
        tile = min(tile, _padded(n))
        splits, span = self.split(n, tile) if span is None else (max(1, -(-n // span)), span)
        parts = self.new(splits, self.rows, (d + 4) // 4 * 4)
        chunks = (-(-self.rows // self.sizes["BF"]), -(-d // self.sizes["BE"]))
        scatter[(self.batch * self.heads * splits, *chunks)](
            x, v, _or(w, v), _or(out, v), _or(self.e, v), parts, n, self.heads, splits, span,
            *x.stride()[:3], *v.stride()[:3], *_narrow(w), *_or(out, v).stride()[:3],
            GRAD=out is not None, WEIGHTED=weighted, PACKED=x.ndim == 3, PV=pieces, **self.sizes,
            T=tile, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return parts

    def mix(
        self,
        parts: Tensor,
        kind: int = 0,
        before: Tensor | None = None,
        after: Tensor | None = None,
        keep: int = 0,
        walsh: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The table, its Walsh coefficients, the floors of its blocks, and the sums of the parts (F, keep)."""
        if parts.shape[2] > 32:
            parts = parts.sum(2, keepdim=True)
        d, more = self.sizes["D"], before if after is None else after
        block = max(16, 1 << self.group["S"])
        columns = max(16, min(64, _padded(d + 1), 2048 // block))
        blocks = -(-self.rows // block)
        table = self.new(self.rows, (d + 4) // 4 * 4)
        kept, floors = self.new(self.rows, keep), self.new(blocks)
        coefficients = torch.empty_like(table) if walsh else table
        mix[self.batch * self.heads, blocks, -(-(d + 1) // columns)](
            parts, parts if more is None else more.contiguous(), self.f, kept, table, coefficients, floors,
            self.heads, parts.shape[2], self.stride, KIND=kind, FULL=self.full,
            MORE=0 if more is None else 1 if after is None else 2, KEPT=keep > 0, WALSH=walsh,
            **self.group, D=d, LI=parts.shape[4], LK=keep, BR=block, BC=columns, num_warps=1 if block == 16 else 2,
        )  # fmt: skip
        return table, coefficients, floors, kept

    def gather(self, table: Tensor, floors: Tensor, out: Tensor, below: Tensor) -> None:
        """Write what queries read, and their denominators."""
        n, d = out.shape[2:]
        tile, warps, stages = (64 if d <= 32 else 32, 1, 3) if self.half and not self.wide else (32, 2, 2)
        tile = min(tile, _padded(n))
        splits, span = self.split(n, tile)
        gather[self.batch * self.heads * splits, -(-d // self.sizes["BE"])](
            self.q, table, floors, out, below, n, self.heads, splits, span, *self.q.stride()[:3], *out.stride()[:3],
            PACKED=self.q.ndim == 3, P=self.pieces["P"], BLOCKS=floors.shape[2], **self.sizes,
            T=tile, STAGES=stages, num_warps=warps,
        )  # fmt: skip

    def flips(
        self, as_query: Tensor | None, as_key: Tensor | None, table: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of tokens as queries, keys or both; of values, and of weights."""
        x, v = self.k if as_query is None else self.q, self.v
        packed = x.ndim == 3
        n, d = x.shape[2], v.shape[3]
        dx = None if packed else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dv = dw = None
        if as_key is not None:
            dv = self.new(n, d, dtype=v.dtype)
            dw = None if self.weight is None else self.new(n)
        elif packed:
            return dx, dv, dw
        tile, warps, stages = (32, 2, 2) if self.half and not self.wide else (16, 2, 1)
        splits, span = self.split(n, tile)
        grad = v if as_query is None else self.grad
        flips[(self.batch * self.heads * splits,)](
            x, grad, v, _or(self.weight, v), self.below, _or(self.e, v), _or(as_query, v), _or(as_key, v), _or(table, v),
            _or(dx, v), _or(dv, v), _or(dw, v), n, self.heads, splits, span, *x.stride()[:3], *grad.stride()[:3],
            *v.stride()[:3], *_narrow(self.weight), QUERIES=as_query is not None, KEYS=as_key is not None,
            WEIGHTED=self.weight is not None, PACKED=packed, **self.pieces, **self.sizes,
            T=tile, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return dx, dv, dw

    def pairs(self, grads: Tensor, total: Tensor) -> Tensor:
        """How much each pair of values adds, summed over parts of the samples: (places, H, sides, F, 2^S or S + 1)."""
        values = 1 << self.group["S"]
        side = min(CHUNK, max(16, values))
        sides, places = max(1, values // side), min(self.batch, 32)
        out = self.square(places, 1 if self.full else sides)
        pairs[self.heads, -(-self.rows // side) * sides, places](
            grads, total, out, self.heads, self.batch, *total.stride()[:2], FULL=self.full, S=self.group["S"],
            F=self.rows, D=self.sizes["D"], LI=total.shape[3], SIDE=side, BC=32, num_warps=2,
        )  # fmt: skip
        return out

    def square(self, lead: int, parts: int) -> Tensor:
        size = self.group["S"]
        shape = (lead, self.heads, parts, self.rows, 1 << size if self.full else size + 1)
        return torch.empty(shape, device=self.v.device)

    def scan(self, parts: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Running sums of stretches of keys, or, once `e` is known, from the last one back of queries; and of all."""
        before, own = torch.empty_like(parts), self.new(self.rows, self.sizes["D"] + 1)
        state = None if state is None else state.contiguous()
        scan[self.batch * self.heads, -(-self.rows * parts.shape[4] // 128)](
            parts, _or(state, parts), before, own, parts.shape[2], STATE=state is not None, REVERSE=self.e is not None,
            F=self.rows, D=self.sizes["D"], SIZE=128, num_warps=1,
        )  # fmt: skip
        return before, own

    def walk(
        self, before: Tensor, keys: bool = False, out: Tensor | None = None, below: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """In causal order: the output; or gradients of queries and of pairs; or those of keys, values and weights."""
        v, dim, forward = self.v, self.sizes["BF"], out is not None
        mats = torch.empty(self.f.shape[0], 2, 2, dim, dim, device=v.device)
        matrices[self.f.shape[0], 2](
            self.f, mats, self.stride, FULL=self.full, **self.group, BF=dim, num_warps=2
        )
        query = (self.q, _or(self.grad, v), _or(self.below, v), _or(self.e, v))
        key = (self.k, v, _or(self.weight, v), v)
        one, two = (key, query) if keys else (query, key)
        x, dx, dw, dpairs = one[0], None, None, None
        splits = before.shape[2]
        if not forward:
            dx = None if x.ndim == 3 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if keys:
                out = self.new(*v.shape[2:], dtype=v.dtype)
                dw = None if self.weight is None else self.new(v.shape[2])
            else:
                dpairs = self.square(self.batch, splits)
        causal[(self.batch * self.heads * splits,)](
            *one, *two, before, mats[:, int(keys)], _or(out, v), _or(below, v), _or(dx, v), _or(dw, v), _or(dpairs, v),
            v.shape[2], self.heads, splits, STRETCH, 0 if self.stride == 0 else mats.stride(0),
            *self.strides(one), *self.strides(two), *_or(out, v).stride()[:3],
            KEYS=keys, READ=out is not None, FLIP=not forward and (dpairs is not None or dx is not None),
            PAIRS=dpairs is not None, FULL=self.full, WEIGHTED=self.weight is not None,
            PACKED=x.ndim == 3, PACKED2=two[0].ndim == 3, **self.pieces, **self.sizes, T=32, num_warps=2,
        )  # fmt: skip
        return (dx, out, dw) if keys else (dx, dpairs)

    def strides(self, tokens: tuple[Tensor, ...]) -> tuple[int, ...]:
        x, a, w, _ = tokens
        return (
            *x.stride()[:3],
            *a.stride()[:3],
            *_narrow(w if w is self.below or w is self.weight else None),
        )


def _padded(width: int) -> int:
    """The power of two, 16 or more, that a width takes in a tile."""
    return max(16, 1 << (width - 1).bit_length())


def _last(x: Tensor) -> Tensor:
    """Channels side by side."""
    return x if x.ndim == 3 or x.stride(-1) == 1 else x.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x


def _narrow(w: Tensor | None) -> tuple[int, int, int]:
    """Strides of one number a token, for all heads or for each."""
    return (0, 0, 0) if w is None else (w.stride(0), 0 if w.shape[1] == 1 else w.stride(1), w.stride(2))


def _pieces(v: Tensor) -> int:
    """As the sum of how many bf16 numbers v is exact."""
    return {torch.bfloat16: 1, torch.float16: 2}.get(v.dtype, 3)
