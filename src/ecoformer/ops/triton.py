# mypy: ignore-errors
"""Kernels in Triton, for NVIDIA GPUs. `TRITON_INTERPRET=1`, set before the import, runs them on CPU tensors.

Without causal order `scatter` adds a stretch of tokens to the rows they pick, `mix` adds stretches up and
lets rows exchange, `read` reads; in the backward also what each bit changes. In causal order `scan` makes
running sums of the stretches, and `causal` walks through each.

Products are of bf16 numbers; a wider number goes in as the sum of two or three (`product`). What a bit
changes comes from a group's Walsh coefficients, not from the difference of two reads: the constant part of
an affinity costs no digits. Programs have one or two warps: with four, 64 rows would become asynchronous
products (wgmma), which assemblers before CUDA 13.3 get wrong.

Known to the compiler: BITS of a code, S of a group, F = G 2^S rows, D channels; BF, BE, CB are the rows,
channels and bits of a chunk, T the tokens of a tile; P pieces of a sum, PV of a value. Sums lie in memory as
(F, LD), with the count of keys in column D.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ecoformer.affinity import group_size
from ecoformer.ops import eager
from ecoformer.ops.eager import FLOOR, Gradients

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    jit = kernel = lambda function: function
else:
    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
    LOW = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)  # the interpreter's bf16 product is wrong
    NARROW = tl.constexpr(8 if VERSION >= (3, 5) else 16)  # columns that a product must have
    LEAST = tl.constexpr(FLOOR)
    jit = triton.jit
    # Nothing is compiled anew for another length.
    kernel = partial(triton.jit, do_not_specialize=("n", "heads", "splits", "span", "batches"))

CHUNK = 64
"""Rows and channels of a state that one program holds."""
STRETCH = 256
"""Tokens in causal order that share one state before them."""
LONGEST = 4096
"""Tokens of a sum in one piece."""


# ---- Tiles and products ------------------------------------------------------------------------------------


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
def store_tile(at, tile, start, n, stride, first, width, BW: tl.constexpr, T: tl.constexpr):
    """The inverse of `load_tile`."""
    rows, columns = tl.arange(0, T), tl.arange(0, BW)
    inside = (start + rows < n)[:, None] & (first + columns < width)[None, :]
    at += far(start) * stride + first
    tl.store(at + rows[:, None] * stride + columns[None, :], tile.to(at.dtype.element_ty), mask=inside)


@jit
def load_narrow(at, start, n, stride, T: tl.constexpr):
    """One fp32 number of each token, zero beyond the last."""
    rows = tl.arange(0, T)
    return tl.load(at + far(start) * stride + rows * stride, mask=start + rows < n, other=0).to(tl.float32)


@jit
def load_rows(
    at, chunk, first, F: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr
):
    """A chunk of the rows of a state, and their counts (BF,)."""
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
    """The numbers (T, CB) whose signs are the bits of a chunk's groups; bits past the last are -1."""
    OWN: tl.constexpr = S if (1 << S) >= BF else (BF >> S) * S
    first, rows, bit = ((chunk * BF) >> S) * S, tl.arange(0, T), tl.arange(0, CB)
    live = start + rows < n
    inside = (bit < OWN) & (first + bit < BITS)
    if PACKED:
        code = tl.load(x + far(start) * stride + rows * stride, mask=live, other=0).to(tl.int64) >> first
        y = ((code.to(tl.int32)[:, None] >> bit[None, :]) & 1).to(tl.float32) - 0.5
    elif OWN == CB and BITS % CB == 0:
        y = load_tile(x, start, n, stride, first, BITS, CB, T)
    else:
        at = x + far(start) * stride + first + rows[:, None] * stride + bit[None, :]
        y = tl.load(at, mask=live[:, None] & inside[None, :], other=0)
    if OWN != CB or BITS % CB != 0:
        y = tl.where(inside[None, :], y.to(tl.float32), -1.0)
    return y


@jit
def signs_of(y):
    """±1; sign(0) is +1."""
    return tl.where(y >= 0, 1.0, -1.0).to(LOW)


