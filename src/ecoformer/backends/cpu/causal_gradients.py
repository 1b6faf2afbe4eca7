"""Gradients in causal order: queries from the first token on, then keys from the last one back.

Both are taken in parts of a few tokens: a token reads the state of the parts before it (of keys), or after it
(of queries' gradients), and the tokens of its own part one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.causal import add_items, prepare_levels, weigh_values
from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.gradients import (
    add_levels,
    begin_gradients,
    begin_keys,
    block_dots,
    denominator_gradient,
    finish_keys,
    finish_queries,
    flip_bits,
    no_bit_gradients,
    prepare_flips,
    save_key_weights,
    save_levels,
    save_weights,
    sum_dots,
    sum_tallies,
)
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, PART, Gradients, Worker
from ecoformer.backends.cpu.rows import add_row, add_signed_row, carry_row, combine_row, scale_row, table_row
from ecoformer.backends.cpu.sums import clear, divisor, key_weight, mix_groups
from ecoformer.backends.cpu.vectors import count_bits, dot, doubles, floats, octets, padded, state_rows

_ZERO = np.float32(0)


@inlined
def causal_gradients(w: Worker, g: Gradients, unit: int, batch: int, head: int) -> None:
    """All tokens of a head."""
    p, at = w.p, w.at
    for r in range(padded(p.bits)):
        w.memory[at.pair + r] = np.float32(1)  # of the paper's affinity, it stays so
    if p.group:
        prepare_levels(w, head)
        for row in range(state_rows(p.bits, p.group)):
            for r in range(p.group):
                flipped = w.memory[at.levels + (row ^ (int64(1) << r))]
                half = float32(0.5) * (w.memory[at.levels + row] - flipped)
                w.memory[at.level_flips + row * p.group + r] = half
    for i in range(padded(p.channels)):
        w.memory[at.zeros + i] = _ZERO
    _begin(w)
    for begin in range(0, p.keys, BLOCK):
        _query_block(w, g, unit, batch, head, begin, min(BLOCK, p.keys - begin))
    if p.k:
        save_weights(w, g.weight, unit)
    save_levels(w, g, unit)
    _begin(w)
    for begin in range((p.keys - 1) // BLOCK * BLOCK, -1, -BLOCK):
        _key_block(w, g, unit, batch, head, begin, min(BLOCK, p.keys - begin))
    save_key_weights(w, g, unit)


@inlined
def _begin(w: Worker) -> None:
    """No tokens so far. `counts` is the number of keys, or its gradient."""
    begin_gradients(w)
    clear(w, w.at.sums, w.at.tallies)
    for i in range(state_rows(w.p.bits, w.p.group) * padded(w.p.channels)):
        w.memory[w.at.recent + i] = _ZERO
    w.exact[w.at.counts] = 0.0


@inlined
def _hash_keys(w: Worker, batch: int, head: int, begin: int, count: int) -> None:
    p = w.p
    token = batch * p.k_batch + head * p.k_head + begin * p.k_token
    hash_tokens(w, w.at.keys, floats(p.k if p.k else p.q), token, p.k_token, count, int64(0))


@inlined
def _hash_queries(w: Worker, batch: int, head: int, begin: int, count: int) -> None:
    """Where codes are shared, the keys' are theirs."""
    p = w.p
    if p.k:
        token = batch * p.q_batch + head * p.q_head + begin * p.q_token
        hash_tokens(w, int64(0), floats(p.q), token, p.q_token, count, int64(BLOCK))


@inlined
def _prepare_state(w: Worker, head: int) -> tuple[int, int]:
    """The state as a part reads it: groups are mixed, in a copy."""
    p, at, rows = w.p, w.at, state_rows(w.p.bits, w.p.group)
    sums, tally = at.sums, at.tallies
    if p.group:
        scale_row(w.memory, at.tables, w.memory, at.sums, rows * padded(p.channels), float32(1))
        for i in range(rows):
            w.exact[at.denominators + i] = w.exact[at.tallies + i]
        mix_groups(w, head, at.tables, at.denominators)
        sums, tally = at.tables, at.denominators
    prepare_flips(w, sums, tally)
    return sums, tally


