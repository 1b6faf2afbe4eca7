# mypy: ignore-errors
"""Backward kernels without causal order: the state's gradient first, then that of every token and value.

With a_t = grad_t / below_t and e_t = -(a_t . out_t), the gradient of the state is the sum of
f'_t [a_t, e_t]^T over the queries: it has the state's layout, the bias's share in its last row.
With groups of bits that is the gradient of the table; mixed as buckets are, it is that of the buckets.
The first pass keeps one over below_t, and e_t, for the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.forward import denominators, load_summed
from ecoformer.backends.triton.groups import (
    add_multiples,
    column_of,
    features_of,
    load_features,
    mix_all,
    tall_product,
    tall_sums,
    to_bits,
    turned_features,
)
from ecoformer.backends.triton.hashing import (
    NARROWEST,
    SIGNS,
    clean_signs,
    dot,
    exact_signs,
    launched,
    load_functions,
    load_keys,
    load_packed,
    load_signs,
    load_tile,
    load_weights,
    product,
    project_back,
    reciprocal,
    row_sums,
    store_tile,
    unpack,
)
from ecoformer.backends.triton.state import (
    load_parts,
    load_reads,
    load_state,
    state_size,
    store_reads,
    store_state,
)


@triton.jit
def gather_grad_tiles(
    grad, grad_n, grad_c, x, x_n, x_c, codes, reads, first, last, n, sums, ones, total, count, beta,
    WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr,
    BE: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient of the state from queries first ... last of a head; stores one over below_t, and e_t.

    Only weights of keys need the last number, the gradient of the number of keys.
    """
    to_sums = tl.zeros((BF, BE), tl.float32)
    if SIZE == 0:
        to_ones = tl.zeros((BLOCK, BF), tl.float32)
        to_totals = tl.zeros((16, BE), tl.float32)
        to_counts = tl.zeros((BLOCK,), tl.float32)
    else:
        to_ones = tl.zeros((BF, NARROWEST), tl.float32)
    if HASH != SIGNS:
        packed = load_packed(codes, first, n, BLOCK)
    for start in range(first, last, BLOCK):
        signs: tl.constexpr = HASH == SIGNS
        h = load_signs(x, start, n, x_n, x_c, BITS, BB, BLOCK) if signs else unpack(packed, BITS, BB)
        f = features_of(h, SIZE, F, BITS, BF, BB)
        if HASH != SIGNS:
            packed = load_packed(codes, start + BLOCK, n, BLOCK)
        tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
        if SIZE == 0:
            below = denominators(f, ones, total, count, beta, PIECES, PRECISION, SIZE)
            inverse = tl.where(count == 0, 0.0, reciprocal(tl.where(count == 0, 1.0, below)))
            # a_t . out_t from h_t, S grad_t and the sum of values, so that the forward need not keep out.
            to_codes = product(tile, tl.trans(sums), PIECES, PRECISION)
            h = f.to(tl.float32)
            e = tl.sum(h * to_codes, axis=1) + row_sums(tile, beta * total, PIECES, PRECISION)
            e *= -inverse * inverse
            store_reads(reads, inverse, e, start, n, BLOCK)
            # The sum of h_t a_t^T, with one over below_t on the narrow side.
            to_sums += product(h * inverse[:, None], tile, PIECES, PRECISION, None, True)
            columns = tl.broadcast_to(inverse[:, None], (BLOCK, 16))
            to_totals += product(columns, tile, PIECES, PRECISION, None, True)
            to_ones += h * e[:, None]
            if WEIGHTED:
                to_counts += e
        else:
            below = row_sums(f, ones, 2 if PIECES == 1 else 3, PRECISION)
            inverse = reciprocal(tl.where(count == 0, 1.0, tl.maximum(below, total)))
            inverse = tl.where(count == 0, 0.0, inverse)
            e = -tl.sum(tile.to(tl.float32) * product(f, sums, PIECES, PRECISION), axis=1) * inverse
            # A denominator at its floor has no gradient.
            e = tl.where(below < total, 0.0, e)
            store_reads(reads, inverse, e, start, n, BLOCK)
            if tile.dtype == tl.bfloat16 and (SIZE == 1 or SIZE == 2 or SIZE == 4):
                to_sums, to_ones = add_multiples(
                    h, inverse, tile, e, to_sums, to_ones, PIECES, 2, WIDE, SIZE, F, BITS, BF, BB
                )
            else:
                turned = turned_features(h, False, WIDE, SIZE, F, BITS, BF, BB)
                a = tile.to(tl.float32) * inverse[:, None]
                to_sums = tall_product(turned, a, PIECES, PRECISION, WIDE, to_sums)
                to_ones = tall_sums(turned, e * inverse, PIECES, PRECISION, WIDE, to_ones)
    if SIZE == 0:
        to_total = beta * 0.0625 * tl.sum(to_totals, axis=0)
        return to_sums, tl.sum(to_ones, axis=0), to_total, beta * tl.sum(to_counts, axis=0)
    else:
        return to_sums, column_of(to_ones), 0.0, 0.0


