"""Causal order: the state of all tokens so far, and what each token reads from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, float64, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, Places, Problem, padded, state_rows
from ecoformer.backends.cpu.rows import add_row, carry_row, divide_row, running_row, scale_row, table_row
from ecoformer.backends.cpu.sums import divisor, mix_groups
from ecoformer.backends.cpu.vectors import doubles, floats, octets

_padded = inlined(padded)
_state_rows = inlined(state_rows)
_ZERO = np.float32(0)
_PART = 16
"""Tokens that read the tables of one state, and each other pair by pair."""


@inlined
def causal_head(
    p: Problem, at: Places, room: Any, exact: Any, batch: int, head: int, codes: Any, nans: Any
) -> None:
    """All tokens of a head. Sums of the current block are kept apart, which keeps rounding small."""
    wide, rows = _padded(p.channels), _state_rows(p.bits, p.group)
    for i in range(at.sums, at.levels):
        room[i] = _ZERO
    for i in range(rows + 1):
        exact[at.tallies + i] = 0.0
    exact[at.counts] = 0.0
    if p.group:
        _prepare_levels(p, at, room, head)
    keys, queries = floats(p.k if p.k else p.q), floats(p.q)
    k0, q0 = batch * p.k_batch + head * p.k_head, batch * p.q_batch + head * p.q_head
    recent = at.sums + rows * wide
    for begin in range(0, p.keys, BLOCK):
        count = min(BLOCK, p.keys - begin)
        token = k0 + begin * p.k_token
        hash_tokens(p, at, room, at.keys, keys, token, p.k_token, count, codes, nans, int64(0))
        if p.k:
            token = q0 + begin * p.q_token
            hash_tokens(p, at, room, int64(0), queries, token, p.q_token, count, codes, nans, int64(BLOCK))
        if p.group:
            for first in range(0, count, _PART):
                last = min(first + _PART, count)
                _group_part(p, at, room, exact, batch, head, begin, first, last, codes, nans)
                carry_row(room, at.sums, room, recent, rows * wide)
        else:
            for t in range(count):
                _bit_step(p, at, room, exact, batch, head, begin + t, codes, nans, t, t + BLOCK if p.k else t)
            carry_row(room, at.sums, room, recent, rows * wide)


@inlined
def _key(p: Problem, at: Places, room: Any, batch: int, head: int, token: int) -> tuple[Any, int, float]:
    """Where a key's value lies, times its weight, and that weight: a row of zeros and 0 for padding."""
    values, value = floats(p.v), batch * p.v_batch + head * p.v_head + token * p.v_token
    if p.mask and octets(p.mask)[batch * p.mask_batch + token * p.mask_token]:
        return room, at.row + _padded(p.channels), float32(0)
    if not p.key_weight:
        return values, value, float32(1)
    place = batch * p.key_weight_batch + head * p.key_weight_head + token * p.key_weight_token
    return values, value, floats(p.key_weight)[place]


@inlined
def _bit_step(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    batch: int,
    head: int,
    token: int,
    codes: Any,
    nans: Any,
    key: int,
    query: int,
) -> None:
    """One token joins the paper's state and reads it."""
    wide, constant = _padded(p.channels), doubles(p.constant)[0]
    recent = at.sums + (p.bits + 1) * wide
    values, value, weight = _key(p, at, room, batch, head, token)
    if weight != 0:
        exact[at.tallies + p.bits] += weight
        if nans[key]:
            exact[at.tallies + p.bits + 1] = 1.0
    for i in range(wide):
        room[at.row + i] = _ZERO
    total = exact[at.tallies + p.bits]
    below = constant * total
    for r in range(p.bits + 1):
        sign, reads = weight, float32(constant)
        if r < p.bits:
            sign = weight if (codes[key] >> r) & 1 else -weight
            exact[at.tallies + r] += sign
            reads = float32(1) if (codes[query] >> r) & 1 else float32(-1)
            below += reads * exact[at.tallies + r]
        running_row(
            room,
            recent + r * wide,
            room,
            at.row,
            room,
            at.sums + r * wide,
            values,
            value,
            p.channels,
            sign,
            reads,
        )
    broken = exact[at.tallies + p.bits + 1] != 0.0 or nans[query] != 0
    by = divisor(p, head, below, total, broken)
    out = batch * p.out_batch + head * p.out_head + token * p.out_token
    divide_row(floats(p.out), out, room, at.row, p.channels, by)


@compiled
def _prepare_levels(p: Problem, at: Places, room: Any, head: int) -> None:
    """scale * ratio^d for all values of a group's differing bits."""
    groups, values = p.bits // p.group, int64(1) << p.group
    for j in range(groups):
        ratio, base = floats(p.ratio)[head * groups + j], at.levels + (j << p.group)
        room[base] = floats(p.scale)[head * groups + j]
        for value in range(1, values):
            # Without its lowest bit a value is smaller, and done.
            room[base + value] = ratio * room[base + (value & (value - 1))]


@compiled
def _group_part(
    p: Problem,
    at: Places,
    room: Any,
    exact: Any,
    batch: int,
    head: int,
    begin: int,
    first: int,
    last: int,
    codes: Any,
    nans: Any,
) -> None:
    """Tokens `first` to `last` of a block read the state before them by tables, and each other's values."""
    wide, rows, groups = _padded(p.channels), _state_rows(p.bits, p.group), p.bits // p.group
    low, recent, out = (int64(1) << p.group) - 1, at.sums + rows * wide, floats(p.out)
    scale_row(room, at.tables, room, at.sums, rows * wide, float32(1))
    for i in range(rows):
        exact[at.denominators + i] = exact[at.tallies + i]
    mix_groups(p, at, room, exact, head, at.tables, at.denominators)
    for t in range(first, last):
        query = codes[t + BLOCK] if p.k else codes[t]
        broken = nans[t + BLOCK] != 0 if p.k else nans[t] != 0
        below = float64(0)
        for i in range(wide):
            room[at.row + i] = _ZERO
        for j in range(groups):
            row = (j << p.group) + ((query >> (j * p.group)) & low)
            below += exact[at.denominators + row]
            add_row(room, at.row, room, at.tables + row * wide, p.channels)
        values, value, weight = _key(p, at, room, batch, head, begin + t)
        if weight != 0:
            exact[at.counts] += weight
            if nans[t]:
                exact[at.tallies + rows] = 1.0
        for s in range(first, t + 1):
            values, value, weight = _key(p, at, room, batch, head, begin + s)
            differ, affinity = query ^ codes[s], float32(0)
            for j in range(groups):
                affinity += room[at.levels + (j << p.group) + ((differ >> (j * p.group)) & low)]
            affinity *= weight
            below += affinity
            table_row(room, at.row, room, at.row, values, value, p.channels, affinity)
        by = divisor(p, head, below, exact[at.counts], broken or exact[at.tallies + rows] != 0.0)
        place = batch * p.out_batch + head * p.out_head + (begin + t) * p.out_token
        divide_row(out, place, room, at.row, p.channels, by)
    for t in range(first, last):
        values, value, weight = _key(p, at, room, batch, head, begin + t)
        scale_row(room, at.row, values, value, p.channels, weight)
        for j in range(groups):
            row = (j << p.group) + ((codes[t] >> (j * p.group)) & low)
            add_row(room, recent + row * wide, room, at.row, p.channels)
            exact[at.tallies + row] += weight
