# mypy: ignore-errors
"""Backward kernels without causal order: the state's gradient first, then that of every token and value.

With a_t = grad_t / below_t and e_t = -(a_t . out_t), the gradient of the state is the sum of
h'_t [a_t, e_t]^T over the queries: it has the state's layout, the bias's share in its last row.
The first pass keeps one over below_t, and e_t, for the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import (
    dot,
    launched,
    load_codes,
    load_functions,
    load_keys,
    load_packed,
    load_tile,
    product,
    project_back,
    reciprocal,
    row_sums,
    store_tile,
    unpack,
)
from ecoformer.backends.triton.state import load_parts, load_reads, load_state, store_reads, store_state


@triton.jit
def gather_grad_tiles(
    grad, grad_n, grad_c, codes, reads, first, last, n, sums, ones, total, count, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the state from queries first ... last of a head; stores one over below_t, and e_t."""
    to_sums = tl.zeros((BB, BE), tl.float32)
    to_ones = tl.zeros((BLOCK, BB), tl.float32)
    to_totals = tl.zeros((16, BE), tl.float32)
    packed = load_packed(codes, first, n, BLOCK)
    for start in range(first, last, BLOCK):
        h = unpack(packed, BITS, BB)
        packed = load_packed(codes, start + BLOCK, n, BLOCK)
        tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
        below = row_sums(h, ones, 3, PRECISION) + beta * count
        inverse = tl.where(count == 0, 0.0, reciprocal(tl.where(count == 0, 1.0, below)))
        # a_t . out_t from h_t, S grad_t and the sum of values, so that nobody has to keep out.
        to_codes = product(tile, tl.trans(sums), PIECES, PRECISION)
        h = h.to(tl.float32)
        e = tl.sum(h * to_codes, axis=1) + row_sums(tile, beta * total, PIECES, PRECISION)
        e *= -inverse * inverse
        store_reads(reads, inverse, e, start, n, BLOCK)
        # The sum of h_t a_t^T, with one over below_t on the narrow side.
        to_sums += product(h * inverse[:, None], tile, PIECES, PRECISION, None, True)
        columns = tl.broadcast_to(inverse[:, None], (BLOCK, 16))
        to_totals += product(columns, tile, PIECES, PRECISION, None, True)
        to_ones += h * e[:, None]
    return to_sums, tl.sum(to_ones, axis=0), beta * 0.0625 * tl.sum(to_totals, axis=0)


