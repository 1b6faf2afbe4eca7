"""Gradients in full order: what queries send to the state, and what keys read from its gradient.

The backward is the forward with sides exchanged. A query adds its gradient, divided by the denominator, to
the buckets of its code; mixed by the same matrix, these sums are what keys read. The affinity is linear in
every bit, so a bit's gradient is half the difference of its two values: a token's row (its output's gradient,
or its value) times the rows that its code reads with and without that bit flipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens, product
from ecoformer.backends.cpu.hashing_backward import hash_gradients
from ecoformer.backends.cpu.problem import BLOCK, STRETCH, Gradients, Problem, Worker
from ecoformer.backends.cpu.rows import clear_row, combine_row, scale_row
from ecoformer.backends.cpu.sums import (
    add_to_buckets,
    clear,
    clear_buckets,
    divisor,
    fold,
    key_weight,
    look_up,
    merge,
    mix_groups,
    sum_reads,
    tabulate,
    tabulate_bits,
    total_weight,
)
from ecoformer.backends.cpu.vectors import (
    dot,
    dot_flips,
    doubles,
    floats,
    octets,
    padded,
    signed_sum,
    state_rows,
)

_ZERO = np.float32(0)


@inlined
def prepare_flips(w: Worker, sums: int, tally: int) -> None:
    """What bit gradients need of a state whose groups are mixed."""
    if w.p.group:
        _prepare_group_flips(w, tally)
    else:
        _prepare_columns(w, sums, tally)


@compiled
def _prepare_group_flips(w: Worker, tally: int) -> None:
    p, exact = w.p, w.exact
    for row in range(state_rows(p.bits, p.group)):
        for r in range(p.group):
            half = 0.5 if (row >> r) & 1 else -0.5
            difference = exact[tally + row] - exact[tally + (row ^ (int64(1) << r))]
            w.memory[w.at.flips + row * p.group + r] = half * difference


@compiled
def _prepare_columns(w: Worker, sums: int, tally: int) -> None:
    p, at, wide, wide_b = w.p, w.at, padded(w.p.channels), padded(w.p.bits)
    clear_row(w.memory, at.columns, p.channels * wide_b)
    for r in range(p.bits):
        w.memory[at.flips + r] = w.exact[tally + r]
        for c in range(p.channels):
            w.memory[at.columns + c * wide_b + r] = w.memory[sums + r * wide + c]


@inlined
def block_dots(w: Worker, x: Any, x0: int, stride: int, count: int) -> None:
    """For the paper's affinity: `dots` of a block of rows x."""
    p, at = w.p, w.at
    if not p.group:
        product(x, x0, stride, count, p.channels, w.memory, at.columns, padded(p.bits), at.dots)


