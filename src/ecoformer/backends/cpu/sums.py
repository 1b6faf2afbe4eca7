"""Sums over keys by bucket, and what queries read by table.

A code is cut into digits of a few bits. Each token adds its value to one bucket a digit; buckets are folded
to the state. Then a table holds what every value of a digit reads from the state, and a query adds one row
a digit. The paper's state has a row a bit, the sum of h v, and one for the values' own sum; with groups of
bits it has a row for each of a group's values. A state in scratch memory is named by two offsets: that of its
rows (`sums`), and that of their tallies in fp64 (`tally`), the sums of the keys' weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, STRETCH, Problem, Worker
from ecoformer.backends.cpu.rows import (
    add_row,
    add_row_twice,
    clear_row,
    clear_tallies,
    fold_row,
    mix_rows,
    read_rows,
    read_two_rows,
    scale_row,
    sum_rows,
    table_row,
)
from ecoformer.backends.cpu.vectors import digits, doubles, floats, octets, padded, state_rows


@inlined
def clear(w: Worker, sums: int, tally: int) -> None:
    """An empty state. After the tallies there is a number that says whether any key is NaN."""
    rows = state_rows(w.p.bits, w.p.group)
    clear_row(w.memory, sums, rows * padded(w.p.channels))
    clear_tallies(w.exact, tally, rows + 1)


@inlined
def save(w: Worker, sums: int, tally: int, to_sums: int, to_tallies: int, index: int) -> None:
    """Copy a state to an array of states."""
    rows = state_rows(w.p.bits, w.p.group)
    size = rows * padded(w.p.channels)
    scale_row(floats(to_sums), index * size, w.memory, sums, size, float32(1))
    for i in range(rows + 1):
        doubles(to_tallies)[index * (rows + 1) + i] = w.exact[tally + i]


@inlined
def merge(w: Worker, from_sums: int, from_tallies: int, first: int, last: int) -> None:
    """The sum of states `first` to `last` of an array."""
    rows = state_rows(w.p.bits, w.p.group)
    size = rows * padded(w.p.channels)
    clear(w, w.at.sums, w.at.tallies)
    for part in range(first, last):
        add_row(w.memory, w.at.sums, floats(from_sums), part * size, size)
        for i in range(rows + 1):
            w.exact[w.at.tallies + i] += doubles(from_tallies)[part * (rows + 1) + i]


@inlined
def gather(w: Worker, batch: int, head: int, first: int, last: int, to: int) -> None:
    """Hash keys `first` to `last`, keep their codes from `to` on, and add them to the state."""
    p, at = w.p, w.at
    keys = floats(p.k if p.k else p.q)
    start = batch * p.k_batch + head * p.k_head
    for begin in range(first, last, STRETCH):
        count = min(STRETCH, last - begin)
        hash_tokens(w, at.keys, keys, start + begin * p.k_token, p.k_token, count, to + begin)
        clear_buckets(w)
        if _fill(w, batch, head, begin, count, to + begin):
            w.exact[at.tallies + state_rows(p.bits, p.group)] = 1.0
        fold(w, at.sums, at.tallies)


@inlined
def clear_buckets(w: Worker) -> None:
    """All buckets, and their counts."""
    clear_row(w.memory, w.at.buckets, w.at.tables - w.at.buckets)
    clear_tallies(w.exact, w.at.counts, digits(w.p.bits, w.p.digit) << w.p.digit)


@inlined
def _pair(code: int, digit: int) -> tuple[int, int]:
    """Which buckets, or rows of the tables, belong to the two digits of a code."""
    many = int64(1) << digit
    return code & (many - 1), many + ((code >> digit) & (many - 1))


@inlined
def key_weight(p: Problem, batch: int, head: int, token: int) -> Any:
    """The weight of a key: 0 for padding, 1 where keys have none."""
    if p.mask and octets(p.mask)[batch * p.mask_batch + token * p.mask_token]:
        return float32(0)
    if not p.key_weight:
        return float32(1)
    index = batch * p.key_weight_batch + head * p.key_weight_head + token * p.key_weight_token
    return floats(p.key_weight)[index]


@inlined
def _fill(w: Worker, batch: int, head: int, begin: int, count: int, to: int) -> Any:
    """Every key's value to its buckets; whether any key is NaN."""
    p = w.p
    values, masks, weights = floats(p.v), octets(p.mask), floats(p.key_weight)
    v0 = batch * p.v_batch + head * p.v_head
    m0 = batch * p.mask_batch
    w0 = batch * p.key_weight_batch + head * p.key_weight_head
    broken = int64(0)
    for t in range(count):
        if p.mask and masks[m0 + (begin + t) * p.mask_token]:
            continue
        broken |= w.nans[to + t]
        weight = weights[w0 + (begin + t) * p.key_weight_token] if p.key_weight else float32(1)
        add_to_buckets(w, w.codes[to + t], values, v0 + (begin + t) * p.v_token, weight, weight)
    return broken != 0