@jit
def walsh(x, S: tl.constexpr):
    """Rows (R, C), indexed by the bits of groups, as coefficients of the products of a group's bits ±1."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    one = (tl.arange(0, 2) == 1)[None, :, None]
    for r in tl.static_range(S):
        pair = tl.reshape(x, (R >> (r + 1), 2, C << r))
        total, difference = tl.sum(pair, 1)[:, None, :], tl.sum(tl.where(one, pair, -pair), 1)[:, None, :]
        x = tl.reshape(0.5 * tl.where(one, difference, total), (R, C))
    return x


@jit
def to_bits(z, codes, signs, P: tl.constexpr):
    """Half the difference of each bit's two values (T, CB), from coefficients z (T, BF) of products of bits.

    The terms that contain the bit count, times the bit. A term is negative where an odd number of its bits
    is; their number, added to 1.5 * 2^16, has its lowest bit at place 7 of the fp32 number.
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
def load_seen(
    v, weight, start, n, stride, first, WEIGHTED: tl.constexpr, D: tl.constexpr, BE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Values of keys, zero where the weight is."""
    values = load_tile(v, start, n, stride, first, D, BE, T)
    return tl.where(weight[:, None] == 0, 0.0, values.to(tl.float32)).to(values.dtype) if WEIGHTED else values


@jit
def inverse_of(below):
    """One over denominators, zero where no key was seen; they are negative where they were at their floor."""
    one = tl.full(below.shape, 1.0, tl.float32)
    return tl.where(below == 0, 0.0, tl.div_rn(one, tl.where(below == 0, 1.0, tl.abs(below))))


@jit
def bounded(below, floor):
    """Denominators; minus their floor where they are below it."""
    return tl.where(below < floor, -floor, below)


@jit
def matrix(
    f, rows, columns, KIND: tl.constexpr, FULL: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
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


# ---- Without causal order ----------------------------------------------------------------------------------


@kernel
def scatter(
    x, v, w, out, x_b, x_h, x_n, v_b, v_h, v_n, w_b, w_h, w_n, o_b, o_h, o_n,
    e, parts, n, heads, splits, span,
    GRAD: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr, PV: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
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
    parts += (row * splits + split) * (F * LD)
    rows = chunk * BF + tl.arange(0, BF)
    columns = first + tl.arange(0, BE)
    tl.store(
        parts + rows[:, None] * LD + columns[None, :], sums, mask=(rows < F)[:, None] & (columns < D)[None, :]
    )
    tl.store(parts + rows * LD + D, tl.sum(ones, 1), mask=(rows < F) & (first == 0))


@kernel
def mix(
    parts, f, kept, table, coefficients, floors, heads, splits, f_h,
    KIND: tl.constexpr, FULL: tl.constexpr, KEPT: tl.constexpr, WALSH: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
    LI: tl.constexpr, LK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add up stretches, keep their sums if KEPT, and mix: table, Walsh coefficients if WALSH, floors."""
    row, block, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BC
    f += (row % heads) * f_h
    rows, columns = block * BR + tl.arange(0, BR), first + tl.arange(0, BC)
    mixed = tl.zeros((BR, BC), tl.float32)
    total, count = 0.0, 0.0
    for r in range(0, BR, 16):
        part = block * BR + r + tl.arange(0, 16)
        inside = (part < F)[:, None] & (columns <= D)[None, :]
        x = tl.zeros((16, BC), tl.float32)
        for i in range(0, splits, 4):
            for j in tl.static_range(4):
                at = parts + (row * splits + i + j) * (F * LI) + part[:, None] * LI + columns[None, :]
                x += tl.load(at, mask=inside & (i + j < splits), other=0)
        if KEPT:
            tl.store(kept + row * (F * LK) + part[:, None] * LK + columns[None, :], x, mask=inside)
        weights = matrix(f, rows, part, KIND, FULL, BITS, S, F)
        mixed = product(weights, x, mixed, 3, 3)
        total += tl.sum(tl.sum(weights, 1), 0)
        group = (part < block * BR + (1 << S))[:, None] & (columns == D)[None, :]
        count += tl.sum(tl.sum(tl.where(group, x, 0.0), 1), 0)
    inside = (rows < F)[:, None] & (columns <= D)[None, :]
    places = row * (F * LD) + rows[:, None] * LD + columns[None, :]
    tl.store(table + places, mixed, mask=inside)
    if WALSH:
        tl.store(coefficients + places, walsh(mixed, S), mask=inside)
    floor = LEAST * total / (1 << (2 * S)) * count  # every group counts all keys: floors of blocks add up
    tl.store(floors + row * tl.num_programs(1) + block, floor, mask=(first <= D) & (first + BC > D))


@kernel
def read(
    x, grad, v, w, out, x_b, x_h, x_n, g_b, g_h, g_n, v_b, v_h, v_n, w_b, w_h, w_n, o_b, o_h, o_n,
    below, e, as_query, as_key, table, floors, dx, dw, n, heads, splits, span,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr,
    P: tl.constexpr, PV: tl.constexpr, BLOCKS: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A stretch of tokens reads: output and denominators, or gradients as QUERIES, as KEYS, or as both.

    The gradient of bits comes from the coefficients `as_query` and `as_key`; out is the gradient of values.
    """
    row, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    grad += batch * g_b + head * g_h
    v += batch * v_b + head * v_h
    w += batch * w_b + head * w_h
    out += batch * o_b + head * o_h
    below += row * n
    e += row * n
    dx += row * n * BITS
    dw += row * n
    as_query += row * (F * LD)
    as_key += row * (F * LD)
    table += row * (F * LD)
    FORWARD: tl.constexpr = not QUERIES and not KEYS
    FLIP: tl.constexpr = not FORWARD and not PACKED
    CHUNKS: tl.constexpr = (F + BF - 1) // BF
    SHARE: tl.constexpr = 1 if (1 << S) <= BF else (1 << S) // BF  # chunks of a group
    OWN: tl.constexpr = S if (1 << S) >= BF else (BF >> S) * S
    ONE: tl.constexpr = (F <= BF) & (D <= BE)
    if ONE:
        if QUERIES and FLIP:
            queries, query_ones = load_rows(as_query, 0, 0, F, D, LD, BF, BE)
        if KEYS and FLIP:
            keys, key_ones = load_rows(as_key, 0, 0, F, D, LD, BF, BE)
        if KEYS or FORWARD:
            reads, read_ones = load_rows(table, 0, 0, F, D, LD, BF, BE)
    if FORWARD:
        block = tl.arange(0, 128)
        floor = tl.sum(tl.load(floors + row * BLOCKS + block, mask=block < BLOCKS, other=0), 0)
    for i in tl.range(split * span, tl.minimum(split * span + span, n), T, num_stages=STAGES):
        rows = i + tl.arange(0, T)
        if KEYS:
            weight = load_narrow(w, i, n, w_n, T) if WEIGHTED else tl.full((T,), 1.0, tl.float32)
        if ONE:
            tokens = load_bits(x, i, n, x_n, 0, PACKED, BITS, S, BF, CB, T)
            if KEYS:
                values = load_seen(v, weight, i, n, v_n, 0, WEIGHTED, D, BE, T)
        if FLIP:
            if QUERIES:
                inverse, to_count = inverse_of(load_narrow(below, i, n, 1, T)), load_narrow(e, i, n, 1, T)
            for unit in range(CHUNKS // SHARE):
                y = tokens if ONE else load_bits(x, i, n, x_n, unit * SHARE, PACKED, BITS, S, BF, CB, T)
                codes = signs_of(y)
                found = tl.zeros((T, CB), tl.float32)
                for chunk in range(unit * SHARE, unit * SHARE + SHARE):
                    z = tl.zeros((T, BF), tl.float32)
                    if QUERIES:
                        for c in range(0, D, BE):
                            if ONE:
                                sums, ones = queries, query_ones
                            else:
                                sums, ones = load_rows(as_query, chunk, c, F, D, LD, BF, BE)
                            z = product(load_tile(grad, i, n, g_n, c, D, BE, T), tl.trans(sums), z, PV, P)
                            if c + BE >= D:
                                z = z * inverse[:, None] + to_count[:, None] * ones[None, :]
                    if KEYS:
                        more = tl.zeros((T, BF), tl.float32)
                        for c in range(0, D, BE):
                            if ONE:
                                sums, ones, tile = keys, key_ones, values
                            else:
                                sums, ones = load_rows(as_key, chunk, c, F, D, LD, BF, BE)
                                tile = load_seen(v, weight, i, n, v_n, c, WEIGHTED, D, BE, T)
                            more = product(tile, tl.trans(sums), more, PV, P)
                            if c + BE >= D:
                                z += (more + ones[None, :]) * weight[:, None]
                    found += to_bits(z, codes, patterns(chunk, S, BF, CB), P)
                found = tl.where(tl.abs(y.to(tl.float32)) <= 1, found, 0.0)
                first = ((unit * SHARE * BF) >> S) * S
                store_tile(dx, found, i, n, BITS, first, tl.minimum(first + OWN, BITS), CB, T)
        if KEYS or FORWARD:
            to_weight = tl.zeros((T,), tl.float32)
            for c in range(0, D, BE):
                top, counts = tl.zeros((T, BE), tl.float32), tl.zeros((T, NARROW), tl.float32)
                for chunk in range(CHUNKS):
                    y = tokens if ONE else load_bits(x, i, n, x_n, chunk, PACKED, BITS, S, BF, CB, T)
                    hot = one_hot(signs_of(y), patterns(chunk, S, BF, CB), S)
                    if ONE:
                        sums, ones = reads, read_ones
                    else:
                        sums, ones = load_rows(table, chunk, c, F, D, LD, BF, BE)
                    top = product(hot, sums, top, 1, P)
                    if WEIGHTED or FORWARD:
                        counts = tl.dot(hot, columns_of(ones), counts)
                count = tl.sum(counts, 1)
                if FORWARD:
                    count = bounded(count, floor)
                    top *= inverse_of(count)[:, None]
                    tl.store(below + rows, count, mask=(rows < n) & (c == 0))
                else:
                    if WEIGHTED:
                        tile = values if ONE else load_seen(v, weight, i, n, v_n, c, WEIGHTED, D, BE, T)
                        to_weight += tl.sum(tile.to(tl.float32) * top, 1)
                        to_weight += tl.where(c == 0, count, 0.0)
                    top *= weight[:, None]
                store_tile(out, top, i, n, o_n, c, D, BE, T)
            if KEYS and WEIGHTED:
                tl.store(dw + rows, tl.where(weight == 0, 0.0, to_weight), mask=rows < n)


@kernel
def pairs(
    left, right, out, heads, batches, FULL: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    LD: tl.constexpr, SIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """How much each pair of a group's values adds to the result, summed over some samples."""
    SIDES: tl.constexpr = 1 if (1 << S) <= SIDE else (1 << S) // SIDE
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
            at = right + row * (F * (D + 1)) + columns[:, None] * (D + 1) + c
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


# ---- Causal order ------------------------------------------------------------------------------------------


@kernel
def scan(
    parts, state, before, own, splits, STATE: tl.constexpr, REVERSE: tl.constexpr,
    F: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The state and all sums before each stretch (after it if REVERSE); the sum of all as (F, D + 1)."""
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
):  # fmt: skip
    """What each row reads from all (BF, BF), and its Walsh coefficients: for queries, and for keys."""
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
    x, a, wa, x2, c, wc, out, x_b, x_h, x_n, a_b, a_h, a_n, wa_b, wa_h, wa_n, x2_b, x2_h, x2_n, c_b, c_h, c_n,
    wc_b, wc_h, wc_n, o_b, o_h, o_n, e, before, mats, below, dx, dw, dpairs, mats_h, n, heads, splits, span,
    KEYS: tl.constexpr, READ: tl.constexpr, FLIP: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr,
    WEIGHTED: tl.constexpr, PACKED: tl.constexpr, PACKED2: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    LD: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, CB: tl.constexpr, T: tl.constexpr,
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
    e += row * n
    x2 += batch * x2_b + head * x2_h
    c += batch * c_b + head * c_h
    wc += batch * wc_b + head * wc_h
    out += batch * o_b + head * o_h
    below += row * n
    dx += row * n * BITS
    dw += row * n
    mats += head * mats_h
    PA: tl.constexpr = PV if KEYS and not WEIGHTED else P
    PC: tl.constexpr = PV if not KEYS and not WEIGHTED else P
    sums, ones = load_rows(before + (row * splits + split) * (F * LD), 0, 0, F, D, LD, BF, BE)
    ones = tl.where(tl.arange(0, NARROW)[None, :] == 0, ones[:, None], 0.0)
    row_ = tl.arange(0, BF)
    square = row_[:, None] * BF + row_[None, :]
    share = LEAST / (1 << (2 * S)) * tl.sum(tl.sum(tl.load(mats + square), 1), 0)
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
        others, one = load_values(c, wc, e, i, n, c_n, wc_n, 0, KEYS, WEIGHTED, D, BE, T)
        counted = tl.sum(ones, 1)
        if KEYS or FLIP:
            values, weight = load_values(a, wa, e, i, n, a_n, wa_n, 0, not KEYS, WEIGHTED, D, BE, T)
        if READ:
            mixed = product(hot, tl.load(mats + square), tl.zeros((T, BF), tl.float32), 1, P)
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
                transform = tl.load(mats + BF * BF + square)
                z = product(held, tl.trans(transform), tl.zeros((T, BF), tl.float32), P, P)
                bits = tl.where(tl.abs(y.to(tl.float32)) <= 1, to_bits(z, codes, signs, P), 0.0)
                store_tile(dx, bits, i, n, BITS, 0, BITS, CB, T)
            if PAIRS:
                added = product(tl.trans(hot), held, added, 1, P)
        sums = product(tl.trans(hot2), others, sums, 1, PC)
        ones = tl.dot(tl.trans(hot2), columns_of(one), ones)
    if PAIRS:
        store_pairs(dpairs, row * splits + split, added, row_, row_, FULL, S, F)


# ---- Launches ----------------------------------------------------------------------------------------------


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED.value:
        return None if device.type == "cpu" else "Triton's interpreter runs on the CPU"
    if VERSION < (3, 3):
        return "they need Triton 3.3 or newer"  # the compiler of 3.2 aborts the process on some kernels
    if device.type != "cuda" or torch.version.hip is not None:
        return f"they are for NVIDIA GPUs, not for {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 or newer"
    return None


def forward(
    q: Tensor, k: Tensor | None, v: Tensor, f: Tensor, weight: Tensor | None, state: Tensor | None, bits: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `eager.forward`."""
    call = _Call(q, k, v, f, weight, bits)
    if is_causal and call.wide:
        return eager.forward(q, k, v, f, weight, state, bits, is_causal)
    (batch, heads, n), d = q.shape[:3], v.shape[3]
    call.out, call.below = v.new_empty(batch, n, heads, d).transpose(1, 2), call.new(n)
    with call.device:
        if is_causal:
            before, own = call.scan(call.scatter(STRETCH), state)
            call.walk(before)
        else:
            parts = call.scatter()
            if state is None:
                table, _, floors, own = call.mix(parts, keep=d + 1)
            else:
                own = parts.sum(2)[..., : d + 1].contiguous()
                table, _, floors, _ = call.mix(own + state.float())
            call.read(table=table, floors=floors)
    return call.out, own, call.below


def backward(
    grad: Tensor, grad_own: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor, f: Tensor,
    weight: Tensor | None, state: Tensor | None, out: Tensor, own: Tensor, below: Tensor, bits: int,
    is_causal: bool,
) -> Gradients:  # fmt: skip
    """As `eager.backward`."""
    call = _Call(q, k, v, f, weight, bits)
    if is_causal and call.wide:
        given = (grad, grad_own, q, k, v, f, weight, state, out, own, below, bits, is_causal)
        return eager.backward(*given)
    call.grad, call.out, call.below = _last(grad), _last(out), below.contiguous()
    with call.device:
        if is_causal:
            before, _ = call.scan(call.scatter(STRETCH), state)
            after, rows = call.scan(call.scatter(STRETCH, queries=True))
            dq, pairs = call.walk(before)
            dk, dv, dw = call.walk(after, keys=True)
            if grad_own is not None:
                table, as_key, *_ = call.mix(grad_own.float(), 2, walsh=True)
                found = zip((dk, dv, dw), call.read(as_key=as_key, table=table), strict=True)
                dk, dv, dw = (None if x is None else x + y for x, y in found)
            if k is None and dq is not None:
                dq = dq + dk
            dstate = None if state is None else call.mix(rows, 1)[0]
        else:
            parts = call.scatter(queries=True)
            total = (own if state is None else own + state.float()).contiguous()
            as_query = call.mix(total, walsh=True)[1]
            dstate, as_key, _, rows = call.mix(parts, 1, keep=parts.shape[-1], walsh=True)
            table, pairs = dstate, call.pairs(rows, total)
            if grad_own is not None:
                wide = functional.pad(grad_own.float(), (0, table.shape[-1] - grad_own.shape[-1]))
                table, as_key, *_ = call.mix(table + wide, 2, walsh=True)
            if k is None:
                dq, dv, dw = call.read(as_query, as_key, table)
            else:
                dq = call.read(as_query)[0]
                dk, dv, dw = call.read(as_key=as_key, table=table)
    pairs = pairs.sum((0, 2)).unflatten(1, (f.shape[1], -1))
    df = (pairs if f.ndim == 4 else pairs.sum(2)).sum_to_size(f.shape).to(f.dtype)
    return (
        q.new_empty(0) if dq is None else dq,
        None if k is None else k.new_empty(0) if dk is None else dk,
        dv,
        df,
        None if weight is None else dw.sum_to_size(weight.shape).to(weight.dtype),
        None if state is None else dstate[..., : state.shape[-1]].to(state.dtype),
    )


class _Call:
    """What the launches of a call share: tensors as kernels take them, and sizes."""

    def __init__(self, q: Tensor, k: Tensor | None, v: Tensor, f: Tensor, weight: Tensor | None, bits: int):
        self.q, self.v, self.f = _last(q), _last(v), f.contiguous()
        self.k = self.q if k is None else _last(k)
        self.weight = None if weight is None else weight.expand(v.shape[:3])
        self.grad = self.out = self.below = self.e = None
        self.device = torch.cuda.device(v.device) if v.is_cuda else nullcontext()
        self.heads, d, size = v.shape[1], v.shape[3], group_size(f)
        self.programs = v.shape[0] * self.heads
        self.f_h = 0 if f.shape[0] == 1 else self.f.stride(0)
        rows = f.shape[1] << size
        self.sizes = {"BITS": bits, "S": size, "F": rows, "D": d, "LD": (d + 4) // 4 * 4}
        chunk = min(CHUNK, _padded(rows))
        self.chunks = {"BF": chunk, "BE": min(CHUNK, _padded(d)), "CB": _padded(max(1, chunk >> size) * size)}
        self.wide, self.half = rows > CHUNK or d > CHUNK, v.dtype != torch.float32
        # Values go in exactly; in half precision sums and gradients have 16 bits.
        self.pieces = {
            "P": 2 if self.half else 3,
            "PV": {torch.bfloat16: 1, torch.float16: 2}.get(v.dtype, 3),
        }

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*self.v.shape[:2], *shape, dtype=dtype, device=self.v.device)

    def some(self, *tensors: Tensor | None) -> list[Tensor]:
        """With a stand-in for what a launch does not use."""
        return [self.v if x is None else x for x in tensors]

    def strided(self, *tensors: Tensor | None) -> list[Tensor | int]:
        """Tensors, then the strides of all."""
        given = self.some(*tensors)
        return [*given, *(stride for x in given for stride in x.stride()[:3])]

    def split(self, n: int, tile: int) -> tuple[int, int]:
        """Into how many stretches of how many tokens a head is cut: as many programs as run at once."""
        processors = (
            torch.cuda.get_device_properties(self.v.device).multi_processor_count if self.v.is_cuda else 2
        )
        span = min(max(n * self.programs // (7 * processors) + 1, 2 * tile), LONGEST)
        span = -(-span // tile) * tile
        return max(1, -(-n // span)), span

    def scatter(self, span: int | None = None, queries: bool = False) -> Tensor:
        """Sums of stretches (B, H, splits, F, LD): of keys, or of the gradients of queries."""
        x, v, w, pieces = self.k, self.v, self.weight, 3 if self.weight is not None else self.pieces["PV"]
        if queries:
            x, v, w, pieces = self.q, self.grad, self.below, self.pieces["P"]
            self.e = torch.empty_like(self.below)
        n, rows, d = v.shape[2], self.sizes["F"], v.shape[3]
        warps, stages = (1 if d <= 32 else 2, 3) if self.half and not self.wide else (2, 2)
        tile = min(32, _padded(n))
        splits, span = self.split(n, tile) if span is None else (max(1, -(-n // span)), span)
        parts = self.new(splits, rows, self.sizes["LD"])
        grid = (self.programs * splits, -(-rows // self.chunks["BF"]), -(-d // self.chunks["BE"]))
        scatter[grid](
            *self.strided(x, v, w, self.out), *self.some(self.e, parts), n, self.heads, splits, span,
            GRAD=queries, WEIGHTED=w is not None, PACKED=x.ndim == 3, PV=pieces,
            **self.sizes, **self.chunks, T=tile, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return parts

    def mix(self, parts: Tensor, kind: int = 0, keep: int = 0, walsh: bool = False) -> tuple[Tensor, ...]:
        """The table, its Walsh coefficients, floors that add up, and the sums of the parts (F, keep)."""
        parts = parts.unsqueeze(2) if parts.ndim == 4 else parts
        parts = parts.contiguous() if parts.shape[2] <= 32 else parts.sum(2, keepdim=True)
        rows, d, block = self.sizes["F"], self.sizes["D"], max(16, 1 << self.sizes["S"])
        blocks, columns = -(-rows // block), max(16, min(64, _padded(d + 1), 2048 // block))
        table, floors, kept = self.new(rows, self.sizes["LD"]), self.new(blocks), self.new(rows, keep)
        coefficients = torch.empty_like(table) if walsh else table
        mix[self.programs, blocks, -(-(d + 1) // columns)](
            parts, self.f, kept, table, coefficients, floors, self.heads, parts.shape[2], self.f_h,
            KIND=kind, FULL=self.f.ndim == 4, KEPT=keep > 0, WALSH=walsh, **self.sizes,
            LI=parts.shape[4], LK=keep, BR=block, BC=columns, num_warps=1 if block == 16 else 2,
        )  # fmt: skip
        return table, coefficients, floors, kept

    def read(
        self,
        as_query: Tensor | None = None,
        as_key: Tensor | None = None,
        table: Tensor | None = None,
        floors: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The output, into `out`; or gradients of queries, keys or both, of values, and of weights."""
        forward, keys = floors is not None, as_key is not None
        x, v = self.q if forward or as_query is not None else self.k, self.v
        n, packed = x.shape[2], x.ndim == 3
        dx = None if packed or forward else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if packed and not forward and not keys:
            return None, None, None
        out = self.new(*v.shape[2:], dtype=v.dtype) if keys else self.out
        dw = self.new(n) if keys and self.weight is not None else None
        tile, warps, stages = (32, 1 if forward else 2, 3 if forward else 2) if self.half else (16, 2, 2)
        tile, stages = (16, 1) if self.wide and not forward else (tile, stages)
        splits, span = self.split(n, tile)
        read[(self.programs * splits,)](
            *self.strided(x, self.grad, v, self.weight, out),
            *self.some(self.below, self.e, as_query, as_key, table, floors, dx, dw),
            n, self.heads, splits, span,
            QUERIES=as_query is not None, KEYS=keys, WEIGHTED=self.weight is not None, PACKED=packed,
            BLOCKS=floors.shape[2] if forward else 0, **self.pieces, **self.sizes, **self.chunks,
            T=tile, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return dx, out, dw

    def pairs(self, rows: Tensor, total: Tensor) -> Tensor:
        """How much each pair of values adds, summed over parts of the samples; see `found_pairs`."""
        values = 1 << self.sizes["S"]
        side, places = min(CHUNK, max(16, values)), min(self.v.shape[0], 32)
        sides = max(1, values // side)
        out = self.found_pairs(places, 1 if self.f.ndim == 4 else sides)
        sizes = {name: self.sizes[name] for name in ("S", "F", "D", "LD")}
        pairs[self.heads, -(-self.sizes["F"] // side) * sides, places](
            rows, total, out, self.heads, self.v.shape[0], FULL=self.f.ndim == 4, **sizes, SIDE=side, BC=32,
            num_warps=2,
        )  # fmt: skip
        return out

    def found_pairs(self, places: int, parts: int) -> Tensor:
        """For each row what the values of its group, or distances, add: in `places` and `parts`."""
        values = self.f.shape[-1]
        return torch.empty(places, self.heads, parts, self.sizes["F"], values, device=self.v.device)

    def scan(self, parts: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums before each stretch (of queries, once `e` is known, after it), and of all."""
        rows, d = self.sizes["F"], self.sizes["D"]
        before, own = torch.empty_like(parts), self.new(rows, d + 1)
        scan[self.programs, -(-rows * parts.shape[4] // 128)](
            parts, parts if state is None else state.contiguous(), before, own, parts.shape[2],
            STATE=state is not None, REVERSE=self.e is not None, F=rows, D=d, LD=parts.shape[4], SIZE=128,
            num_warps=1,
        )  # fmt: skip
        return before, own

    def walk(self, before: Tensor, keys: bool = False) -> tuple[Tensor | None, ...]:
        """In causal order the output; gradients of queries and pairs; or of keys, values and weights."""
        v, dim, forward, splits = self.v, self.chunks["BF"], self.grad is None, before.shape[2]
        mats = torch.empty(self.f.shape[0], 2, 2, dim, dim, device=v.device)
        group = {name: self.sizes[name] for name in ("BITS", "S", "F")}
        matrices[self.f.shape[0], 2](
            self.f, mats, self.f_h, FULL=self.f.ndim == 4, **group, BF=dim, num_warps=2
        )
        query, key = (self.q, self.grad, self.below), (self.k, v, self.weight)
        one, other = (key, query) if keys else (query, key)
        x, out, dw, pairs = one[0], self.out, None, None
        dx = None if forward or x.ndim == 3 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if keys:
            out, dw = (
                self.new(*v.shape[2:], dtype=v.dtype),
                None if self.weight is None else self.new(v.shape[2]),
            )
        elif not forward:
            pairs = self.found_pairs(v.shape[0], splits)
        causal[(self.programs * splits,)](
            *self.strided(*one, *other, out),
            *self.some(self.e, before, mats[:, int(keys)], self.below, dx, dw, pairs),
            mats.stride(0) if self.f_h else 0, v.shape[2], self.heads, splits, STRETCH,
            KEYS=keys, READ=forward or keys, FLIP=dx is not None or pairs is not None,
            PAIRS=pairs is not None, FULL=self.f.ndim == 4, WEIGHTED=self.weight is not None,
            PACKED=x.ndim == 3, PACKED2=other[0].ndim == 3,
            **self.pieces, **self.sizes, **self.chunks, T=32 if self.half else 16, num_warps=2, num_stages=1,
        )  # fmt: skip
        return (dx, out, dw) if keys else (dx, pairs)


def _padded(width: int) -> int:
    """The power of two, 16 or more, that a width takes in a tile."""
    return max(16, 1 << (width - 1).bit_length())


def _last(x: Tensor) -> Tensor:
    """Channels side by side."""
    return x if x.ndim == 3 or x.stride(-1) == 1 else x.contiguous()
