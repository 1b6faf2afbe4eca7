"""Sums over keys by bucket, and what queries read by table.

A code is cut into digits of a few bits. Each token adds its value to one bucket a digit; buckets are folded
to the state. Then a table holds what every value of a digit reads from the state, and a query adds one row
a digit. The paper's state has a row a bit, the sum of h v, and one for the values' own sum; with groups of
bits it has a row for each of a group's values. Sums of keys' weights beside it, and denominators, are in
fp64 (`exact`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, STRETCH, Places, Problem, digits, padded, state_rows
from ecoformer.backends.cpu.rows import (
    add_row,
    add_row_twice,
    fold_row,
    mix_rows,
    read_rows,
    read_two_rows,
    scale_row,
    table_row,
)
from ecoformer.backends.cpu.vectors import doubles, floats, octets

_padded = inlined(padded)
_digits = inlined(digits)
_state_rows = inlined(state_rows)
_ZERO = np.float32(0)


@inlined
def clear(p: Problem, sums: Any, to: int, tallies: Any, tally: int) -> None:
    """No keys so far. Tallies are the weights of the state's rows, and then whether any key is NaN."""
    rows = _state_rows(p.bits, p.group)
    for i in range(rows * _padded(p.channels)):
        sums[to + i] = _ZERO
    for i in range(rows + 1):
        tallies[tally + i] = 0.0


@inlined
def gather(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    batch: int,
    head: int,
    first: int,
    last: int,
    codes: Any,
    nans: Any,
    to: int,
    sums: Any,
    sums0: int,
    tallies: Any,
    tally: int,
) -> None:
    """Hash keys `first` to `last`, keep their codes from `to` on, and add them to the sums."""
    keys = floats(p.k if p.k else p.q)
    start = batch * p.k_batch + head * p.k_head
    for begin in range(first, last, STRETCH):
        count = min(STRETCH, last - begin)
        token = start + begin * p.k_token
        hash_tokens(p, at, room, at.keys, keys, token, p.k_token, count, codes, nans, to + begin)
        for i in range(at.buckets, at.tables):
            room[i] = _ZERO
        for i in range(_digits(p.bits, p.digit) << p.digit):
            exact[at.counts + i] = 0.0
        broken = _fill(p, at, room, exact, batch, head, begin, count, codes, nans, to + begin)
        if broken:
            tallies[tally + _state_rows(p.bits, p.group)] = 1.0
        if p.group:
            _fold_groups(p, at, room, exact, sums, sums0, tallies, tally)
        else:
            _fold_bits(p, at, room, exact, sums, sums0, tallies, tally)


@inlined
def _pair(code: int, digit: int) -> tuple[int, int]:
    """Which buckets, or rows of the tables, belong to the two digits of a code."""
    many = int64(1) << digit
    return code & (many - 1), many + ((code >> digit) & (many - 1))


@inlined
def _fill(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    batch: int,
    head: int,
    begin: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
) -> Any:
    """Every key's value to its buckets; whether any key is NaN."""
    values, masks, weights = floats(p.v), octets(p.mask), floats(p.key_weight)
    v0 = batch * p.v_batch + head * p.v_head
    m0 = batch * p.mask_batch
    w0 = batch * p.key_weight_batch + head * p.key_weight_head
    wide, number, low = _padded(p.channels), _digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    broken = int64(0)
    for t in range(count):
        if p.mask and masks[m0 + (begin + t) * p.mask_token]:
            continue
        code = codes[to + t]
        broken |= nans[to + t]
        source, value, weight = values, v0 + (begin + t) * p.v_token, float32(1)
        if p.key_weight:
            weight = weights[w0 + (begin + t) * p.key_weight_token]
            scale_row(room, at.row, values, value, p.channels, weight)
            source, value = room, at.row
        if number == 2:
            one, two = _pair(code, p.digit)
            exact[at.counts + one] += weight
            exact[at.counts + two] += weight
            buckets = at.buckets + one * wide, at.buckets + two * wide
            add_row_twice(room, buckets[0], buckets[1], source, value, p.channels)
            continue
        for g in range(number):
            bucket = (g << p.digit) + ((code >> (g * p.digit)) & low)
            exact[at.counts + bucket] += weight
            add_row(room, at.buckets + bucket * wide, source, value, p.channels)
    return broken != 0


