"""Sums over keys by bucket, and what queries read by table.

A code is cut into digits of a few bits. Each token adds its value to one bucket a digit; a digit's buckets
are folded, bit by bit, to the sums of h v. Then a table holds, for every value of a digit, what its bits read
from the sums, and a query adds one row a digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import float32, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, STRETCH, Places, Problem, digits, padded
from ecoformer.backends.cpu.rows import add_row, add_row_twice, fold_row, read_rows, read_two_rows, table_row
from ecoformer.backends.cpu.vectors import floats, octets

_padded = inlined(padded)
_digits = inlined(digits)
_ZERO = np.float32(0)


@inlined
def clear(p: Problem, sums: Any, to: int, tallies: Any, tally: int) -> None:
    """No keys so far: rows of zeros, one a bit and one for the values' own sum."""
    for i in range((p.bits + 1) * _padded(p.channels)):
        sums[to + i] = _ZERO
    for i in range(p.bits + 2):
        tallies[tally + i] = 0


@inlined
def gather(
    p: Problem,
    at: Places,
    room: Any,
    whole: Any,
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
    """Hash keys `first` to `last`, keep their codes from `to` on, and add them to the sums.

    Tallies are the sums of the bits, then the number of keys, then whether any is NaN.
    """
    keys = floats(p.k if p.k else p.q)
    start = batch * p.k_batch + head * p.k_head
    for begin in range(first, last, STRETCH):
        count = min(STRETCH, last - begin)
        token = start + begin * p.k_token
        hash_tokens(p, at, room, head, keys, token, p.k_token, count, codes, nans, to + begin)
        for i in range(at.buckets, at.tables):
            room[i] = _ZERO
        for i in range(_digits(p.bits, p.digit) << p.digit):
            whole[at.counts + i] = 0
        _fill(p, at, room, whole, batch, head, begin, count, codes, nans, to + begin, tallies, tally)
        _fold(p, at, room, whole, sums, sums0, tallies, tally)


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
    whole: Any,
    batch: int,
    head: int,
    begin: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
    tallies: Any,
    tally: int,
) -> None:
    """Every key's value to its buckets."""
    values, masks = floats(p.v), octets(p.mask)
    v0 = batch * p.v_batch + head * p.v_head
    m0 = batch * p.mask_batch
    wide, number, low = _padded(p.channels), _digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    broken = int64(0)
    for t in range(count):
        if p.mask and masks[m0 + (begin + t) * p.mask_token]:
            continue
        code = codes[to + t]
        broken |= nans[to + t]
        value = v0 + (begin + t) * p.v_token
        if number == 2:
            one, two = _pair(code, p.digit)
            whole[at.counts + one] += 1
            whole[at.counts + two] += 1
            buckets = at.buckets + one * wide, at.buckets + two * wide
            add_row_twice(room, buckets[0], buckets[1], values, value, p.channels)
            continue
        for g in range(number):
            bucket = (g << p.digit) + ((code >> (g * p.digit)) & low)
            whole[at.counts + bucket] += 1
            add_row(room, at.buckets + bucket * wide, values, value, p.channels)
    tallies[tally + p.bits + 1] |= broken


@inlined
def _fold(
    p: Problem, at: Places, room: Any, whole: Any, sums: Any, sums0: int, tallies: Any, tally: int
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
                tallies[tally + bit] += whole[count + low + half] - whole[count + low]
                whole[count + low] += whole[count + low + half]
        if g == 0:
            add_row(sums, sums0 + p.bits * wide, room, base, wide)
            tallies[tally + p.bits] += whole[count]


@inlined
def tabulate(
    p: Problem, at: Places, room: Any, whole: Any, sums: Any, sums0: int, tallies: Any, tally: int
) -> None:
    """Tables of numerators and denominators: a digit's first row has all its bits at -1, each bit adds twice
    its sum. The constant, far larger than the rest, joins the first digit's rows last, which rounds it once.
    """
    wide = _padded(p.channels)
    for g in range(_digits(p.bits, p.digit)):
        base = at.tables + (g << p.digit) * wide
        below = at.denominators + (g << p.digit)
        count = min(p.digit, p.bits - g * p.digit)
        for i in range(wide):
            room[base + i] = _ZERO
        whole[below] = p.constant * tallies[tally + p.bits] if g == 0 else 0
        for r in range(count):
            bit = g * p.digit + r
            table_row(room, base, room, base, sums, sums0 + bit * wide, wide, float32(-1))
            whole[below] -= tallies[tally + bit]
        for r in range(count):
            bit = g * p.digit + r
            half = int64(1) << r
            for low in range(half):
                to = base + (low + half) * wide
                table_row(room, to, room, base + low * wide, sums, sums0 + bit * wide, wide, float32(2))
                whole[below + low + half] = whole[below + low] + 2 * tallies[tally + bit]
        if g == 0:
            for row in range(int64(1) << count):
                to = base + row * wide
                table_row(room, to, room, to, sums, sums0 + p.bits * wide, wide, float32(p.constant))


@inlined
def scatter(
    p: Problem,
    at: Places,
    room: Any,
    whole: Any,
    batch: int,
    head: int,
    first: int,
    last: int,
    codes: Any,
    nans: Any,
    to: int,
    tallies: Any,
    tally: int,
) -> None:
    """What queries `first` to `last` read from the tables; codes lie from `to` on, or are computed here."""
    queries = floats(p.q)
    start = batch * p.q_batch + head * p.q_head
    broken = tallies[tally + p.bits + 1] != 0
    nobody = tallies[tally + p.bits] == 0
    for begin in range(first, last, BLOCK):
        count = min(BLOCK, last - begin)
        at_code = int64(to + begin)
        if p.k:
            at_code = int64(0)
            token = start + begin * p.q_token
            hash_tokens(p, at, room, head, queries, token, p.q_token, count, codes, nans, at_code)
        _read(p, at, room, whole, batch, head, begin, count, codes, nans, at_code, nobody, broken)


@inlined
def _divisor(below: int, nobody: bool, broken: bool) -> Any:
    by = float32(1) if nobody else float32(below)
    return float32(np.nan) if broken else by


@inlined
def _read(
    p: Problem,
    at: Places,
    room: Any,
    whole: Any,
    batch: int,
    head: int,
    begin: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
    nobody: bool,
    broken: bool,
) -> None:
    out, out0 = floats(p.out), batch * p.out_batch + head * p.out_head
    wide, number, low = _padded(p.channels), _digits(p.bits, p.digit), (int64(1) << p.digit) - 1
    rows = whole[at.rows : at.rows + number]
    for t in range(count):
        code = codes[to + t]
        below = int64(0)
        if number == 2:
            one, two = _pair(code, p.digit)
            below = whole[at.denominators + one] + whole[at.denominators + two]
            by = _divisor(below, nobody, broken or nans[to + t] != 0)
            place, tables = out0 + (begin + t) * p.out_token, (at.tables + one * wide, at.tables + two * wide)
            read_two_rows(out, place, room, tables[0], room, tables[1], p.channels, by)
            continue
        for g in range(number):
            row = (g << p.digit) + ((code >> (g * p.digit)) & low)
            rows[g] = at.tables + row * wide
            below += whole[at.denominators + row]
        by = _divisor(below, nobody, broken or nans[to + t] != 0)
        read_rows(out, out0 + (begin + t) * p.out_token, room, rows, number, p.channels, by)