@triton.jit
def token_grad_tile(
    grad, grad_n, grad_c, x, x_n, x_c, v, v_n, v_c, mask, mask_n, codes, reads, to_x, to_v, start, n,
    samples, lengths, middle, mix, scale,
    sums, ones, to_sums, to_ones, to_total,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr,
    WEIGHT: tl.constexpr, MASKED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's tokens (QUERIES, KEYS or both) and values; returns the weight's (BM, BB)."""
    h = load_codes(codes, start, n, BITS, BB, BLOCK)
    to_codes = tl.zeros((BLOCK, BB), tl.float32)
    to_mix = tl.zeros((BM, BB), tl.float32)
    if QUERIES:
        tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
        inverse, e = load_reads(reads, start, n, BLOCK)
        to_codes = product(tile, tl.trans(sums), PIECES, PRECISION) * inverse[:, None]
        to_codes += e[:, None] * ones[None, :]
    if KEYS:
        keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)[:, None]
        if TOKENS:
            values = load_tile(v, start, n, v_n, v_c, E, BE, BLOCK)
            more = product(values, tl.trans(to_sums), PIECES, PRECISION) + to_ones[None, :]
            if MASKED or WEIGHT:
                more = tl.where(keys, more, 0.0)
            to_codes += more
        if VALUES:
            tile = product(h, to_sums, PIECES, PRECISION) + to_total[None, :]
            if MASKED:
                tile = tl.where(keys, tile, 0.0)
            store_tile(to_v, tile, start, n, E, 1, E, BE, BLOCK)
    if TOKENS:
        tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
        tile, features, to_y = project_back(
            tokens, to_codes, samples, lengths, middle, mix, scale, PRECISION, GRAD_PRECISION
        )
        store_tile(to_x, tile, start, n, D, 1, D, BD, BLOCK)
        if WEIGHT:
            to_mix = dot(features, to_y, PRECISION, None, True)
    return to_mix


@triton.jit
def token_grad_tiles(
    grad, grad_n, grad_c, x, x_n, x_c, v, v_n, v_c, mask, mask_n, codes, reads, to_x, to_v, to_weight,
    first, last, n, support, mean, sigma, weight, head,
    sums, ones, to_sums, to_ones, to_total,
    SINGLE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHT: tl.constexpr, MASKED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for tokens first ... last.

    SINGLE: they are one tile. In a loop the compiler keeps all that does not change in shared memory.
    """
    samples, lengths, middle, mix, scale = load_functions(
        support, mean, sigma, weight, head, D, M, BITS, BD, BM, BB
    )
    if SINGLE:
        to_mix = token_grad_tile(
            grad, grad_n, grad_c, x, x_n, x_c, v, v_n, v_c, mask, mask_n, codes, reads, to_x, to_v, first, n,
            samples, lengths, middle, mix, scale,
            sums, ones, to_sums, to_ones, to_total,
            QUERIES, KEYS, TOKENS, VALUES, WEIGHT, MASKED, PIECES, PRECISION, GRAD_PRECISION,
            D, E, BITS, BD, BE, BM, BB, BLOCK,
        )  # fmt: skip
    else:
        to_mix = tl.zeros((BM, BB), tl.float32)
        for start in range(first, last, BLOCK):
            more = token_grad_tile(
                grad, grad_n, grad_c, x, x_n, x_c, v, v_n, v_c, mask, mask_n, codes, reads, to_x, to_v,
                start, n, samples, lengths, middle, mix, scale,
                sums, ones, to_sums, to_ones, to_total,
                QUERIES, KEYS, TOKENS, VALUES, WEIGHT, MASKED, PIECES, PRECISION, GRAD_PRECISION,
                D, E, BITS, BD, BE, BM, BB, BLOCK,
            )  # fmt: skip
            if WEIGHT:
                to_mix += more
    if WEIGHT:
        sample, bit = tl.arange(0, BM)[:, None], tl.arange(0, BB)[None, :]
        tl.store(to_weight + sample * BITS + bit, to_mix, mask=(sample < M) & (bit < BITS))


@launched
def gather_grad(
    grad, grad_b, grad_h, grad_n, grad_c, codes, reads, state, partial, n, heads, parts, span, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums the state's gradient over one of `parts` stretches of a head."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = (BITS + 1) * (E + 1)
    sums, ones, total, count = load_state(state + row * size, BITS, E, BB, BE)
    first = part * span
    to_sums, to_ones, to_total = gather_grad_tiles(
        grad + batch * grad_b + head * grad_h, grad_n, grad_c, codes + row * n, reads + row * n * 2,
        first, tl.minimum(first + span, n), n, sums, ones, total, count, beta, PIECES, PRECISION,
        E, BITS, BE, BB, BLOCK,
    )  # fmt: skip
    partial += (row * parts + part) * size
    store_state(partial, to_sums, to_ones, to_total, 0.0, BITS, E, BB, BE)


@launched
def token_grad(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, codes, reads, state, partial, to_x, to_v, to_weight, support, mean, sigma, weight,
    n, heads, grad_parts, parts, span,
    SINGLE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHT: tl.constexpr, MASKED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of one of `parts` stretches of a head's tokens."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = (BITS + 1) * (E + 1)
    sums, ones, _, _ = load_state(state + row * size, BITS, E, BB, BE)
    to_sums, to_ones, to_total, _ = load_parts(partial + row * grad_parts * size, grad_parts, BITS, E, BB, BE)
    first = part * span
    token_grad_tiles(
        grad + batch * grad_b + head * grad_h, grad_n, grad_c, x + batch * x_b + head * x_h, x_n, x_c,
        v + batch * v_b + head * v_h, v_n, v_c, mask + batch * mask_b, mask_n, codes + row * n,
        reads + row * n * 2, to_x + row * n * D, to_v + row * n * E,
        to_weight + (row * parts + part) * (M * BITS),
        first, tl.minimum(first + span, n), n, support, mean, sigma, weight, head,
        sums, ones, to_sums, to_ones, to_total,
        SINGLE, QUERIES, KEYS, TOKENS, VALUES, WEIGHT, MASKED, PIECES, PRECISION, GRAD_PRECISION,
        D, E, M, BITS, BD, BE, BM, BB, BLOCK,
    )  # fmt: skip


@launched
def attend_back(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, codes, reads, state, to_x, to_v, to_weight, support, mean, sigma, weight,
    n, heads, beta,
    TOKENS: tl.constexpr, VALUES: tl.constexpr, WEIGHT: tl.constexpr, MASKED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program does the whole backward of one head: short sequences in a single launch."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    sums, ones, total, count = load_state(state + row * ((BITS + 1) * (E + 1)), BITS, E, BB, BE)
    grad += batch * grad_b + head * grad_h
    codes += row * n
    reads += row * n * 2
    to_sums, to_ones, to_total = gather_grad_tiles(
        grad, grad_n, grad_c, codes, reads, 0, n, n, sums, ones, total, count, beta, PIECES, PRECISION,
        E, BITS, BE, BB, BLOCK,
    )  # fmt: skip
    # What was read goes through memory to the threads that want it.
    tl.debug_barrier()
    token_grad_tiles(
        grad, grad_n, grad_c, x + batch * x_b + head * x_h, x_n, x_c,
        v + batch * v_b + head * v_h, v_n, v_c, mask + batch * mask_b, mask_n, codes,
        reads, to_x + row * n * D, to_v + row * n * E, to_weight + row * (M * BITS),
        0, n, n, support, mean, sigma, weight, head,
        sums, ones, to_sums, to_ones, to_total,
        False, True, True, TOKENS, VALUES, WEIGHT, MASKED, PIECES, PRECISION, GRAD_PRECISION,
        D, E, M, BITS, BD, BE, BM, BB, BLOCK,
    )  # fmt: skip
