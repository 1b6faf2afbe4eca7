# mypy: ignore-errors
"""Forward kernels without causal order: `gather` sums up keys, `read` reads the sums, `attend` does both."""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import (
    launched,
    load_functions,
    load_keys,
    load_packed,
    load_tile,
    marks,
    product,
    project,
    reciprocal,
    row_sums,
    signs_of,
    store_codes,
    store_tile,
    unpack,
    whole_product,
)
from ecoformer.backends.triton.state import load_parts, store_state


@triton.jit
def gather_tiles(
    x, x_n, x_c, v, v_n, v_c, mask, mask_n, codes, first, last, n, support, mean, sigma, weight, head,
    MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hash tokens first ... last of a head, store their codes, return the sums of the keys among them."""
    samples, lengths, middle, mix, scale = load_functions(
        support, mean, sigma, weight, head, D, M, BITS, BD, BM, BB
    )
    # Sums over tokens stay apart, tile position by tile position, until the end; those of values are taken
    # by tensor cores, sixteen times over.
    sums = tl.zeros((BB, BE), tl.float32)
    ones = tl.zeros((BLOCK, BB), tl.float32)
    totals = tl.zeros((16, BE), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    every = tl.full((BLOCK, 16), 1.0, tl.float32).to(tl.bfloat16)
    for start in range(first, last, BLOCK):
        keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)
        tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
        values = load_tile(v, start, n, v_n, v_c, E, BE, BLOCK)
        if MASKED:
            values = tl.where(keys[:, None], values, 0.0)
        y = project(tokens, samples, lengths, middle, mix, scale, PRECISION)
        store_codes(codes, y, start, n, BITS, BB, BLOCK)
        h = signs_of(y, BITS, BB)
        sums += whole_product(h.to(tl.bfloat16), values, PIECES, PRECISION, True)
        totals += whole_product(every, values, PIECES, PRECISION, True)
        mark = marks(tokens, keys)
        ones += h * mark[:, None]
        counts += mark
    return sums, tl.sum(ones, axis=0), tl.sum(totals, axis=0) * 0.0625, tl.sum(counts, axis=0)


@triton.jit
def read_tile(h, sums, ones, total, count, beta, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """What codes (BLOCK, BB) read from a state."""
    below = row_sums(h, ones, 3, PRECISION) + beta * count
    above = tl.broadcast_to((beta * total)[None, :], (h.shape[0], total.shape[0]))
    above = product(h, sums, PIECES, PRECISION, above)
    return above * reciprocal(tl.where(count == 0, 1.0, below))[:, None]


@triton.jit
def read_tiles(
    codes, out, out_n, out_c, first, last, n, sums, ones, total, count, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries first ... last of a head read the state by their stored codes."""
    packed = load_packed(codes, first, n, BLOCK)
    for start in range(first, last, BLOCK):
        h = unpack(packed, BITS, BB)
        packed = load_packed(codes, start + BLOCK, n, BLOCK)
        tile = read_tile(h, sums, ones, total, count, beta, PIECES, PRECISION)
        store_tile(out, tile, start, n, out_n, out_c, E, BE, BLOCK)


@launched
def gather(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n, codes, partial,
    support, mean, sigma, weight, n, heads, parts, span,
    MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums one of `parts` stretches of `span` tokens of a head."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    first = part * span
    sums, ones, total, count = gather_tiles(
        x + batch * x_b + head * x_h, x_n, x_c, v + batch * v_b + head * v_h, v_n, v_c,
        mask + batch * mask_b, mask_n, codes + row * n, first, tl.minimum(first + span, n), n,
        support, mean, sigma, weight, head,
        MASKED, PIECES, PRECISION, D, E, M, BITS, BD, BE, BM, BB, BLOCK,
    )  # fmt: skip
    partial += (row * parts + part) * ((BITS + 1) * (E + 1))
    store_state(partial, sums, ones, total, count, BITS, E, BB, BE)


@launched
def read(
    codes, partial, state, out, out_b, out_h, out_n, out_c, n, heads, state_parts, parts, span, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds up its head's state and reads it for a stretch of tokens; the first one keeps it."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = (BITS + 1) * (E + 1)
    sums, ones, total, count = load_parts(partial + row * state_parts * size, state_parts, BITS, E, BB, BE)
    if (part == 0) & (state_parts > 1):
        store_state(state + row * size, sums, ones, total, count, BITS, E, BB, BE)
    first = part * span
    read_tiles(
        codes + row * n, out + batch * out_b + head * out_h, out_n, out_c, first,
        tl.minimum(first + span, n), n, sums, ones, total, count, beta, PIECES, PRECISION,
        E, BITS, BE, BB, BLOCK,
    )  # fmt: skip


@launched
def hash_and_read(
    x, x_b, x_h, x_n, x_c, codes, partial, state, out, out_b, out_h, out_n, out_c,
    support, mean, sigma, weight, n, heads, state_parts, parts, span, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`read` for queries that are no keys and have no codes yet."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = (BITS + 1) * (E + 1)
    sums, ones, total, count = load_parts(partial + row * state_parts * size, state_parts, BITS, E, BB, BE)
    if (part == 0) & (state_parts > 1):
        store_state(state + row * size, sums, ones, total, count, BITS, E, BB, BE)
    samples, lengths, middle, mix, scale = load_functions(
        support, mean, sigma, weight, head, D, M, BITS, BD, BM, BB
    )
    x += batch * x_b + head * x_h
    out += batch * out_b + head * out_h
    first = part * span
    for start in range(first, tl.minimum(first + span, n), BLOCK):
        tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
        y = project(tokens, samples, lengths, middle, mix, scale, PRECISION)
        store_codes(codes + row * n, y, start, n, BITS, BB, BLOCK)
        h = signs_of(y, BITS, BB).to(tl.bfloat16)
        tile = read_tile(h, sums, ones, total, count, beta, PIECES, PRECISION)
        tile *= marks(tokens, start + tl.arange(0, BLOCK) < n)[:, None]
        store_tile(out, tile, start, n, out_n, out_c, E, BE, BLOCK)


@launched
def attend(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n, codes, state,
    out, out_b, out_h, out_n, out_c, support, mean, sigma, weight, n, heads, beta,
    MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program does one head from tokens to output: short sequences in a single launch."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    sums, ones, total, count = gather_tiles(
        x + batch * x_b + head * x_h, x_n, x_c, v + batch * v_b + head * v_h, v_n, v_c,
        mask + batch * mask_b, mask_n, codes + row * n, 0, n, n, support, mean, sigma, weight, head,
        MASKED, PIECES, PRECISION, D, E, M, BITS, BD, BE, BM, BB, BLOCK,
    )  # fmt: skip
    store_state(state + row * ((BITS + 1) * (E + 1)), sums, ones, total, count, BITS, E, BB, BE)
    # Codes go through memory to the threads that read them.
    tl.debug_barrier()
    read_tiles(
        codes + row * n, out + batch * out_b + head * out_h, out_n, out_c, 0, n, n,
        sums, ones, total, count, beta, PIECES, PRECISION, E, BITS, BE, BB, BLOCK,
    )  # fmt: skip
