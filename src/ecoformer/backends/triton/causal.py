# mypy: ignore-errors
"""Kernels in causal order: stretches of STRIDE blocks of BLOCK tokens, and running sums over stretches.

Entry c of the running sums is the state before stretch c. Within a block all pairs are formed: with w_ts the
affinity of t and s for keys s <= t, token t reads the sum of w_ts v_s plus what it reads from the state.

With groups of bits a query's features are mixed before they meet those of keys: w_ts = (f_t T) . f_s. States
are buckets, their gradients those of tables. Both are large, so a stretch has several blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.groups import (
    MIX,
    SLOPE,
    WALSH,
    add_multiples,
    column_of,
    features_of,
    load_features,
    mixing,
    tall_product,
    tall_sums,
    to_bits,
    turned_features,
)
from ecoformer.backends.triton.hashing import (
    NARROWEST,
    dot,
    float_product,
    grad_product,
    hash_tile,
    launched,
    load_functions,
    load_keys,
    load_tile,
    load_weights,
    product,
    project_back,
    store_tile,
    whole_product,
)
from ecoformer.backends.triton.state import (
    load_reads,
    load_state,
    state_places,
    state_size,
    store_reads,
    store_state,
)


@triton.jit
def load_mixing(
    scales, ratios, head, KIND: tl.constexpr, SIZE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr
):
    """A mixing matrix (BF, BF); nothing without groups."""
    if SIZE == 0:
        return 0.0
    else:
        return mixing(scales, ratios, head, 0, KIND, SIZE, F, BF)


@triton.jit
def load_values(
    v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, start, n,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which tokens of a block are keys, their weights (BLOCK,), and values, zero for padding."""
    keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)
    values = load_tile(v, start, n, v_n, v_c, E, BE, BLOCK)
    if MASKED:
        values = tl.where(keys[:, None], values, 0.0)
    weights = keys.to(tl.float32)
    if WEIGHTED:
        weights *= load_weights(key_weight, key_weight_n, start, n, BLOCK)
    return keys, weights, values


