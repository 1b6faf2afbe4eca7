"""Causal order: the state of all tokens so far, and what each token reads from it."""

from __future__ import annotations

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, PART, Worker
from ecoformer.backends.cpu.rows import add_row, carry_row, divide_row, running_row, scale_row, table_row
from ecoformer.backends.cpu.sums import clear, divisor, key_weight, mix_groups
from ecoformer.backends.cpu.vectors import doubles, floats, padded, state_rows

_ZERO = np.float32(0)


@inlined
def causal_head(w: Worker, batch: int, head: int) -> None:
    """All tokens of a head. Sums of the current block are kept apart, which keeps rounding small."""
    p, at = w.p, w.at
    wide, rows = padded(p.channels), state_rows(p.bits, p.group)
    clear(w, at.sums, at.tallies)
    for i in range(rows * wide):
        w.memory[at.recent + i] = _ZERO
    for i in range(wide):
        w.memory[at.zeros + i] = _ZERO
    w.exact[at.counts] = 0.0
    if p.group:
        prepare_levels(w, head)
    keys, queries = floats(p.k if p.k else p.q), floats(p.q)
    k0, q0 = batch * p.k_batch + head * p.k_head, batch * p.q_batch + head * p.q_head
    for begin in range(0, p.keys, BLOCK):
        count = min(BLOCK, p.keys - begin)
        hash_tokens(w, at.keys, keys, k0 + begin * p.k_token, p.k_token, count, int64(0))
        if p.k:
            hash_tokens(w, int64(0), queries, q0 + begin * p.q_token, p.q_token, count, int64(BLOCK))
        if p.group:
            for first in range(0, count, PART):
                _group_part(w, batch, head, begin, first, min(first + PART, count))
                carry_row(w.memory, at.sums, w.memory, at.recent, rows * wide)
        else:
            for t in range(count):
                _bit_step(w, batch, head, begin + t, t, t + BLOCK if p.k else t)
            carry_row(w.memory, at.sums, w.memory, at.recent, rows * wide)


@inlined
def _bit_step(w: Worker, batch: int, head: int, token: int, key: int, query: int) -> None:
    """One token joins the paper's state and reads it."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, constant = padded(p.channels), doubles(p.constant)[0]
    weight = key_weight(p, batch, head, token)
    values, value = floats(p.v), batch * p.v_batch + head * p.v_head + token * p.v_token
    if weight != 0:
        exact[at.tallies + p.bits] += weight
        if w.nans[key]:
            exact[at.tallies + p.bits + 1] = 1.0
    else:
        values, value = memory, at.zeros
    for i in range(wide):
        memory[at.row + i] = _ZERO
    total = exact[at.tallies + p.bits]
    below = constant * total
    for r in range(p.bits + 1):
        sign, reads = weight, float32(constant)
        if r < p.bits:
            sign = weight if (w.codes[key] >> r) & 1 else -weight
            exact[at.tallies + r] += sign
            reads = float32(1) if (w.codes[query] >> r) & 1 else float32(-1)
            below += reads * exact[at.tallies + r]
        recent, earlier = at.recent + r * wide, at.sums + r * wide
        running_row(memory, recent, memory, at.row, memory, earlier, values, value, p.channels, sign, reads)
    broken = exact[at.tallies + p.bits + 1] != 0.0 or w.nans[query] != 0
    by = divisor(p, head, below, total, broken)
    out = batch * p.out_batch + head * p.out_head + token * p.out_token
    divide_row(floats(p.out), out, memory, at.row, p.channels, by)


@compiled
def prepare_levels(w: Worker, head: int) -> None:
    """scale * ratio^d for all values of a group's differing bits."""
    p, memory = w.p, w.memory
    groups, values = p.bits // p.group, int64(1) << p.group
    for j in range(groups):
        ratio, base = floats(p.ratio)[head * groups + j], w.at.levels + (j << p.group)
        memory[base] = floats(p.scale)[head * groups + j]
        for value in range(1, values):
            # Without its lowest bit a value is smaller, and done.
            memory[base + value] = ratio * memory[base + (value & (value - 1))]