@inlined
def _read_state(
    w: Worker, code: int, x: Any, x0: int, sums: int, tally: int, dots: int
) -> tuple[float, float]:
    """What a code reads from a state, times a row x, and of its tallies; by bits in `dots` and `weights`."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    flip_bits(w, code, x, x0, sums, tally, dots)
    above = sum_dots(w, code, x, x0, sums, dots)
    if p.group:
        return above, sum_tallies(w)
    below = doubles(p.constant)[0] * exact[tally + p.bits]
    for r in range(p.bits):
        memory[at.weights + r] = memory[at.flips + r]
        below += exact[tally + r] if (code >> r) & 1 else -exact[tally + r]
    return above, below


@inlined
def _read_pair(w: Worker, code: int, other: int, times: float, weight: float, dots: int) -> Any:
    """The affinity of two tokens. What it adds, times two numbers, joins what the first one reads by bits."""
    p, at, memory = w.p, w.at, w.memory
    wide, signs, differ = padded(p.bits), other, code ^ other
    if p.group:
        affinity, signs, low = float64(0), code, (int64(1) << p.group) - 1
        for j in range(p.bits // p.group):
            row = (j << p.group) + ((differ >> (j * p.group)) & low)
            same = memory[at.levels + row]
            affinity += same
            memory[at.same + j] += times * same
            w.exact[at.same_tallies + j] += weight * same
            for r in range(p.group):
                memory[at.pair + j * p.group + r] = memory[at.level_flips + row * p.group + r]
    else:
        affinity = doubles(p.constant)[0] + (p.bits - 2 * count_bits(differ))
    add_signed_row(memory, dots, memory, at.pair, wide, signs, times)
    add_signed_row(memory, at.weights, memory, at.pair, wide, signs, weight)
    return affinity


@compiled
def _query_block(w: Worker, g: Gradients, unit: int, batch: int, head: int, begin: int, count: int) -> None:
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, wide_b, rows = padded(p.channels), padded(p.bits), state_rows(p.bits, p.group)
    grads, grad = floats(p.out), batch * p.out_batch + head * p.out_head + begin * p.out_token
    queries = int64(BLOCK) if p.k else int64(0)
    _hash_keys(w, batch, head, begin, count)
    _hash_queries(w, batch, head, begin, count)
    no_bit_gradients(w, count)
    for first in range(0, count, PART):
        n = min(PART, count - first)
        sums, tally = _prepare_state(w, head)
        weigh_values(w, batch, head, begin + first, n)
        block_dots(w, grads, grad + first * p.out_token, p.out_token, n)
        for t in range(n):
            code, row, dots = (
                w.codes[queries + first + t],
                grad + (first + t) * p.out_token,
                at.dots + t * wide_b,
            )
            above, below = _read_state(w, code, grads, row, sums, tally, dots)
            for s in range(t + 1):
                weight = memory[at.items + PART * wide + s]
                times = dot(grads, row, memory, at.items + s * wide, p.channels)
                affinity = _read_pair(w, code, w.codes[first + s], times, weight, dots)
                above += affinity * times
                below += affinity * weight
            weight = memory[at.items + PART * wide + t]
            exact[at.counts] += weight
            if weight != 0 and w.nans[first + t]:
                exact[at.tallies + rows] = 1.0
            broken = exact[at.tallies + rows] != 0.0 or w.nans[queries + first + t] != 0
            total = exact[at.counts]
            inverse = 1.0 / float64(divisor(p, head, below, total, broken))
            falls, counted = denominator_gradient(p, head, above, below, inverse, total)
            bits, by = at.bit_grads + (first + t) * wide_b, float32(inverse)
            combine_row(memory, bits, memory, dots, memory, at.weights, wide_b, by, float32(falls))
            if g.levels:
                add_levels(w, code, bits, inverse, falls)
            token = at.divisors + 3 * (begin + first + t)
            exact[token], exact[token + 1], exact[token + 2] = inverse, falls, counted
        add_items(w, int64(first), n, at.recent, at.tallies)
        carry_row(memory, at.sums, memory, at.recent, rows * wide)
    finish_queries(w, g, unit, batch, head, begin, count)


@compiled
def _key_block(w: Worker, g: Gradients, unit: int, batch: int, head: int, begin: int, count: int) -> None:
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, wide_b, rows = padded(p.channels), padded(p.bits), state_rows(p.bits, p.group)
    grad = batch * p.out_batch + head * p.out_head + begin * p.out_token
    values, value = floats(p.v), batch * p.v_batch + head * p.v_head + begin * p.v_token
    queries = int64(BLOCK) if p.k else int64(0)
    _hash_queries(w, batch, head, begin, count)
    _hash_keys(w, batch, head, begin, count)
    begin_keys(w, g, unit, begin, count)
    for first in range((count - 1) // PART * PART, -1, -PART):
        n = min(PART, count - first)
        sums, tally = _prepare_state(w, head)
        for t in range(n):
            token = at.divisors + 3 * (begin + first + t)
            row, by = grad + (first + t) * p.out_token, float32(exact[token])
            scale_row(memory, at.items + t * wide, floats(p.out), row, p.channels, by)
            memory[at.items + PART * wide + t] = exact[token + 1]
        block_dots(w, values, value + first * p.v_token, p.v_token, n)
        for s in range(n - 1, -1, -1):
            index, code = (batch * p.heads + head) * p.keys + begin + first + s, w.codes[first + s]
            exact[at.counts] += exact[at.divisors + 3 * (begin + first + s) + 2]
            weight, of_weight = key_weight(p, batch, head, begin + first + s), 0.0
            out, to = (floats(g.v), index * p.channels) if g.v else (memory, at.row)
            for i in range(p.channels):
                out[to + i] = _ZERO
            masked = p.mask and octets(p.mask)[batch * p.mask_batch + (begin + first + s) * p.mask_token]
            if not masked:
                row, dots = value + (first + s) * p.v_token, at.dots + s * wide_b
                above, below = _read_state(w, code, values, row, sums, tally, dots)
                _add_reads(w, code, sums, out, to)
                for t in range(s, n):
                    item, falls = at.items + t * wide, memory[at.items + PART * wide + t]
                    times = dot(values, row, memory, item, p.channels)
                    affinity = _read_pair(w, code, w.codes[queries + first + t], times, falls, dots)
                    above += affinity * times
                    below += affinity * falls
                    table_row(out, to, out, to, memory, item, p.channels, float32(affinity))
                of_weight = above + below + exact[at.counts]
                bits = at.bit_grads + (first + s) * wide_b
                combine_row(memory, bits, memory, dots, memory, at.weights, wide_b, weight, weight)
                scale_row(out, to, out, to, p.channels, weight)
            if g.key_weight:
                floats(g.key_weight)[index] = of_weight
        add_items(w, queries + first, n, at.recent, at.tallies)
        carry_row(memory, at.sums, memory, at.recent, rows * wide)
    finish_keys(w, g, batch, head, begin, count)


@inlined
def _add_reads(w: Worker, code: int, sums: int, out: Any, to: int) -> None:
    """Add the rows of a state that a code reads."""
    p, memory, wide = w.p, w.memory, padded(w.p.channels)
    if p.group:
        low = (int64(1) << p.group) - 1
        for j in range(p.bits // p.group):
            row = (j << p.group) + ((code >> (j * p.group)) & low)
            add_row(out, to, memory, sums + row * wide, p.channels)
    else:
        for r in range(p.bits + 1):
            sign = float32(1) if (code >> r) & 1 else float32(-1)
            if r == p.bits:
                sign = float32(doubles(p.constant)[0])
            table_row(out, to, out, to, memory, sums + r * wide, p.channels, sign)
