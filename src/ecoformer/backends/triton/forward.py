# mypy: ignore-errors
"""Forward kernels without causal order: `gather` sums over keys, `read` reads the sums, `attend` is both."""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.groups import (
    add_multiples,
    column_of,
    features_of,
    mix_all,
    smallest,
    tall_product,
    tall_sums,
    turned_features,
)
from ecoformer.backends.triton.hashing import (
    NARROWEST,
    SIGNS,
    clean_signs,
    hash_tile,
    launched,
    load_functions,
    load_keys,
    load_packed,
    load_tile,
    load_weights,
    once,
    product,
    reciprocal,
    row_sums,
    store_tile,
    unpack,
    whole_product,
)
from ecoformer.backends.triton.state import load_parts, load_state, state_size, store_state


@triton.jit
def gather_tiles(
    x, x_n, x_c, v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, codes, first, last, n,
    support, mean, sigma, weight, head,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, CODES: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Hash tokens first ... last of a head, store their codes if CODES, and sum over the keys."""
    samples, lengths, middle, mix, scale = load_functions(
        support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
    )
    # Each position of a tile has its own sum until the end; tensor cores sum values, sixteen times over.
    sums = tl.zeros((BF, BE), tl.float32)
    if SIZE == 0:
        ones = tl.zeros((BLOCK, BB), tl.float32)
        totals = tl.zeros((16, BE), tl.float32)
        counts = tl.zeros((BLOCK,), tl.float32)
        every = tl.full((BLOCK, 16), 1.0, tl.float32).to(tl.bfloat16)
    else:
        ones = tl.zeros((BF, NARROWEST), tl.float32)
    # The compiler does not load weights ahead: ask for the next tile's.
    if WEIGHTED:
        weights = load_weights(key_weight, key_weight_n, first, n, BLOCK)
    for start in range(first, last, BLOCK):
        keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)
        tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
        values = load_tile(v, start, n, v_n, v_c, E, BE, BLOCK)
        h, mark = hash_tile(
            tokens, keys, samples, lengths, middle, mix, scale, codes, start, n,
            HASH, PRECISION, CODES, BITS, BB, BLOCK,
        )  # fmt: skip
        if MASKED:
            values = tl.where(keys[:, None], values, 0.0)
            if HASH == SIGNS:
                h = clean_signs(h, keys)
        # Features of bf16 values take the weights, so that values go in as they are.
        multiples: tl.constexpr = values.dtype == tl.bfloat16 and (SIZE == 1 or SIZE == 2 or SIZE == 4)
        if WEIGHTED:
            mark *= tl.where(keys, once(weights), 0.0)
            if not multiples:
                values = values.to(tl.float32) * mark[:, None]
            weights = load_weights(key_weight, key_weight_n, start + BLOCK, n, BLOCK)
        if SIZE == 0:
            sums += whole_product(h, values, PIECES, PRECISION, True)
            totals += whole_product(every, values, PIECES, PRECISION, True)
            ones += h.to(tl.float32) * mark[:, None]
            counts += mark
        elif WEIGHTED and multiples:
            pieces: tl.constexpr = 1 if key_weight.dtype.element_ty == tl.bfloat16 else 2
            each = tl.full((BLOCK,), 1.0, tl.float32).to(tl.bfloat16)
            sums, ones = add_multiples(
                h, mark, values, each, sums, ones, pieces, 1, WIDE, SIZE, F, BITS, BF, BB
            )
        else:
            half: tl.constexpr = values.dtype == tl.float16
            f = turned_features(h, half, WIDE, SIZE, F, BITS, BF, BB)
            sums = tall_product(f, values, 3 if PIECES == 3 else 2, PRECISION, WIDE, sums)
            if not WEIGHTED:
                mark = mark.to(f.dtype)
            ones = tall_sums(f, mark, 3, PRECISION, WIDE, ones)
    if SIZE == 0:
        return sums, tl.sum(ones, axis=0), tl.sum(totals, axis=0) * 0.0625, tl.sum(counts, axis=0)
    else:
        return sums, column_of(ones), 0.0, 0.0


@triton.jit
def load_summed(
    partial, state, parts, keep, floor, head,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """What queries read, added up over `parts`, and stored in `state` if `keep`.

    With groups of bits `partial` is the table, and the third result the smallest denominator.
    """
    if SIZE == 0:
        sums, ones, total, count = load_parts(partial, parts, E, F, BE, BF)
        if keep:
            store_state(state, sums, ones, total, count, SIZE, E, F, BE, BF)
        return sums, ones, total, count
    else:
        sums, ones, _, _ = load_state(partial, SIZE, E, F, BE, BF)
        least, count = smallest(state, floor, head, SIZE, E, F)
        return sums, ones, least, count


@triton.jit
def denominators(
    f, ones, total, count, beta, PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr
):
    """Denominators of features (BLOCK, BF); with groups of bits at least `total`."""
    if SIZE == 0:
        return row_sums(f, ones, 3, PRECISION) + beta * count
    else:
        return tl.maximum(row_sums(f, ones, 3 if PIECES == 3 else 2, PRECISION), total)


@triton.jit
def read_tile(
    f, sums, ones, total, count, beta, mark, PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr
):
    """What features (BLOCK, BF) read from a state or a table, times `marks`."""
    below = denominators(f, ones, total, count, beta, PIECES, PRECISION, SIZE)
    if SIZE == 0:
        above = tl.broadcast_to((beta * total)[None, :], (f.shape[0], total.shape[0]))
        above = product(f, sums, PIECES, PRECISION, above)
    else:
        above = product(f, sums, PIECES, PRECISION)
    return above * (reciprocal(tl.where(count == 0, 1.0, below)) * mark)[:, None]


@triton.jit
def read_tiles(
    codes, out, out_n, out_c, first, last, n, sums, ones, total, count, beta,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr,
    BE: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries first ... last of a head read the state by their stored codes."""
    packed = load_packed(codes, first, n, BLOCK)
    for start in range(first, last, BLOCK):
        f = features_of(unpack(packed, BITS, BB), SIZE, F, BITS, BF, BB)
        packed = load_packed(codes, start + BLOCK, n, BLOCK)
        tile = read_tile(f, sums, ones, total, count, beta, 1.0, PIECES, PRECISION, SIZE)
        store_tile(out, tile, start, n, out_n, out_c, E, BE, BLOCK)


@launched
def gather(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n,
    key_weight, key_weight_b, key_weight_h, key_weight_n, codes, partial,
    support, mean, sigma, weight, n, heads, parts, span,
    CODES: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program sums one of `parts` stretches of `span` tokens of a head.

    CAUSAL: the sums go where running sums expect them, one entry after their own.
    """
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    first = part * span
    sums, ones, total, count = gather_tiles(
        x + batch * x_b + head * x_h, x_n, x_c, v + batch * v_b + head * v_h, v_n, v_c,
        mask + batch * mask_b, mask_n, key_weight + batch * key_weight_b + head * key_weight_h, key_weight_n,
        codes + row * n, first, tl.minimum(first + span, n), n, support, mean, sigma, weight, head,
        MASKED, WEIGHTED, PIECES, PRECISION, HASH, CODES, SIZE,
        D, E, F, M, BITS, BD, BE, BF, BM, BB, BLOCK, WIDE,
    )  # fmt: skip
    entry = row * parts + part
    if CAUSAL:
        entry += row + 1
    partial += entry * state_size(SIZE, E, F)
    store_state(partial, sums, ones, total, count, SIZE, E, F, BE, BF)


@launched
def read(
    x, x_b, x_h, x_n, x_c, codes, partial, state, out, out_b, out_h, out_n, out_c,
    support, mean, sigma, weight, floor, n, heads, state_parts, parts, span, beta,
    HASHED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds up its head's state and reads it for a stretch of tokens; the first one stores it.

    HASHED: queries have codes of their own, which it computes; else `gather` has stored them.
    """
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    sums, ones, total, count = load_summed(
        partial + row * state_parts * size, state + row * size, state_parts, (part == 0) & (state_parts > 1),
        floor, head, SIZE, E, F, BE, BF,
    )  # fmt: skip
    x += batch * x_b + head * x_h
    codes += row * n
    out += batch * out_b + head * out_h
    first = part * span
    last = tl.minimum(first + span, n)
    if not HASHED:
        read_tiles(
            codes, out, out_n, out_c, first, last, n, sums, ones, total, count, beta,
            PIECES, PRECISION, SIZE, E, F, BITS, BE, BF, BB, BLOCK,
        )  # fmt: skip
    else:
        samples, lengths, middle, mix, scale = load_functions(
            support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
        )
        for start in range(first, last, BLOCK):
            tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
            h, mark = hash_tile(
                tokens, start + tl.arange(0, BLOCK) < n, samples, lengths, middle, mix, scale,
                codes, start, n, HASH, PRECISION, HASH != SIGNS, BITS, BB, BLOCK,
            )  # fmt: skip
            f = features_of(h, SIZE, F, BITS, BF, BB)
            if HASH == SIGNS:
                mark = 1.0
            tile = read_tile(f, sums, ones, total, count, beta, mark, PIECES, PRECISION, SIZE)
            store_tile(out, tile, start, n, out_n, out_c, E, BE, BLOCK)


@launched
def attend(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n,
    key_weight, key_weight_b, key_weight_h, key_weight_n, codes, state, table,
    out, out_b, out_h, out_n, out_c, support, mean, sigma, weight, scales, ratios, floor, n, heads, beta,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program computes one head from tokens to output: short sequences in a single launch."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    sums, ones, total, count = gather_tiles(
        x + batch * x_b + head * x_h, x_n, x_c, v + batch * v_b + head * v_h, v_n, v_c,
        mask + batch * mask_b, mask_n, key_weight + batch * key_weight_b + head * key_weight_h, key_weight_n,
        codes + row * n, 0, n, n, support, mean, sigma, weight, head,
        MASKED, WEIGHTED, PIECES, PRECISION, HASH, HASH != SIGNS, SIZE,
        D, E, F, M, BITS, BD, BE, BF, BM, BB, BLOCK, WIDE,
    )  # fmt: skip
    state += row * state_size(SIZE, E, F)
    store_state(state, sums, ones, total, count, SIZE, E, F, BE, BF)
    # Other threads read the codes and buckets.
    tl.debug_barrier()
    if SIZE > 0:
        table += row * state_size(SIZE, E, F)
        mix_all(state, table, table, state, table, table, scales, ratios, head, False, False, SIZE, E, F, BE)
        tl.debug_barrier()
        sums, ones, total, count = load_summed(table, state, 1, False, floor, head, SIZE, E, F, BE, BF)
    read_tiles(
        codes + row * n, out + batch * out_b + head * out_h, out_n, out_c, 0, n, n,
        sums, ones, total, count, beta, PIECES, PRECISION, SIZE,
        E, F, BITS, BE, BF, BB, BLOCK,
    )  # fmt: skip