@triton.jit
def load_gradients(
    state, to_state, to_buckets, grad_parts, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Factors of the gradients of features as queries and as keys, and of values: (BF, BE) and (BF,) each.

    Also the gradients of the sum of values and of the number of keys. With groups of bits `state` and
    `to_state` hold coefficients of products of bits, see `to_bits`.
    """
    if SIZE == 0:
        sums, ones, _, _ = load_state(state, SIZE, E, F, BE, BF)
        to_sums, to_ones, to_total, to_count = load_parts(to_state, grad_parts, E, F, BE, BF)
        return sums, ones, to_sums, to_ones, to_sums, to_ones, to_total, to_count
    else:
        as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        if QUERIES:
            as_query, as_query_ones, _, _ = load_state(state, SIZE, E, F, BE, BF)
        if KEYS:
            as_key, as_key_ones, _, _ = load_state(to_state, SIZE, E, F, BE, BF)
            to_sums, to_ones, _, _ = load_state(to_buckets, SIZE, E, F, BE, BF)
        return as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, 0.0, 0.0


@triton.jit
def load_narrow(
    reads, key_weight, key_weight_n, start, n, READ: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """What was stored for the queries of a tile if READ, and the weights of its keys; else zeros and ones."""
    inverse, e = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    weights = tl.full((BLOCK,), 1.0, tl.float32)
    if READ:
        inverse, e = load_reads(reads, start, n, BLOCK)
    if WEIGHTED:
        weights = load_weights(key_weight, key_weight_n, start, n, BLOCK)
    return inverse, e, weights


@triton.jit
def token_grad_tiles(
    grad, grad_n, grad_c, x, x_n, x_c, v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, codes, reads,
    to_x, to_v, to_key_weight, to_weight, first, last, n, support, mean, sigma, weight, head,
    as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, to_total, to_count,
    SINGLE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHT: tl.constexpr, KEY_WEIGHT: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of tokens first ... last (QUERIES, KEYS or both), their values and weights.

    SINGLE: they are one tile. In a loop the compiler keeps all that does not change in shared memory.
    """
    samples, lengths, middle, mix, scale = load_functions(
        support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
    )
    to_mix = tl.zeros((BM, BB), tl.float32)
    # The compiler does not load these ahead: ask for the next tile's.
    read: tl.constexpr = QUERIES and (TOKENS or SIZE == 0)
    next_inverse, next_e, next_weights = load_narrow(
        reads, key_weight, key_weight_n, first, n, read, KEYS and WEIGHTED, BLOCK
    )
    # A single step from 0 to 1 is a loop that the compiler leaves out.
    for step in range(0 if SINGLE else first, 1 if SINGLE else last, 1 if SINGLE else BLOCK):
        start = first if SINGLE else step
        inverse, e, weights = next_inverse, next_e, next_weights
        next_inverse, next_e, next_weights = load_narrow(
            reads, key_weight, key_weight_n, start + BLOCK, n, read, KEYS and WEIGHTED, BLOCK
        )
        if HASH == SIGNS:
            tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
            h = exact_signs(tokens, BITS, BB)
            if MASKED and KEYS:
                h = clean_signs(h, load_keys(mask, mask_n, start, n, MASKED, BLOCK))
            f = features_of(h, SIZE, F, BITS, BF, BB)
        else:
            h, f = load_features(codes, start, n, SIZE, F, BITS, BF, BB, BLOCK)
        # With groups of bits a factor of each token waits for the gradient of bits where there is only one.
        late: tl.constexpr = SIZE > 0 and not (QUERIES and KEYS)
        factors = tl.full((BLOCK,), 1.0, tl.float32)
        to_features = tl.zeros((BLOCK, BF), tl.float32)
        # The paper's form loads the gradient first, a tenth faster; with groups that takes more registers.
        if QUERIES and SIZE == 0:
            tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
            to_features = product(tile, tl.trans(as_query), PIECES, PRECISION) * inverse[:, None]
            to_features += e[:, None] * as_query_ones[None, :]
        if KEYS:
            keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)
            weights = tl.where(keys, weights, 0.0)
            if TOKENS or KEY_WEIGHT:
                values = load_tile(v, start, n, v_n, v_c, E, BE, BLOCK)
            if TOKENS:
                if SIZE == 0:
                    more = product(values, tl.trans(as_key), PIECES, PRECISION) + as_key_ones[None, :]
                else:
                    more = tl.broadcast_to(as_key_ones[None, :], (BLOCK, BF))
                    more = product(values, tl.trans(as_key), PIECES, PRECISION, more)
                if late:
                    to_features, factors = more, weights
                else:
                    if WEIGHTED:
                        more *= weights[:, None]
                    if MASKED or WEIGHT:
                        more = tl.where(keys[:, None], more, 0.0)
                    to_features += more
            if VALUES or KEY_WEIGHT:
                tile = product(f, to_sums, PIECES, PRECISION)
                if SIZE == 0:
                    tile += to_total[None, :]
                if MASKED:
                    tile = tl.where(keys[:, None], tile, 0.0)
                if KEY_WEIGHT:
                    wide = values.to(tl.float32)
                    if MASKED:
                        wide = tl.where(keys[:, None], wide, 0.0)
                    below = row_sums(f, to_ones, 2 if PIECES == 1 else 3, PRECISION)
                    to_weights = tl.sum(tile * wide, axis=1) + below + to_count
                    rows = start + tl.arange(0, BLOCK)
                    to_weights = tl.where(keys, to_weights, 0.0)
                    tl.store(
                        to_key_weight + rows, to_weights.to(to_key_weight.dtype.element_ty), mask=rows < n
                    )
                if VALUES:
                    if WEIGHTED:
                        tile *= weights[:, None]
                    store_tile(to_v, tile, start, n, E, 1, E, BE, BLOCK)
        if TOKENS:
            if QUERIES and SIZE > 0:
                tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
                if late:
                    to_features = e[:, None] * as_query_ones[None, :]
                    to_features = product(tile, tl.trans(as_query), PIECES, PRECISION, to_features)
                    factors = inverse
                else:
                    to_features += (e * inverse)[:, None] * as_query_ones[None, :]
                    to_features += product(tile, tl.trans(as_query), PIECES, PRECISION) * inverse[:, None]
            if SIZE == 0:
                to_codes = to_features
            else:
                to_codes = to_bits(to_features, h, PIECES, PRECISION, SIZE, F, BF, BITS, BB)
            if late and MASKED and KEYS:
                to_codes = tl.where(keys[:, None], to_codes, 0.0)  # padding may hold NaN
            if HASH != SIGNS:
                tokens = load_tile(x, start, n, x_n, x_c, D, BD, BLOCK)
            tile, features, to_y = project_back(
                tokens, to_codes, factors, samples, lengths, middle, mix, scale,
                HASH, PRECISION, GRAD_PRECISION, BITS,
            )  # fmt: skip
            store_tile(to_x, tile, start, n, D, 1, D, BD, BLOCK)
            if WEIGHT:
                to_mix += dot(features, to_y, PRECISION, None, True)
    if WEIGHT:
        sample, bit = tl.arange(0, BM)[:, None], tl.arange(0, BB)[None, :]
        tl.store(to_weight + sample * BITS + bit, to_mix, mask=(sample < M) & (bit < BITS))


