# mypy: ignore-errors
"""Kernels in causal order, where queries are the keys: blocks of BLOCK tokens and running sums over blocks.

Entry c of the running sums is the state before block c. Within a block all pairs are formed: with
w_ts = h_t . h_s + beta for keys s <= t, token t reads the sum of w_ts v_s plus what it reads from the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.forward import gather_tiles
from ecoformer.backends.triton.hashing import (
    dot,
    grad_product,
    launched,
    load_codes,
    load_functions,
    load_keys,
    load_tile,
    product,
    project_back,
    store_tile,
    whole_product,
)
from ecoformer.backends.triton.state import load_reads, load_state, store_reads, store_state


@launched
def causal_gather(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n, codes, states,
    support, mean, sigma, weight, n, heads, blocks,
    MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of a block, and its sums where the running sums expect them: one entry after its own."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    batch, head = row // heads, row % heads
    first = block * BLOCK
    sums, ones, total, count = gather_tiles(
        x + batch * x_b + head * x_h, x_n, x_c, v + batch * v_b + head * v_h, v_n, v_c,
        mask + batch * mask_b, mask_n, codes + row * n, first, tl.minimum(first + BLOCK, n), n,
        support, mean, sigma, weight, head,
        MASKED, PIECES, PRECISION, D, E, M, BITS, BD, BE, BM, BB, BLOCK,
    )  # fmt: skip
    states += (row * (blocks + 1) + block + 1) * ((BITS + 1) * (E + 1))
    store_state(states, sums, ones, total, count, BITS, E, BB, BE)


@triton.jit
def pairs(h, keys, beta, BLOCK: tl.constexpr):
    """w_ts of a block (BLOCK, BLOCK), zero where s is no key or comes after t."""
    rows = tl.arange(0, BLOCK)
    seen = (rows[:, None] >= rows[None, :]) & keys[None, :]
    return tl.where(seen, dot(h, tl.trans(h), "ieee") + beta, 0.0), seen


@triton.jit
def causal_tops(
    h, keys, values, sums, ones, total, count, beta,
    WHOLE: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numerators (BLOCK, BE) and one over the denominators of a block; zero for a query that sees no key.

    WHOLE: every w_ts is a whole number of at most 256, thus exact in bf16.
    """
    w, _ = pairs(h, keys, beta, BLOCK)
    seen = count + tl.cumsum(keys.to(tl.float32), axis=0)
    below = tl.sum(w, axis=1) + tl.sum(h.to(tl.float32) * ones[None, :], axis=1) + beta * count
    if WHOLE:
        within = whole_product(w.to(tl.bfloat16), values, PIECES, PRECISION)
    else:
        within = product(w, values, PIECES, PRECISION)
    above = within + product(h, sums, PIECES, PRECISION) + (beta * total)[None, :]
    return above, tl.where(seen == 0, 0.0, 1.0 / tl.where(seen == 0, 1.0, below))


