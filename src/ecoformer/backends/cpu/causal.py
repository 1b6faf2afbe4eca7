"""Causal order, token by token: the state of all tokens so far, and what the token reads from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import float32, inlined, int64
from ecoformer.backends.cpu.hashing import hash_tokens
from ecoformer.backends.cpu.problem import BLOCK, Places, Problem, padded
from ecoformer.backends.cpu.rows import carry_row, divide_row, running_row
from ecoformer.backends.cpu.vectors import floats, octets

_padded = inlined(padded)
_ZERO = np.float32(0)


@inlined
def causal_head(
    p: Problem, at: Places, room: Any, whole: Any, batch: int, head: int, codes: Any, nans: Any
) -> None:
    """All tokens of a head. Sums of the current block are kept apart, which keeps rounding small."""
    wide = _padded(p.channels)
    for i in range(at.sums, at.integers):
        room[i] = _ZERO
    for i in range(p.bits + 2):
        whole[at.tallies + i] = 0
    keys, queries = floats(p.k if p.k else p.q), floats(p.q)
    k0, q0 = batch * p.k_batch + head * p.k_head, batch * p.q_batch + head * p.q_head
    recent = at.sums + (p.bits + 1) * wide
    for begin in range(0, p.keys, BLOCK):
        count = min(BLOCK, p.keys - begin)
        hash_tokens(p, at, room, head, keys, k0 + begin * p.k_token, p.k_token, count, codes, nans, int64(0))
        if p.k:
            token = q0 + begin * p.q_token
            hash_tokens(p, at, room, head, queries, token, p.q_token, count, codes, nans, int64(BLOCK))
        for t in range(count):
            _step(p, at, room, whole, batch, head, begin + t, codes, nans, t, t + BLOCK if p.k else t)
        for r in range(p.bits + 1):
            carry_row(room, at.sums + r * wide, room, recent + r * wide, wide)


@inlined
def _step(
    p: Problem,
    at: Places,
    room: Any,
    whole: Any,
    batch: int,
    head: int,
    token: int,
    codes: Any,
    nans: Any,
    key: int,
    query: int,
) -> None:
    """One token joins the state and reads it."""
    wide = _padded(p.channels)
    recent = at.sums + (p.bits + 1) * wide
    values, value = floats(p.v), batch * p.v_batch + head * p.v_head + token * p.v_token
    padding = p.mask and octets(p.mask)[batch * p.mask_batch + token * p.mask_token]
    if padding:
        values, value = room, at.row + wide
    else:
        whole[at.tallies + p.bits] += 1
        whole[at.tallies + p.bits + 1] |= nans[key]
    for i in range(wide):
        room[at.row + i] = _ZERO
    below = p.constant * whole[at.tallies + p.bits]
    for r in range(p.bits + 1):
        sign = weight = int64(1)
        if r < p.bits:
            sign, weight = 2 * ((codes[key] >> r) & 1) - 1, 2 * ((codes[query] >> r) & 1) - 1
            if not padding:
                whole[at.tallies + r] += sign
            below += weight * whole[at.tallies + r]
        else:
            weight = int64(p.constant)
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
            float32(sign),
            float32(weight),
        )
    by = float32(1) if whole[at.tallies + p.bits] == 0 else float32(below)
    by = float32(np.nan) if whole[at.tallies + p.bits + 1] or nans[query] else by
    out = batch * p.out_batch + head * p.out_head + token * p.out_token
    divide_row(floats(p.out), out, room, at.row, p.channels, by)