@inlined
def flip_bits(w: Worker, code: int, x: Any, x0: int, sums: int, tally: int, dots: int) -> Any:
    """For groups: `dots`, `weights` and `same` of one row x; returns where the weights are."""
    p, at, memory = w.p, w.at, w.memory
    if not p.group:
        return at.flips
    size, low = padded(p.channels) << p.group, (int64(1) << p.group) - 1
    for j in range(p.bits // p.group):
        value, first = (code >> (j * p.group)) & low, j * p.group
        same = dot_flips(
            x, x0, memory, sums + j * size, size >> p.group, value, p.group, p.channels, dots + first
        )
        memory[at.same + j] = same
        w.exact[at.same_tallies + j] = w.exact[tally + (j << p.group) + value]
        flips = at.flips + ((j << p.group) + value) * p.group
        for r in range(p.group):
            memory[at.weights + first + r] = memory[flips + r]
    return at.weights


@inlined
def add_levels(w: Worker, code: int, bits: int, dots: float, weights: float) -> None:
    """Add a query to the sums from which the gradients of scale and ratio are found."""
    p, at, exact, groups = w.p, w.at, w.exact, w.p.bits // w.p.group
    for j in range(groups):
        exact[at.levels_grads + j] += dots * w.memory[at.same + j] + weights * exact[at.same_tallies + j]
        for r in range(j * p.group, (j + 1) * p.group):
            grad = w.memory[bits + r]
            exact[at.levels_grads + groups + j] += grad if (code >> r) & 1 else -grad


@inlined
def begin_gradients(w: Worker) -> None:
    """Clear what is summed over a part."""
    p, at = w.p, w.at
    clear_row(w.memory, at.weight_grads, (p.samples if p.samples else p.dim) * padded(p.bits))
    for i in range(2 * p.bits):
        w.exact[at.levels_grads + i] = 0.0


@inlined
def save_weights(w: Worker, to: int, unit: int) -> None:
    """Write the gradient of hash functions, summed over a part."""
    if to:
        size = (w.p.samples if w.p.samples else w.p.dim) * padded(w.p.bits)
        scale_row(floats(to), unit * size, w.memory, w.at.weight_grads, size, float32(1))


@inlined
def save_key_weights(w: Worker, g: Gradients, unit: int) -> None:
    """The same for keys: after the queries' if these have tokens of their own and the same hash functions."""
    p = w.p
    if p.key_hash:
        save_weights(w, g.key_hash, unit)
    else:
        save_weights(w, g.weight, unit + (p.batch * p.heads * p.pieces if p.k else 0))


@inlined
def save_levels(w: Worker, g: Gradients, unit: int) -> None:
    """Write what the gradients of scale and ratio are found from."""
    if g.levels:
        size = 2 * (w.p.bits // w.p.group)
        for i in range(size):
            doubles(g.levels)[unit * size + i] = w.exact[w.at.levels_grads + i]


@inlined
def sum_dots(w: Worker, code: int, x: Any, x0: int, sums: int, dots: int) -> Any:
    """The product of a row x with all that its code reads, from its `dots` or `same`."""
    p, at, memory = w.p, w.at, w.memory
    if p.group:
        total = float64(0)
        for j in range(p.bits // p.group):
            total += memory[at.same + j]
        return total
    last = dot(x, x0, memory, sums + p.bits * padded(p.channels), p.channels)
    return float64(signed_sum(memory, dots, padded(p.bits), code)) + doubles(p.constant)[0] * last


@inlined
def sum_tallies(w: Worker) -> Any:
    """For groups: what a code reads of tallies."""
    total = float64(0)
    for j in range(w.p.bits // w.p.group):
        total += w.exact[w.at.same_tallies + j]
    return total


@inlined
def denominator_gradient(
    p: Problem, head: int, above: float, below: float, inverse: float, total: float
) -> tuple[float, float]:
    """Gradients of a query's denominator and of the number of keys, which one at its floor has instead.

    `above` is the product of its numerator with the gradient of its output.
    """
    falls = 0.0 if total == 0.0 else -above * inverse * inverse
    if p.group and below < floats(p.floor)[head] * total:
        return 0.0, floats(p.floor)[head] * falls
    return falls, 0.0


@inlined
def query_gradients(w: Worker, g: Gradients, unit: int, batch: int, head: int, first: int, last: int) -> None:
    """Queries `first` to `last`: gradients of their tokens, and of the state."""
    p, at, group = w.p, w.at, unit // w.p.pieces
    merge(w, p.kept_sums, p.kept_tallies, group, group + 1)
    total = total_weight(w)
    if p.group:
        mix_groups(w, head, at.sums, at.tallies)
    else:
        tabulate_bits(w)
    prepare_flips(w, at.sums, at.tallies)
    clear(w, at.grads, at.grad_tallies)
    begin_gradients(w)
    for begin in range(first, last, STRETCH):
        end = min(begin + STRETCH, last)
        clear_buckets(w)
        for start in range(begin, end, BLOCK):
            _query_block(w, g, group, batch, head, start, min(BLOCK, end - start), total)
        fold(w, at.grads, at.grad_tallies)
    if p.k:
        save_weights(w, g.weight, unit)
    save_levels(w, g, unit)


@compiled
def _query_block(
    w: Worker, g: Gradients, group: int, batch: int, head: int, begin: int, count: int, total: float
) -> None:
    p, at, wide = w.p, w.at, padded(w.p.bits)
    queries, token = floats(p.q), batch * p.q_batch + head * p.q_head + begin * p.q_token
    broken = w.exact[at.tallies + state_rows(p.bits, p.group)] != 0.0
    codes = group * p.keys + begin
    if p.k:
        codes = int64(0)
        hash_tokens(w, int64(0), queries, token, p.q_token, count, codes)
    no_bit_gradients(w, count)
    grads, grad = floats(p.out), batch * p.out_batch + head * p.out_head + begin * p.out_token
    block_dots(w, grads, grad, p.out_token, count)
    for t in range(count):
        code, row = w.codes[codes + t], grad + t * p.out_token
        bits, dots = at.bit_grads + t * wide, at.dots + t * wide
        weights = flip_bits(w, code, grads, row, at.sums, at.tallies, dots)
        below = sum_tallies(w) if p.group else look_up(w, code)[0]
        above = sum_dots(w, code, grads, row, at.sums, dots)
        by = divisor(p, head, below, total, broken or w.nans[codes + t] != 0)
        inverse = 1.0 / float64(by)
        falls, counted = denominator_gradient(p, head, above, below, inverse, total)
        w.exact[at.grad_tallies + state_rows(p.bits, p.group)] += counted
        combine_row(w.memory, bits, w.memory, dots, w.memory, weights, wide, float32(inverse), float32(falls))
        if g.levels:
            add_levels(w, code, bits, inverse, falls)
        add_to_buckets(w, code, grads, row, float32(inverse), falls)
    finish_queries(w, g, group, batch, head, begin, count)


@inlined
def no_bit_gradients(w: Worker, count: int) -> None:
    """Clear those of a block."""
    clear_row(w.memory, w.at.bit_grads, count * padded(w.p.bits))


@inlined
def finish_queries(
    w: Worker, g: Gradients, group: int, batch: int, head: int, begin: int, count: int
) -> None:
    """From the bits of the block of queries that was hashed last to tokens; keep shared ones for the keys."""
    p, wide = w.p, padded(w.p.bits)
    if not p.k:
        bits = (group * p.keys + begin) * wide
        scale_row(floats(g.bits), bits, w.memory, w.at.bit_grads, count * wide, float32(1))
    elif g.q or g.weight:
        token, to = batch * p.q_batch + head * p.q_head, (batch * p.heads + head) * p.queries + begin
        token, to, weight = token + begin * p.q_token, to * p.dim, g.weight != 0
        hash_gradients(w, int64(0), floats(p.q), token, p.q_token, count, g.q, to, False, weight)


@inlined
def begin_keys(w: Worker, g: Gradients, group: int, begin: int, count: int) -> None:
    """Bit gradients of a block of keys: what their tokens have as queries, if codes are shared."""
    p, wide = w.p, padded(w.p.bits)
    if p.k:
        no_bit_gradients(w, count)
    else:
        bits = (group * p.keys + begin) * wide
        scale_row(w.memory, w.at.bit_grads, floats(g.bits), bits, count * wide, float32(1))


@inlined
def finish_keys(w: Worker, g: Gradients, batch: int, head: int, begin: int, count: int) -> None:
    """From the bits of the block of keys that was hashed last to tokens."""
    p = w.p
    to_weight = g.key_hash if p.key_hash else g.weight
    if g.k or to_weight:
        keys, token = floats(p.k if p.k else p.q), batch * p.k_batch + head * p.k_head + begin * p.k_token
        to = ((batch * p.heads + head) * p.keys + begin) * p.dim
        add = g.k == g.q and p.k != 0
        hash_gradients(w, w.at.keys, keys, token, p.k_token, count, g.k, to, add, to_weight != 0)


@inlined
def key_gradients(w: Worker, g: Gradients, unit: int, batch: int, head: int, first: int, last: int) -> None:
    """Keys `first` to `last` from the gradient of the state, which is where the state was."""
    p, at = w.p, w.at
    counted = w.exact[at.tallies + state_rows(p.bits, p.group)]
    tabulate(w, head)
    prepare_flips(w, at.sums, at.tallies)
    begin_gradients(w)
    for begin in range(first, last, BLOCK):
        _key_block(w, g, unit // p.pieces, batch, head, begin, min(BLOCK, last - begin), counted)
    save_key_weights(w, g, unit)


@compiled
def _key_block(
    w: Worker, g: Gradients, group: int, batch: int, head: int, begin: int, count: int, counted: float
) -> None:
    p, at, wide = w.p, w.at, padded(w.p.bits)
    keys, token = floats(p.k if p.k else p.q), batch * p.k_batch + head * p.k_head + begin * p.k_token
    codes = int64(0) if p.k else group * p.keys + begin
    if p.k or g.q or g.weight:
        hash_tokens(w, at.keys, keys, token, p.k_token, count, codes)
    begin_keys(w, g, group, begin, count)
    first = (batch * p.heads + head) * p.keys + begin
    values, value = floats(p.v), batch * p.v_batch + head * p.v_head + begin * p.v_token
    block_dots(w, values, value, p.v_token, count)
    for t in range(count):
        code, row, to = w.codes[codes + t], value + t * p.v_token, (first + t) * p.channels
        weight, of_weight = key_weight(p, batch, head, begin + t), 0.0
        out, out0 = (floats(g.v), to) if g.v else (w.memory, at.row)
        if p.mask and octets(p.mask)[batch * p.mask_batch + (begin + t) * p.mask_token]:
            for i in range(p.channels):
                out[out0 + i] = _ZERO
        else:
            below, one, two = look_up(w, code)
            sum_reads(w, one, two, out, out0)
            of_weight = dot(values, row, out, out0, p.channels) + below + counted
            bits, dots = at.bit_grads + t * wide, at.dots + t * wide
            weights = flip_bits(w, code, values, row, at.sums, at.tallies, dots)
            combine_row(w.memory, bits, w.memory, dots, w.memory, weights, wide, weight, weight)
            if p.key_weight:
                scale_row(out, out0, out, out0, p.channels, weight)
        if g.key_weight:
            floats(g.key_weight)[first + t] = of_weight
    finish_keys(w, g, batch, head, begin, count)