@inlined
def weigh_values(w: Worker, batch: int, head: int, first: int, count: int) -> None:
    """The values of a part's keys times their weights, and these weights, in `items`."""
    p, at, wide = w.p, w.at, padded(w.p.channels)
    value = batch * p.v_batch + head * p.v_head
    for t in range(count):
        weight, row = key_weight(p, batch, head, first + t), at.items + t * wide
        w.memory[at.items + PART * wide + t] = weight
        if weight != 0:
            scale_row(w.memory, row, floats(p.v), value + (first + t) * p.v_token, p.channels, weight)
        else:  # whatever padding holds
            scale_row(w.memory, row, w.memory, at.zeros, p.channels, weight)


@inlined
def add_items(w: Worker, codes: int, count: int, sums: int, tally: int) -> None:
    """Add the items of a part, whose codes begin at `codes`, to a state."""
    p, at, memory, wide = w.p, w.at, w.memory, padded(w.p.channels)
    low = (int64(1) << p.group) - 1
    for t in range(count):
        code, item, weight = w.codes[codes + t], at.items + t * wide, memory[at.items + PART * wide + t]
        if p.group:
            for j in range(p.bits // p.group):
                row = (j << p.group) + ((code >> (j * p.group)) & low)
                add_row(memory, sums + row * wide, memory, item, p.channels)
                w.exact[tally + row] += weight
        else:
            for r in range(p.bits + 1):
                sign = float32(1) if r == p.bits or (code >> r) & 1 else float32(-1)
                row = sums + r * wide
                table_row(memory, row, memory, row, memory, item, p.channels, sign)
                w.exact[tally + r] += sign * weight


@compiled
def _group_part(w: Worker, batch: int, head: int, begin: int, first: int, last: int) -> None:
    """Tokens `first` to `last` of a block read the state before them by tables, and each other's values."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, rows, groups = padded(p.channels), state_rows(p.bits, p.group), p.bits // p.group
    low, weights = (int64(1) << p.group) - 1, at.items + PART * wide
    scale_row(memory, at.tables, memory, at.sums, rows * wide, float32(1))
    for i in range(rows):
        exact[at.denominators + i] = exact[at.tallies + i]
    mix_groups(w, head, at.tables, at.denominators)
    weigh_values(w, batch, head, begin + first, last - first)
    for t in range(first, last):
        query, broken = w.codes[t + BLOCK if p.k else t], w.nans[t + BLOCK if p.k else t] != 0
        below = float64(0)
        for i in range(wide):
            memory[at.row + i] = _ZERO
        for j in range(groups):
            row = (j << p.group) + ((query >> (j * p.group)) & low)
            below += exact[at.denominators + row]
            add_row(memory, at.row, memory, at.tables + row * wide, p.channels)
        exact[at.counts] += memory[weights + t - first]
        if memory[weights + t - first] != 0 and w.nans[t]:
            exact[at.tallies + rows] = 1.0
        for s in range(first, t + 1):
            differ, affinity = query ^ w.codes[s], float32(0)
            for j in range(groups):
                affinity += memory[at.levels + (j << p.group) + ((differ >> (j * p.group)) & low)]
            below += affinity * memory[weights + s - first]
            item = at.items + (s - first) * wide
            table_row(memory, at.row, memory, at.row, memory, item, p.channels, affinity)
        by = divisor(p, head, below, exact[at.counts], broken or exact[at.tallies + rows] != 0.0)
        out = batch * p.out_batch + head * p.out_head + (begin + t) * p.out_token
        divide_row(floats(p.out), out, memory, at.row, p.channels, by)
    add_items(w, int64(first), last - first, at.recent, at.tallies)