@launched
def gather_grad(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, codes, reads, state, table, partial, floor,
    n, heads, parts, span, beta,
    WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr,
    BE: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program sums the state's gradient over one of `parts` stretches of a head."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    state += row * size
    table += row * size
    sums, ones, total, count = load_summed(table, state, 1, False, floor, head, SIZE, E, F, BE, BF)
    first = part * span
    to_sums, to_ones, to_total, to_count = gather_grad_tiles(
        grad + batch * grad_b + head * grad_h, grad_n, grad_c, x + batch * x_b + head * x_h, x_n, x_c,
        codes + row * n, reads + row * n * 2,
        first, tl.minimum(first + span, n), n, sums, ones, total, count, beta,
        WEIGHTED, PIECES, PRECISION, HASH, SIZE, E, F, BITS, BE, BF, BB, BLOCK, WIDE,
    )  # fmt: skip
    partial += (row * parts + part) * size
    store_state(partial, to_sums, to_ones, to_total, to_count, SIZE, E, F, BE, BF)


@launched
def token_grad(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, key_weight, key_weight_b, key_weight_h, key_weight_n, codes, reads,
    state, partial, to_buckets, to_x, to_v, to_key_weight, to_weight, support, mean, sigma, weight,
    n, heads, grad_parts, parts, span,
    SINGLE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHT: tl.constexpr, KEY_WEIGHT: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of one of `parts` stretches of a head's tokens."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, to_total, to_count = load_gradients(
        state + row * size, partial + row * grad_parts * size, to_buckets + row * size, grad_parts,
        QUERIES and TOKENS, KEYS, SIZE, E, F, BE, BF,
    )  # fmt: skip
    first = part * span
    token_grad_tiles(
        grad + batch * grad_b + head * grad_h, grad_n, grad_c, x + batch * x_b + head * x_h, x_n, x_c,
        v + batch * v_b + head * v_h, v_n, v_c, mask + batch * mask_b, mask_n,
        key_weight + batch * key_weight_b + head * key_weight_h, key_weight_n, codes + row * n,
        reads + row * n * 2, to_x + row * n * D, to_v + row * n * E, to_key_weight + row * n,
        to_weight + (row * parts + part) * (M * BITS),
        first, tl.minimum(first + span, n), n, support, mean, sigma, weight, head,
        as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, to_total, to_count,
        SINGLE, QUERIES, KEYS, TOKENS, VALUES, WEIGHT, KEY_WEIGHT, MASKED, WEIGHTED,
        PIECES, PRECISION, GRAD_PRECISION, HASH, SIZE,
        D, E, F, M, BITS, BD, BE, BF, BM, BB, BLOCK,
    )  # fmt: skip


@launched
def attend_back(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, key_weight, key_weight_b, key_weight_h, key_weight_n, codes, reads, state, table,
    partial, state_walsh, walsh, to_buckets, to_x, to_v, to_key_weight, to_weight, to_levels,
    support, mean, sigma, weight, scales, ratios, floor,
    n, heads, beta,
    TOKENS: tl.constexpr, VALUES: tl.constexpr, WEIGHT: tl.constexpr, KEY_WEIGHT: tl.constexpr,
    LEVELS: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program computes the backward of one head: short sequences in a single launch."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    state += row * size
    table += row * size
    sums, ones, total, count = load_summed(table, state, 1, False, floor, head, SIZE, E, F, BE, BF)
    grad += batch * grad_b + head * grad_h
    x += batch * x_b + head * x_h
    codes += row * n
    reads += row * n * 2
    to_sums, to_ones, to_total, to_count = gather_grad_tiles(
        grad, grad_n, grad_c, x, x_n, x_c, codes, reads, 0, n, n, sums, ones, total, count, beta,
        WEIGHTED, PIECES, PRECISION, HASH, SIZE, E, F, BITS, BE, BF, BB, BLOCK, WIDE,
    )  # fmt: skip
    if SIZE > 0:
        partial += row * size
        store_state(partial, to_sums, to_ones, to_total, to_count, SIZE, E, F, BE, BF)
    # Other threads read what was stored.
    tl.debug_barrier()
    if SIZE == 0:
        as_query, as_query_ones, as_key, as_key_ones = sums, ones, to_sums, to_ones
    else:
        state_walsh += row * size
        walsh += row * size
        to_buckets += row * size
        mix_all(
            partial, to_buckets, walsh, state, state_walsh, to_levels + row * (2 * F), scales, ratios, head,
            True, LEVELS, SIZE, E, F, BE,
        )  # fmt: skip
        tl.debug_barrier()
        as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, to_total, to_count = load_gradients(
            state_walsh, walsh, to_buckets, 1, TOKENS, True, SIZE, E, F, BE, BF
        )
    token_grad_tiles(
        grad, grad_n, grad_c, x, x_n, x_c,
        v + batch * v_b + head * v_h, v_n, v_c, mask + batch * mask_b, mask_n,
        key_weight + batch * key_weight_b + head * key_weight_h, key_weight_n, codes,
        reads, to_x + row * n * D, to_v + row * n * E, to_key_weight + row * n, to_weight + row * (M * BITS),
        0, n, n, support, mean, sigma, weight, head,
        as_query, as_query_ones, as_key, as_key_ones, to_sums, to_ones, to_total, to_count,
        False, True, True, TOKENS, VALUES, WEIGHT, KEY_WEIGHT, MASKED, WEIGHTED,
        PIECES, PRECISION, GRAD_PRECISION, HASH, SIZE,
        D, E, F, M, BITS, BD, BE, BF, BM, BB, BLOCK,
    )  # fmt: skip