@inlined
def add_to_buckets(w: Worker, code: int, x: Any, x0: int, number: float, weight: float) -> None:
    """Add number * x to one bucket a digit, and a weight to their counts."""
    p, at, exact, memory = w.p, w.at, w.exact, w.memory
    wide, count, low = padded(p.channels), digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    if count == 2:
        one, two = _pair(code, p.digit)
        exact[at.counts + one] += weight
        exact[at.counts + two] += weight
        one, two = at.buckets + one * wide, at.buckets + two * wide
        add_row_twice(memory, one, memory, two, x, x0, p.channels, number)
    else:
        for g in range(count):
            bucket = (g << p.digit) + ((code >> (g * p.digit)) & low)
            exact[at.counts + bucket] += weight
            row = at.buckets + bucket * wide
            table_row(memory, row, memory, row, x, x0, p.channels, number)


@inlined
def fold(w: Worker, sums: int, tally: int) -> None:
    """Add the buckets to a state."""
    if w.p.group:
        _fold_groups(w, sums, tally)
    else:
        _fold_bits(w, sums, tally)


@compiled
def _fold_bits(w: Worker, sums: int, tally: int) -> None:
    """Upper half minus lower is a bit's sum, both together are the other bits' buckets."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide = padded(p.channels)
    for g in range(digits(p.bits, p.digit)):
        base = at.buckets + (g << p.digit) * wide
        count = at.counts + (g << p.digit)
        for r in range(min(p.digit, p.bits - g * p.digit) - 1, -1, -1):
            bit = g * p.digit + r
            half = int64(1) << r
            for low in range(half):
                one, two = base + low * wide, base + (low + half) * wide
                fold_row(memory, sums + bit * wide, memory, one, memory, two, wide)
                exact[tally + bit] += exact[count + low + half] - exact[count + low]
                exact[count + low] += exact[count + low + half]
        if g == 0:
            add_row(memory, sums + p.bits * wide, memory, base, wide)
            exact[tally + p.bits] += exact[count]


@compiled
def _fold_groups(w: Worker, sums: int, tally: int) -> None:
    """Sums of each group's values, the highest group of a digit first."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, values = padded(p.channels), int64(1) << p.group
    for g in range(digits(p.bits, p.digit)):
        base = at.buckets + (g << p.digit) * wide
        count = at.counts + (g << p.digit)
        groups = min(p.digit, p.bits - g * p.digit) // p.group
        for i in range(groups - 1, -1, -1):
            row = ((g * p.digit) // p.group + i) << p.group
            if i == 0:
                add_row(memory, sums + row * wide, memory, base, values * wide)
                for value in range(values):
                    exact[tally + row + value] += exact[count + value]
                continue
            lows = int64(1) << (i * p.group)
            for value in range(values):
                bucket = value * lows
                for low in range(lows):
                    add_row(memory, sums + (row + value) * wide, memory, base + (bucket + low) * wide, wide)
                    exact[tally + row + value] += exact[count + bucket + low]
                    if value:
                        exact[count + low] += exact[count + bucket + low]
                if value:
                    add_row(memory, base, memory, base + bucket * wide, lows * wide)


@inlined
def tabulate(w: Worker, head: int) -> None:
    """Tables of numerators and denominators from the state, whose groups are mixed in place."""
    if w.p.group:
        mix_groups(w, head, w.at.sums, w.at.tallies)
        _join_tables(w)
    else:
        tabulate_bits(w)


@compiled
def tabulate_bits(w: Worker) -> None:
    """A digit's first row has all its bits at -1, each bit adds twice its sum.

    The constant, far larger than the rest, joins the first digit's rows last, which rounds it once.
    """
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, constant = padded(p.channels), doubles(p.constant)[0]
    for g in range(digits(p.bits, p.digit)):
        base = at.tables + (g << p.digit) * wide
        below = at.denominators + (g << p.digit)
        count = min(p.digit, p.bits - g * p.digit)
        clear_row(memory, base, wide)
        exact[below] = constant * exact[at.tallies + p.bits] if g == 0 else 0.0
        for r in range(count):
            bit = g * p.digit + r
            table_row(memory, base, memory, base, memory, at.sums + bit * wide, wide, float32(-1))
            exact[below] -= exact[at.tallies + bit]
        for r in range(count):
            bit = g * p.digit + r
            half = int64(1) << r
            for low in range(half):
                to, sums = base + (low + half) * wide, at.sums + bit * wide
                table_row(memory, to, memory, base + low * wide, memory, sums, wide, float32(2))
                exact[below + low + half] = exact[below + low] + 2 * exact[at.tallies + bit]
        if g == 0:
            for row in range(int64(1) << count):
                to, sums = base + row * wide, at.sums + p.bits * wide
                table_row(memory, to, memory, to, memory, sums, wide, float32(constant))


@compiled
def mix_groups(w: Worker, head: int, sums: int, tally: int) -> None:
    """Mix the rows of each group by scale * ratio^d, in place, bit by bit."""
    p, memory, exact = w.p, w.memory, w.exact
    wide, values, groups = padded(p.channels), int64(1) << p.group, p.bits // p.group
    scales, ratios = floats(p.scale), floats(p.ratio)
    for j in range(groups):
        scale, ratio = scales[head * groups + j], ratios[head * groups + j]
        base, count = sums + (j << p.group) * wide, tally + (j << p.group)
        scale_row(memory, base, memory, base, values * wide, scale)
        for value in range(values):
            exact[count + value] *= scale
        for r in range(p.group):
            half = int64(1) << r
            for first in range(0, values, 2 * half):
                one_row, two_row = base + first * wide, base + (first + half) * wide
                mix_rows(memory, one_row, memory, two_row, half * wide, ratio)
                for value in range(first, first + half):
                    one, two = exact[count + value], exact[count + value + half]
                    exact[count + value] = one + ratio * two
                    exact[count + value + half] = two + ratio * one


@compiled
def _join_tables(w: Worker) -> None:
    """A digit's table: the sum of what its groups' values read."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, values = padded(p.channels), int64(1) << p.group
    for g in range(digits(p.bits, p.digit)):
        base = at.tables + (g << p.digit) * wide
        below = at.denominators + (g << p.digit)
        row = (g * p.digit) // p.group << p.group
        scale_row(memory, base, memory, at.sums + row * wide, values * wide, float32(1))
        for value in range(values):
            exact[below + value] = exact[at.tallies + row + value]
        for i in range(1, min(p.digit, p.bits - g * p.digit) // p.group):
            lows, row = int64(1) << (i * p.group), row + values
            for value in range(values - 1, -1, -1):
                group = at.sums + (row + value) * wide
                for low in range(lows):
                    to = base + (value * lows + low) * wide
                    table_row(memory, to, memory, base + low * wide, memory, group, wide, float32(1))
                    exact[below + value * lows + low] = exact[below + low] + exact[at.tallies + row + value]


@inlined
def scatter(w: Worker, batch: int, head: int, first: int, last: int, to: int, total: float) -> None:
    """What queries `first` to `last` read from the tables; codes start at `to`, or are computed here."""
    p, at = w.p, w.at
    queries, start = floats(p.q), batch * p.q_batch + head * p.q_head
    out, out0 = floats(p.out), batch * p.out_batch + head * p.out_head
    broken = w.exact[at.tallies + state_rows(p.bits, p.group)] != 0.0
    for begin in range(first, last, BLOCK):
        count = min(BLOCK, last - begin)
        codes0 = int64(to + begin)
        if p.k:
            codes0 = int64(0)
            hash_tokens(w, int64(0), queries, start + begin * p.q_token, p.q_token, count, codes0)
        for t in range(count):
            below, one, two = look_up(w, w.codes[codes0 + t])
            by = divisor(p, head, below, total, broken or w.nans[codes0 + t] != 0)
            read(w, one, two, out, out0 + (begin + t) * p.out_token, by)


@inlined
def total_weight(w: Worker) -> Any:
    """The number of keys, or the sum of their weights."""
    p, exact, tally = w.p, w.exact, w.at.tallies
    if p.group == 0:
        return exact[tally + p.bits]
    total = 0.0
    for value in range(int64(1) << p.group):
        total += exact[tally + value]
    return total


@inlined
def divisor(p: Problem, head: int, below: float, total: float, broken: bool) -> Any:
    """A denominator, at least its floor; 1 where there are no keys, NaN where a code is."""
    by = below
    if p.group:
        by = max(by, floats(p.floor)[head] * total)
    by = 1.0 if total == 0.0 else by
    return float32(np.nan) if broken else float32(by)


@inlined
def look_up(w: Worker, code: int) -> tuple[float, int, int]:
    """A code's denominator, and where the two rows of the tables are that it reads; more are in `rows`."""
    p, at, exact = w.p, w.at, w.exact
    wide, number, low = padded(p.channels), digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    if number == 2:
        one, two = _pair(code, p.digit)
        below = exact[at.denominators + one] + exact[at.denominators + two]
        return below, at.tables + one * wide, at.tables + two * wide
    below = float64(0)
    for g in range(number):
        row = (g << p.digit) + ((code >> (g * p.digit)) & low)
        w.rows[at.rows + g] = at.tables + row * wide
        below += exact[at.denominators + row]
    return below, int64(0), int64(0)


@inlined
def read(w: Worker, one: int, two: int, out: Any, to: int, by: float) -> None:
    """The sum of the rows that were looked up last, divided by a number."""
    p, at, memory, number = w.p, w.at, w.memory, digits(w.p.bits, w.p.digit)
    if number == 2:
        read_two_rows(out, to, memory, one, memory, two, p.channels, by)
    else:
        read_rows(out, to, memory, w.rows[at.rows : at.rows + number], number, p.channels, by)


@inlined
def sum_reads(w: Worker, one: int, two: int, out: Any, to: int) -> None:
    """The sum of the rows that were looked up last."""
    p, at, memory, number = w.p, w.at, w.memory, digits(w.p.bits, w.p.digit)
    if number == 2:
        table_row(out, to, memory, one, memory, two, p.channels, float32(1))
    else:
        sum_rows(out, to, memory, w.rows[at.rows : at.rows + number], number, p.channels, float32(1))