@triton.jit
def load_both(
    key_codes, codes, start, n, SHARED: tl.constexpr,
    SIZE: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and features of a block's keys, and of its queries, which are the same if SHARED."""
    h, f = load_features(key_codes, start, n, SIZE, F, BITS, BF, BB, BLOCK)
    if SHARED:
        return h, f, h, f
    else:
        h_q, f_q = load_features(codes, start, n, SIZE, F, BITS, BF, BB, BLOCK)
        return h, f, h_q, f_q


@triton.jit
def mixed_features(f, matrix, PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """Features as they meet those of keys; without groups as they are.

    With one piece the matrix is rounded to bf16, and so is every w_ts, above and below the fraction bar.
    """
    if SIZE == 0:
        return f
    elif PIECES == 1:
        return product(f, matrix, PIECES, PRECISION).to(tl.bfloat16)
    else:
        return product(f, matrix, PIECES, PRECISION)


@triton.jit
def pairs(
    g, f, keys, beta, PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """w_ts of a block (BLOCK, BLOCK), zero where s is no key or comes after t."""
    rows = tl.arange(0, BLOCK)
    seen = (rows[:, None] >= rows[None, :]) & keys[None, :]
    w = product(g, tl.trans(f), PIECES, PRECISION)
    if SIZE == 0:
        w += beta
    return tl.where(seen, w, 0.0), seen


@triton.jit
def causal_tops(
    g, f, keys, weights, values, sums, ones, total, count, beta, floor,
    WHOLE: tl.constexpr, WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, BF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numerators (BLOCK, BE) and one over the denominators of a block; zero for a query that sees no key.

    Also which denominators are at their floor. WHOLE: every w_ts is a whole number of at most 256, thus exact
    in bf16.
    """
    w, _ = pairs(g, f, keys, beta, PIECES, PRECISION, SIZE, BLOCK)
    if SIZE > 0:
        count = tl.sum(tl.where(tl.arange(0, BF) < (1 << SIZE), ones, 0.0), axis=0)
    seen = count + tl.cumsum(weights, axis=0)
    if WEIGHTED:
        w *= weights[None, :]
    if PIECES == 1:
        w = w.to(tl.bfloat16).to(tl.float32)
    below = tl.sum(w, axis=1) + tl.sum(g.to(tl.float32) * ones[None, :], axis=1)
    if SIZE == 0:
        below += beta * count
    least = floor * seen
    at_floor = below < least
    if SIZE > 0:
        below = tl.maximum(below, least)
    if WHOLE and SIZE == 0 and not WEIGHTED:
        within = whole_product(w.to(tl.bfloat16), values, PIECES, PRECISION)
    else:
        within = product(w, values, PIECES, PRECISION)
    above = within + float_product(g, sums, PIECES, PRECISION)
    if SIZE == 0:
        above += (beta * total)[None, :]
    return above, tl.where(seen == 0, 0.0, 1.0 / tl.where(seen == 0, 1.0, below)), at_floor


@triton.jit
def key_sums(
    h, weights, values, sums, ones, WEIGHT_PIECES: tl.constexpr,
    WEIGHTED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    F: tl.constexpr, BITS: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Buckets of values and of weights with those of a block added."""
    if WEIGHTED and values.dtype == tl.bfloat16 and (SIZE == 1 or SIZE == 2 or SIZE == 4):
        each = tl.full(weights.shape, 1.0, tl.float32).to(tl.bfloat16)
        columns = tl.zeros((BF, NARROWEST), tl.float32)
        sums, columns = add_multiples(
            h, weights, values, each, sums, columns, WEIGHT_PIECES, 1, WIDE, SIZE, F, BITS, BF, BB
        )
    else:
        f = turned_features(h, values.dtype == tl.float16 and not WEIGHTED, WIDE, SIZE, F, BITS, BF, BB)
        if WEIGHTED:
            values = values.to(tl.float32) * weights[:, None]
        else:
            weights = weights.to(f.dtype)
        sums = tall_product(f, values, 3 if PIECES == 3 else 2, PRECISION, WIDE, sums)
        columns = tall_sums(f, weights, 3, PRECISION, WIDE)
    return sums, ones + column_of(columns)


@launched
def causal_read(
    x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n,
    key_weight, key_weight_b, key_weight_h, key_weight_n, codes, key_codes, states,
    out, out_b, out_h, out_n, out_c, support, mean, sigma, weight, scales, ratios, floor,
    n, heads, stretches, beta,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program reads for one stretch; unless SHARED it hashes the queries too."""
    row = (tl.program_id(0) // stretches).to(tl.int64)
    stretch = tl.program_id(0) % stretches
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    states += (row * (stretches + 1) + stretch) * size
    sums, ones, total, count = load_state(states, SIZE, E, F, BE, BF)
    _, of_ones = state_places(states + size, SIZE, E, F, BE, BF)
    after = tl.load(of_ones, mask=tl.arange(0, BF) < F, other=0.0)
    # Packed codes cannot be NaN, but the sum over the stretch's codes can: it marks the stretch's tokens.
    marked = tl.sum(after, axis=0) * 0.0
    v += batch * v_b + head * v_h
    mask += batch * mask_b
    key_weight += batch * key_weight_b + head * key_weight_h
    out += batch * out_b + head * out_h
    least = 0.0 if SIZE == 0 else tl.load(floor + head)
    matrix = load_mixing(scales, ratios, head, MIX, SIZE, F, BF)
    if not SHARED:
        samples, lengths, middle, mix, scale = load_functions(
            support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
        )
    first = stretch * (STRIDE * BLOCK)
    # The compiler removes a loop over one block.
    blocks = 1 if STRIDE == 1 else tl.cdiv(tl.minimum(STRIDE * BLOCK, n - first), BLOCK)
    for block in range(0, blocks):
        start = first + block * BLOCK
        keys, weights, values = load_values(
            v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, start, n, MASKED, WEIGHTED, E, BE, BLOCK
        )
        h, f = load_features(key_codes + row * n, start, n, SIZE, F, BITS, BF, BB, BLOCK)
        if SHARED:
            f_q = f
            mark = marked
        else:
            tokens = load_tile(x + batch * x_b + head * x_h, start, n, x_n, x_c, D, BD, BLOCK)
            h_q, mark = hash_tile(
                tokens, start + tl.arange(0, BLOCK) < n, samples, lengths, middle, mix, scale,
                codes + row * n, start, n, HASH, PRECISION, True, BITS, BB, BLOCK,
            )  # fmt: skip
            f_q = features_of(h_q, SIZE, F, BITS, BF, BB)
            mark = marked + 0.0 * mark
        above, inverse, _at_floor = causal_tops(
            mixed_features(f_q, matrix, PIECES, PRECISION, SIZE), f, keys, weights, values,
            sums, ones, total, count, beta, least, WHOLE, WEIGHTED, PIECES, PRECISION, SIZE, BF, BLOCK,
        )  # fmt: skip
        tile = above * (inverse + mark)[:, None]
        store_tile(out, tile, start, n, out_n, out_c, E, BE, BLOCK)
        if STRIDE > 1:
            sums, ones = key_sums(
                h, weights, values, sums, ones, 1 if key_weight.dtype.element_ty == tl.bfloat16 else 2,
                WEIGHTED, PIECES, PRECISION, SIZE, F, BITS, BF, BB, WIDE,
            )  # fmt: skip


@launched
def causal_gather_grad(
    grad, grad_b, grad_h, grad_n, grad_c, v, v_b, v_h, v_n, v_c, mask, mask_b, mask_n,
    key_weight, key_weight_b, key_weight_h, key_weight_n, codes, key_codes, states, partial, reads,
    scales, ratios, floor, n, heads, stretches, beta,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, BITS: tl.constexpr,
    BE: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A stretch's share in the gradient of the states before it; also one over each denominator, and e_t."""
    row = (tl.program_id(0) // stretches).to(tl.int64)
    stretch = tl.program_id(0) % stretches
    batch, head = row // heads, row % heads
    place = (row * (stretches + 1) + stretch) * state_size(SIZE, E, F)
    sums, ones, total, count = load_state(states + place, SIZE, E, F, BE, BF)
    grad += batch * grad_b + head * grad_h
    v += batch * v_b + head * v_h
    mask += batch * mask_b
    key_weight += batch * key_weight_b + head * key_weight_h
    least = 0.0 if SIZE == 0 else tl.load(floor + head)
    matrix = load_mixing(scales, ratios, head, MIX, SIZE, F, BF)
    to_sums = tl.zeros((BF, BE), tl.float32)
    to_ones = tl.zeros((BF,), tl.float32)
    to_total, to_count = tl.zeros((BE,), tl.float32), 0.0
    first = stretch * (STRIDE * BLOCK)
    # The compiler removes a loop over one block.
    blocks = 1 if STRIDE == 1 else tl.cdiv(tl.minimum(STRIDE * BLOCK, n - first), BLOCK)
    for block in range(0, blocks):
        start = first + block * BLOCK
        keys, weights, values = load_values(
            v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, start, n, MASKED, WEIGHTED, E, BE, BLOCK
        )
        h, f, h_q, f_q = load_both(
            key_codes + row * n, codes + row * n, start, n, SHARED, SIZE, F, BITS, BF, BB, BLOCK
        )
        above, inverse, at_floor = causal_tops(
            mixed_features(f_q, matrix, PIECES, PRECISION, SIZE), f, keys, weights, values,
            sums, ones, total, count, beta, least, WHOLE, WEIGHTED, PIECES, PRECISION, SIZE, BF, BLOCK,
        )  # fmt: skip
        tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
        a = tile.to(tl.float32) * inverse[:, None]
        e = -tl.sum(a * above, axis=1) * inverse
        if SIZE > 0:
            e = tl.where(at_floor, 0.0, e)
        store_reads(reads + row * n * 2, inverse, e, start, n, BLOCK)
        if SIZE == 0:
            to_ones += tl.sum(f_q.to(tl.float32) * e[:, None], axis=0)
            to_sums += product(f_q, a, PIECES, PRECISION, None, True)
            to_total += beta * tl.sum(a, axis=0)
            to_count += beta * tl.sum(e, axis=0)
        else:
            turned = turned_features(h_q, False, WIDE, SIZE, F, BITS, BF, BB)
            to_sums = tall_product(turned, a, PIECES, PRECISION, WIDE, to_sums)
            to_ones += column_of(tall_sums(turned, e, PIECES, PRECISION, WIDE))
        if STRIDE > 1:
            sums, ones = key_sums(
                h, weights, values, sums, ones, 1 if key_weight.dtype.element_ty == tl.bfloat16 else 2,
                WEIGHTED, PIECES, PRECISION, SIZE, F, BITS, BF, BB, WIDE,
            )  # fmt: skip
    store_state(partial + place, to_sums, to_ones, to_total, to_count, SIZE, E, F, BE, BF)


@launched
def causal_token_grad(
    grad, grad_b, grad_h, grad_n, grad_c, x, x_b, x_h, x_n, x_c, v, v_b, v_h, v_n, v_c,
    mask, mask_b, mask_n, key_weight, key_weight_b, key_weight_h, key_weight_n, codes, key_codes,
    states, partial, reads, to_x, to_v, to_key_weight, to_weight, to_levels, to_bit,
    support, mean, sigma, weight, scales, ratios, n, heads, stretches, beta,
    SHARED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHT: tl.constexpr, KEY_WEIGHT: tl.constexpr, LEVELS: tl.constexpr,
    STORED: tl.constexpr, ADDED: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr,
    HASH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of a stretch's tokens (QUERIES, KEYS or both), and of values and weights.

    They come from the state before a block, from tokens after it, and from the block itself. Blocks of
    queries go from first to last, those of keys from last to first. Where queries are the keys, their
    gradient as queries is STORED in `to_bit`, and ADDED in the launch for keys.
    """
    row = (tl.program_id(0) // stretches).to(tl.int64)
    stretch = tl.program_id(0) % stretches
    batch, head = row // heads, row % heads
    size = state_size(SIZE, E, F)
    place = (row * (stretches + 1) + stretch) * size
    to_sums, to_ones, to_total, to_count = load_state(partial + place + size, SIZE, E, F, BE, BF)
    # Of several blocks, what does not change is loaded before all; of one, where it is used.
    if STRIDE > 1 and QUERIES:
        sums, ones, _, _ = load_state(states + place, SIZE, E, F, BE, BF)
    grad += batch * grad_b + head * grad_h
    v += batch * v_b + head * v_h
    mask += batch * mask_b
    key_weight += batch * key_weight_b + head * key_weight_h
    matrix = load_mixing(scales, ratios, head, MIX, SIZE, F, BF)
    if TOKENS:
        walsh = load_mixing(scales, ratios, head, WALSH, SIZE, F, BF)
    if LEVELS:
        slope = load_mixing(scales, ratios, head, SLOPE, SIZE, F, BF)
    if STRIDE > 1 and TOKENS and not STORED:
        samples, lengths, middle, mix, scale = load_functions(
            support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
        )
    to_mix = tl.zeros((BM, BB), tl.float32)
    to_scales, to_ratios = tl.zeros((BF,), tl.float32), tl.zeros((BF,), tl.float32)
    first = stretch * (STRIDE * BLOCK)
    blocks = 1 if STRIDE == 1 else tl.cdiv(tl.minimum(STRIDE * BLOCK, n - first), BLOCK)
    for block in range(0, blocks):
        start = first + (blocks - 1 - block if KEYS else block) * BLOCK
        inverse, e = load_reads(reads + row * n * 2, start, n, BLOCK)
        tile = load_tile(grad, start, n, grad_n, grad_c, E, BE, BLOCK)
        a = tile.to(tl.float32) * inverse[:, None]
        keys = load_keys(mask, mask_n, start, n, MASKED, BLOCK)
        if KEY_WEIGHT or STRIDE > 1:
            keys, weights, values = load_values(
                v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, start, n, MASKED, WEIGHTED, E, BE, BLOCK
            )
        h, f, h_q, f_q = load_both(
            key_codes + row * n, codes + row * n, start, n, SHARED, SIZE, F, BITS, BF, BB, BLOCK
        )
        g_q = mixed_features(f_q, matrix, PIECES, PRECISION, SIZE)
        w, seen = pairs(g_q, f, keys, beta, PIECES, PRECISION, SIZE, BLOCK)
        if KEY_WEIGHT:
            to_pairs = product(a, tl.trans(values), PIECES, PRECISION) + e[:, None]
            to_pairs = tl.where(seen, to_pairs, 0.0)
        if KEYS and (VALUES or KEY_WEIGHT):
            g = g_q if SHARED else mixed_features(f, matrix, PIECES, PRECISION, SIZE)
            later = float_product(g, to_sums, PIECES, PRECISION)
            if SIZE == 0:
                later += to_total[None, :]
            if KEY_WEIGHT:
                to_weights = tl.sum(to_pairs * w, axis=0) + tl.sum(later * values.to(tl.float32), axis=1)
                to_weights += tl.sum(g.to(tl.float32) * to_ones[None, :], axis=1) + to_count
                rows = start + tl.arange(0, BLOCK)
                places = to_key_weight + row * n + rows
                to_weights = tl.where(keys, to_weights, 0.0)
                tl.store(places, to_weights.to(to_key_weight.dtype.element_ty), mask=rows < n)
            if VALUES:
                to_values = grad_product(tl.trans(w), a, GRAD_PRECISION) + later
                if WEIGHTED:
                    to_values *= load_weights(key_weight, key_weight_n, start, n, BLOCK)[:, None]
                to_values = tl.where(keys[:, None], to_values, 0.0)
                store_tile(to_v + row * n * E, to_values, start, n, E, 1, E, BE, BLOCK)
        if (TOKENS or LEVELS) and not KEY_WEIGHT:
            if STRIDE == 1:
                keys, weights, values = load_values(
                    v, v_n, v_c, mask, mask_n, key_weight, key_weight_n, start, n,
                    MASKED, WEIGHTED, E, BE, BLOCK,
                )  # fmt: skip
            to_pairs = product(a, tl.trans(values), PIECES, PRECISION) + e[:, None]
            to_pairs = tl.where(seen, to_pairs, 0.0)
        to_features = tl.zeros((BLOCK, BF), tl.float32)
        if KEYS and TOKENS:
            to_features = product(values, tl.trans(to_sums), PIECES, PRECISION) + to_ones[None, :]
            to_features += product(tl.trans(to_pairs), f_q, PIECES, PRECISION)
            if WEIGHTED:
                to_features *= weights[:, None]
            to_features = tl.where(keys[:, None], to_features, 0.0)
        if QUERIES and (TOKENS or LEVELS):
            if WEIGHTED:
                to_pairs *= weights[None, :]
            if STRIDE == 1:
                sums, ones, _, _ = load_state(states + place, SIZE, E, F, BE, BF)
            as_query = product(to_pairs, f, PIECES, PRECISION) + e[:, None] * ones[None, :]
            as_query += product(tile, tl.trans(sums), PIECES, PRECISION) * inverse[:, None]
            to_features += as_query
            if LEVELS:
                to_scales += tl.sum(as_query * g_q, axis=0)
                to_ratios += tl.sum(as_query * product(f_q, slope, PIECES, PRECISION), axis=0)
        if TOKENS:
            if SIZE == 0:
                to_codes = to_features
            else:
                to_features = float_product(to_features, tl.trans(walsh), PIECES, PRECISION)
                own = h_q if QUERIES else h
                to_codes = to_bits(to_features, own, PIECES, PRECISION, SIZE, F, BF, BITS, BB)
            if ADDED:
                to_codes += load_tile(to_bit + row * n * BITS, start, n, BITS, 1, BITS, BB, BLOCK)
            if STORED:
                store_tile(to_bit + row * n * BITS, to_codes, start, n, BITS, 1, BITS, BB, BLOCK)
        if TOKENS and not STORED:
            tokens = load_tile(x + batch * x_b + head * x_h, start, n, x_n, x_c, D, BD, BLOCK)
            if STRIDE == 1:
                samples, lengths, middle, mix, scale = load_functions(
                    support, mean, sigma, weight, head, HASH, D, M, BITS, BD, BM, BB
                )
            to_tokens, features, to_y = project_back(
                tokens, to_codes, tl.full((BLOCK,), 1.0, tl.float32), samples, lengths, middle, mix, scale,
                HASH, PRECISION, GRAD_PRECISION, BITS,
            )  # fmt: skip
            store_tile(to_x + row * n * D, to_tokens, start, n, D, 1, D, BD, BLOCK)
            if WEIGHT:
                to_mix += dot(features, to_y, PRECISION, None, True)
        if STRIDE > 1 and QUERIES:
            sums, ones = key_sums(
                h, weights, values, sums, ones, 1 if key_weight.dtype.element_ty == tl.bfloat16 else 2,
                WEIGHTED, PIECES, PRECISION, SIZE, F, BITS, BF, BB, WIDE,
            )  # fmt: skip
        if STRIDE > 1 and KEYS:
            turned = turned_features(h_q, False, WIDE, SIZE, F, BITS, BF, BB)
            to_sums = tall_product(turned, a, PIECES, PRECISION, WIDE, to_sums)
            to_ones += column_of(tall_sums(turned, e, PIECES, PRECISION, WIDE))
    if WEIGHT:
        sample, bit = tl.arange(0, BM)[:, None], tl.arange(0, BB)[None, :]
        to_weight += (row * stretches + stretch) * (M * BITS)
        tl.store(to_weight + sample * BITS + bit, to_mix, mask=(sample < M) & (bit < BITS))
    if LEVELS:
        feature = tl.arange(0, BF)
        to_levels += (row * stretches + stretch) * (2 * F)
        tl.store(to_levels + feature, to_scales, mask=feature < F)
        tl.store(to_levels + F + feature, to_ratios, mask=feature < F)
