"""Tokens to codes, a block at a time: unit length, kernel, projection, sign bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, inlined, int32, int64
from ecoformer.backends.cpu.problem import BLOCK, Places, Problem, padded
from ecoformer.backends.cpu.vectors import (
    TILE,
    bits_of,
    floats,
    from_bits,
    nan_bits,
    row_product,
    sign_bits,
    square_sum,
    tile_product,
)

_padded = inlined(padded)
_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""ln 2 in two parts: the first has few bits, so that its multiples are exact."""
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2^23: what is added to it is rounded to a whole number, which then is in its last bits."""
_LOWEST = np.float32(-87.0)
"""Below, the result would have no full precision; it is 1e-38 there, nothing beside other features."""
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))


@inlined
def exponential(x: Any) -> Any:
    """e^x for x <= 0 by a polynomial, so that loops over it become vector instructions; NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    rounded = x * _LOG2_E + _ROUNDER
    n = rounded - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    return series * from_bits((bits_of(rounded) + int32(127)) << int32(23))


@inlined
def prepare(p: Problem, at: Places, room: Any, head: int) -> None:
    """A head's hash functions, rows padded and laid out as the products read them."""
    m, b, dim = p.samples, p.bits, p.dim
    wide_m, wide_b = _padded(m), _padded(b)
    weight = floats(p.weight)
    if m == 0:
        _copy_padded(weight, head * dim * b, dim, b, room, at.first, wide_b)
        return
    _copy_padded(weight, head * m * b, m, b, room, at.second, wide_b)
    support, mean = floats(p.support), floats(p.mean)
    sigma = floats(p.sigma)[head]
    for j in range(wide_m):
        room[at.offset + j] = room[at.mean + j] = _ZERO
        for d in range(dim):
            room[at.first + d * wide_m + j] = _ZERO
    for j in range(m):
        row = (head * m + j) * dim
        room[at.offset + j] = -_HALF * square_sum(support, row, dim) / sigma
        room[at.mean + j] = mean[head * m + j]
        for d in range(dim):
            room[at.first + d * wide_m + j] = support[row + d]


@inlined
def _copy_padded(source: Any, start: int, rows: int, columns: int, room: Any, to: int, wide: int) -> None:
    for i in range(rows):
        for j in range(wide):
            room[to + i * wide + j] = source[start + i * columns + j] if j < columns else _ZERO


@compiled
def hash_tokens(
    p: Problem,
    at: Places,
    room: Any,
    head: int,
    tokens: Any,
    start: int,
    stride: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
) -> None:
    """Codes of `count` tokens whose first number is at `start`, and whether they are NaN, from `to` on."""
    for first in range(0, count, BLOCK):
        n = min(BLOCK, count - first)
        _project(p, at, room, head, tokens, start + first * stride, stride, n)
        _pack(p, at, room, n, codes, nans, to + first)


@inlined
def _project(
    p: Problem, at: Places, room: Any, head: int, tokens: Any, start: int, stride: int, n: int
) -> None:
    """Projections of a block of tokens."""
    wide_m, wide_b = _padded(p.samples), _padded(p.bits)
    for t in range(n):
        room[at.scale + t] = square_sum(tokens, start + t * stride, p.dim)
    if p.samples == 0:
        _product(tokens, start, stride, n, p.dim, room, at.first, wide_b, at.projections)
        for t in range(n):
            # Signs do not hang on the length, but a length that overflows makes NaN.
            if not room[at.scale + t] < np.inf:
                for r in range(wide_b):
                    room[at.projections + t * wide_b + r] = np.nan
        return
    sigma = floats(p.sigma)[head]
    for t in range(n):
        square = room[at.scale + t]
        unit = _ONE if square == _ZERO else square
        scale = _ONE / (np.sqrt(unit) * sigma)
        room[at.scale + t] = scale if square < np.inf else np.float32(np.nan)
        room[at.shift + t] = _ZERO if square == _ZERO else -_HALF / sigma
    _product(tokens, start, stride, n, p.dim, room, at.first, wide_m, at.features)
    for t in range(n):
        scale, shift, row = room[at.scale + t], room[at.shift + t], at.features + t * wide_m
        for j in range(wide_m):
            exponent = room[row + j] * scale + (room[at.offset + j] + shift)
            exponent = _ZERO if exponent > _ZERO else exponent
            room[row + j] = exponential(exponent) - room[at.mean + j]
    _product(room, at.features, wide_m, n, p.samples, room, at.second, wide_b, at.projections)


@compiled
def _product(x: Any, x0: int, dx: int, n: int, length: int, room: Any, w0: int, wide: int, y0: int) -> None:
    """n rows of x times a matrix (length, wide) in scratch memory."""
    whole = n - n % TILE
    for j in range(0, wide, 16):
        for t in range(0, whole, TILE):
            tile_product(x, x0 + t * dx, dx, length, room, w0 + j, wide, room, y0 + t * wide + j, wide)
        for t in range(whole, n):
            row_product(x, x0 + t * dx, dx, length, room, w0 + j, wide, room, y0 + t * wide + j, wide)


@inlined
def _pack(p: Problem, at: Places, room: Any, n: int, codes: Any, nans: Any, to: int) -> None:
    """Signs of a block's projections as integers."""
    wide = _padded(p.bits)
    kept = int64(-1) if p.bits == 64 else (int64(1) << p.bits) - 1
    for t in range(n):
        row = at.projections + t * wide
        code = nan = int64(0)
        for r in range(0, wide, 16):
            code |= sign_bits(room, row + r) << r
            nan |= nan_bits(room, row + r)
        codes[to + t] = code & kept
        nans[to + t] = 1 if nan != 0 else 0