@launched
def causal_read(
    v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n, codes, states, out, out_b, out_h, out_n, out_c,
    n, heads, blocks, beta,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads for one block."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    batch, head = row // heads, row % heads
    first = block * BLOCK
    size = (BITS + 1) * (E + 1)
    states += (row * (blocks + 1) + block) * size
    sums, ones, total, count = load_state(states, BITS, E, BB, BE)
    _, after, _, _ = load_state(states + size, BITS, E, BB, BE)
    keys = load_keys(mask + batch * mask_b, mask_n, first, n, MASKED, BLOCK)
    values = load_tile(v + batch * v_b + head * v_h, first, n, v_n, v_c, E, BE, BLOCK)
    if MASKED:
        values = tl.where(keys[:, None], values, 0.0)
    h = load_codes(codes + row * n, first, n, BITS, BB, BLOCK)
    above, inverse = causal_tops(
        h, keys, values, sums, ones, total, count, beta, WHOLE, PIECES, PRECISION, BLOCK
    )
    # Packed codes cannot be NaN, but the sum over the block's codes can: it marks the block's tokens.
    inverse += tl.sum(after, axis=0) * 0.0
    tile = above * inverse[:, None]
    store_tile(out + batch * out_b + head * out_h, tile, first, n, out_n, out_c, E, BE, BLOCK)


@launched
def causal_gather_grad(
    grad, grad_b, grad_h, grad_n, grad_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n,
    codes, states, partial, reads, n, heads, blocks, beta,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    E: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's share in the gradient of the states before it; also one over each denominator, and e_t."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    batch, head = row // heads, row % heads
    first = block * BLOCK
    size = (BITS + 1) * (E + 1)
    place = (row * (blocks + 1) + block) * size
    sums, ones, total, count = load_state(states + place, BITS, E, BB, BE)
    keys = load_keys(mask + batch * mask_b, mask_n, first, n, MASKED, BLOCK)
    values = load_tile(v + batch * v_b + head * v_h, first, n, v_n, v_c, E, BE, BLOCK)
    if MASKED:
        values = tl.where(keys[:, None], values, 0.0)
    h = load_codes(codes + row * n, first, n, BITS, BB, BLOCK)
    above, inverse = causal_tops(
        h, keys, values, sums, ones, total, count, beta, WHOLE, PIECES, PRECISION, BLOCK
    )
    tile = load_tile(grad + batch * grad_b + head * grad_h, first, n, grad_n, grad_c, E, BE, BLOCK)
    a = tile.to(tl.float32) * inverse[:, None]
    e = -tl.sum(a * above, axis=1) * inverse
    store_reads(reads + row * n * 2, inverse, e, first, n, BLOCK)
    to_ones = tl.sum(h.to(tl.float32) * e[:, None], axis=0)
    to_sums = product(h, a, PIECES, PRECISION, None, True)
    store_state(partial + place, to_sums, to_ones, beta * tl.sum(a, axis=0), 0.0, BITS, E, BB, BE)


@launched
def causal_token_grad(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, codes, states, partial, reads, to_x, to_v, to_weight,
    support, mean, sigma, weight, n, heads, blocks, beta,
    TOKENS: tl.constexpr, VALUES: tl.constexpr, WEIGHT: tl.constexpr, MASKED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a block's tokens and values: from the state before, from tokens after, from itself."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    batch, head = row // heads, row % heads
    first = block * BLOCK
    size = (BITS + 1) * (E + 1)
    place = (row * (blocks + 1) + block) * size
    to_sums, to_ones, to_total, _ = load_state(partial + place + size, BITS, E, BB, BE)
    inverse, e = load_reads(reads + row * n * 2, first, n, BLOCK)
    tile = load_tile(grad + batch * grad_b + head * grad_h, first, n, grad_n, grad_c, E, BE, BLOCK)
    a = tile.to(tl.float32) * inverse[:, None]
    keys = load_keys(mask + batch * mask_b, mask_n, first, n, MASKED, BLOCK)
    h = load_codes(codes + row * n, first, n, BITS, BB, BLOCK)
    w, seen = pairs(h, keys, beta, BLOCK)
    if VALUES:
        to_values = grad_product(tl.trans(w), a, GRAD_PRECISION) + product(h, to_sums, PIECES, PRECISION)
        to_values = tl.where(keys[:, None], to_values + to_total[None, :], 0.0)
        store_tile(to_v + row * n * E, to_values, first, n, E, 1, E, BE, BLOCK)
    if TOKENS:
        values = load_tile(v + batch * v_b + head * v_h, first, n, v_n, v_c, E, BE, BLOCK)
        if MASKED:
            values = tl.where(keys[:, None], values, 0.0)
        to_pairs = product(a, tl.trans(values), PIECES, PRECISION) + e[:, None]
        to_pairs = tl.where(seen, to_pairs, 0.0)
        as_key = product(values, tl.trans(to_sums), PIECES, PRECISION) + to_ones[None, :]
        as_key += product(tl.trans(to_pairs), h, PIECES, PRECISION)
        sums, ones, _, _ = load_state(states + place, BITS, E, BB, BE)
        to_codes = product(to_pairs, h, PIECES, PRECISION) + e[:, None] * ones[None, :]
        to_codes += product(tile, tl.trans(sums), PIECES, PRECISION) * inverse[:, None]
        to_codes += tl.where(keys[:, None], as_key, 0.0)
        samples, lengths, middle, mix, scale = load_functions(
            support, mean, sigma, weight, head, D, M, BITS, BD, BM, BB
        )
        tokens = load_tile(x + batch * x_b + head * x_h, first, n, x_n, x_c, D, BD, BLOCK)
        to_tokens, features, to_y = project_back(
            tokens, to_codes, samples, lengths, middle, mix, scale, PRECISION, GRAD_PRECISION
        )
        store_tile(to_x + row * n * D, to_tokens, first, n, D, 1, D, BD, BLOCK)
        if WEIGHT:
            to_mix = dot(features, to_y, PRECISION, None, True)
            sample, bit = tl.arange(0, BM)[:, None], tl.arange(0, BB)[None, :]
            to_weight += (row * blocks + block) * (M * BITS)
            tl.store(to_weight + sample * BITS + bit, to_mix, mask=(sample < M) & (bit < BITS))