@compiled
def _fold_bits(
    p: Problem, at: Places, room: Any, exact: Any, sums: Any, sums0: int, tallies: Any, tally: int
) -> None:
    """Buckets to sums: upper half minus lower is a bit's, both together are the other bits' buckets."""
    wide = _padded(p.channels)
    for g in range(_digits(p.bits, p.digit)):
        base = at.buckets + (g << p.digit) * wide
        count = at.counts + (g << p.digit)
        for r in range(min(p.digit, p.bits - g * p.digit) - 1, -1, -1):
            bit = g * p.digit + r
            half = int64(1) << r
            for low in range(half):
                fold_row(
                    sums, sums0 + bit * wide, room, base + low * wide, room, base + (low + half) * wide, wide
                )
                tallies[tally + bit] += exact[count + low + half] - exact[count + low]
                exact[count + low] += exact[count + low + half]
        if g == 0:
            add_row(sums, sums0 + p.bits * wide, room, base, wide)
            tallies[tally + p.bits] += exact[count]


@compiled
def _fold_groups(
    p: Problem, at: Places, room: Any, exact: Any, sums: Any, sums0: int, tallies: Any, tally: int
) -> None:
    """Buckets to sums of each group's values, the highest group of a digit first."""
    wide, values = _padded(p.channels), int64(1) << p.group
    for g in range(_digits(p.bits, p.digit)):
        base = at.buckets + (g << p.digit) * wide
        count = at.counts + (g << p.digit)
        groups = min(p.digit, p.bits - g * p.digit) // p.group
        for i in range(groups - 1, -1, -1):
            row = ((g * p.digit) // p.group + i) << p.group
            if i == 0:
                add_row(sums, sums0 + row * wide, room, base, values * wide)
                for value in range(values):
                    tallies[tally + row + value] += exact[count + value]
                continue
            lows = int64(1) << (i * p.group)
            for value in range(values):
                bucket = value * lows
                for low in range(lows):
                    add_row(sums, sums0 + (row + value) * wide, room, base + (bucket + low) * wide, wide)
                    tallies[tally + row + value] += exact[count + bucket + low]
                    if value:
                        exact[count + low] += exact[count + bucket + low]
                if value:
                    add_row(room, base, room, base + bucket * wide, lows * wide)


@inlined
def tabulate(p: Problem, at: Places, room: Any, exact: Any, head: int) -> None:
    """Tables of numerators and denominators from the state."""
    if p.group:
        mix_groups(p, at, room, exact, head, at.sums, at.tallies)
        join_tables(p, at, room, exact, at.sums, at.tallies)
    else:
        _tabulate_bits(p, at, room, exact)


@compiled
def _tabulate_bits(p: Problem, at: Places, room: Any, exact: Any) -> None:
    """A digit's first row has all its bits at -1, each bit adds twice its sum.

    The constant, far larger than the rest, joins the first digit's rows last, which rounds it once.
    """
    wide, constant = _padded(p.channels), doubles(p.constant)[0]
    for g in range(_digits(p.bits, p.digit)):
        base = at.tables + (g << p.digit) * wide
        below = at.denominators + (g << p.digit)
        count = min(p.digit, p.bits - g * p.digit)
        for i in range(wide):
            room[base + i] = _ZERO
        exact[below] = constant * exact[at.tallies + p.bits] if g == 0 else 0.0
        for r in range(count):
            bit = g * p.digit + r
            table_row(room, base, room, base, room, at.sums + bit * wide, wide, float32(-1))
            exact[below] -= exact[at.tallies + bit]
        for r in range(count):
            bit = g * p.digit + r
            half = int64(1) << r
            for low in range(half):
                to = base + (low + half) * wide
                table_row(room, to, room, base + low * wide, room, at.sums + bit * wide, wide, float32(2))
                exact[below + low + half] = exact[below + low] + 2 * exact[at.tallies + bit]
        if g == 0:
            for row in range(int64(1) << count):
                to = base + row * wide
                table_row(room, to, room, to, room, at.sums + p.bits * wide, wide, float32(constant))


@compiled
def mix_groups(p: Problem, at: Places, room: Any, exact: Any, head: int, sums0: int, tally: int) -> None:
    """Rows of a group mixed by scale * ratio^d, in place, bit by bit; the total weight stays beside them."""
    wide, values, groups = _padded(p.channels), int64(1) << p.group, p.bits // p.group
    scales, ratios = floats(p.scale), floats(p.ratio)
    for j in range(groups):
        scale, ratio = scales[head * groups + j], ratios[head * groups + j]
        base, count = sums0 + (j << p.group) * wide, tally + (j << p.group)
        scale_row(room, base, room, base, values * wide, scale)
        for value in range(values):
            exact[count + value] *= scale
        for r in range(p.group):
            half = int64(1) << r
            for first in range(0, values, 2 * half):
                mix_rows(room, base + first * wide, room, base + (first + half) * wide, half * wide, ratio)
                for value in range(first, first + half):
                    one, two = exact[count + value], exact[count + value + half]
                    exact[count + value] = one + ratio * two
                    exact[count + value + half] = two + ratio * one


@compiled
def join_tables(p: Problem, at: Places, room: Any, exact: Any, sums0: int, tally: int) -> None:
    """A digit's table: the sum of what its groups' values read."""
    wide, values = _padded(p.channels), int64(1) << p.group
    for g in range(_digits(p.bits, p.digit)):
        base = at.tables + (g << p.digit) * wide
        below = at.denominators + (g << p.digit)
        row = (g * p.digit) // p.group << p.group
        scale_row(room, base, room, sums0 + row * wide, values * wide, float32(1))
        for value in range(values):
            exact[below + value] = exact[tally + row + value]
        for i in range(1, min(p.digit, p.bits - g * p.digit) // p.group):
            lows, row = int64(1) << (i * p.group), row + values
            for value in range(values - 1, -1, -1):
                group = sums0 + (row + value) * wide
                for low in range(lows):
                    to = base + (value * lows + low) * wide
                    table_row(room, to, room, base + low * wide, room, group, wide, float32(1))
                    exact[below + value * lows + low] = exact[below + low] + exact[tally + row + value]


@inlined
def scatter(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    whole: Any,
    batch: int,
    head: int,
    first: int,
    last: int,
    codes: Any,
    nans: Any,
    to: int,
    total: float,
) -> None:
    """What queries `first` to `last` read from the tables; codes lie from `to` on, or are computed here."""
    queries = floats(p.q)
    start = batch * p.q_batch + head * p.q_head
    broken = exact[at.tallies + _state_rows(p.bits, p.group)] != 0.0
    for begin in range(first, last, BLOCK):
        count = min(BLOCK, last - begin)
        at_code = int64(to + begin)
        if p.k:
            at_code = int64(0)
            token = start + begin * p.q_token
            hash_tokens(p, at, room, int64(0), queries, token, p.q_token, count, codes, nans, at_code)
        _read(p, at, room, exact, whole, batch, head, begin, count, codes, nans, at_code, total, broken)


@inlined
def total_weight(p: Problem, exact: Any, tally: int) -> Any:
    """The number of keys, or the sum of their weights."""
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
def _read(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    whole: Any,
    batch: int,
    head: int,
    begin: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
    total: float,
    broken: bool,
) -> None:
    out, out0 = floats(p.out), batch * p.out_batch + head * p.out_head
    wide, number, low = _padded(p.channels), _digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    rows = whole[at.rows : at.rows + number]
    for t in range(count):
        code = codes[to + t]
        place = out0 + (begin + t) * p.out_token
        if number == 2:
            one, two = _pair(code, p.digit)
            below = exact[at.denominators + one] + exact[at.denominators + two]
            by = divisor(p, head, below, total, broken or nans[to + t] != 0)
            tables = (at.tables + one * wide, at.tables + two * wide)
            read_two_rows(out, place, room, tables[0], room, tables[1], p.channels, by)
            continue
        below = float64(0)
        for g in range(number):
            row = (g << p.digit) + ((code >> (g * p.digit)) & low)
            rows[g] = at.tables + row * wide
            below += exact[at.denominators + row]
        by = divisor(p, head, below, total, broken or nans[to + t] != 0)
        read_rows(out, place, room, rows, number, p.channels, by)
