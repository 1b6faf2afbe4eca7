"""Tokens to codes, a block at a time: unit length, kernel, projection, sign bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, inlined, int64
from ecoformer.backends.cpu.problem import BLOCK, Places, Problem, padded
from ecoformer.backends.cpu.rows import inverse_lengths, kernel_row
from ecoformer.backends.cpu.vectors import (
    TILE,
    floats,
    nan_bits,
    row_product,
    sign_bits,
    square_sum,
    tile_product,
)

_padded = inlined(padded)
_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)


@inlined
def prepare(p: Problem, at: Places, room: Any, head: int) -> None:
    """A head's hash functions, those of keys too where they have their own."""
    _prepare(p, at, room, head, int64(0), p.support, p.mean, p.sigma, p.weight)
    if p.key_hash:
        _prepare(p, at, room, head, at.keys, p.key_support, p.key_mean, p.key_sigma, p.key_hash)


@compiled
def _prepare(
    p: Problem,
    at: Places,
    room: Any,
    head: int,
    base: int,
    to_support: int,
    to_mean: int,
    to_sigma: int,
    to_weight: int,
) -> None:
    """Rows padded and laid out as the products read them, from `base` on."""
    m, b, dim = p.samples, p.bits, p.dim
    wide_m, wide_b = _padded(m), _padded(b)
    for i in range(base + at.first, base + at.inverse):
        room[i] = _ZERO
    weight = floats(to_weight)
    rows, to = (m, base + at.second) if m else (dim, base + at.first)
    for i in range(rows):
        for r in range(b):
            room[to + i * wide_b + r] = weight[(head * rows + i) * b + r]
    if m == 0:
        return
    support, mean, sigma = floats(to_support), floats(to_mean), floats(to_sigma)[head]
    room[base + at.inverse] = _ONE / sigma
    for j in range(m):
        row = (head * m + j) * dim
        room[base + at.offset + j] = -_HALF * square_sum(support, row, dim) / sigma
        room[base + at.mean + j] = mean[head * m + j]
    for d in range(dim):
        for j in range(m):
            room[base + at.first + d * wide_m + j] = support[(head * m + j) * dim + d]


@compiled
def hash_tokens(
    p: Problem,
    at: Places,
    room: Any,
    base: int,
    tokens: Any,
    start: int,
    stride: int,
    count: int,
    codes: Any,
    nans: Any,
    to: int,
) -> None:
    """Codes of `count` tokens whose first number is at `start`, and whether they are NaN, from `to` on.

    The hash functions lie from `base` on.
    """
    for first in range(0, count, BLOCK):
        n = min(BLOCK, count - first)
        _project(p, at, room, base, tokens, start + first * stride, stride, n)
        _pack(p, at, room, n, codes, nans, to + first)


@inlined
def _project(
    p: Problem, at: Places, room: Any, base: int, tokens: Any, start: int, stride: int, n: int
) -> None:
    """Projections of a block of tokens."""
    wide_m, wide_b = _padded(p.samples), _padded(p.bits)
    for t in range(n):
        room[at.scale + t] = square_sum(tokens, start + t * stride, p.dim)
    if p.samples == 0:
        _product(tokens, start, stride, n, p.dim, room, base + at.first, wide_b, at.projections)
        for t in range(n):
            # Signs do not depend on the length, but a length that overflows makes NaN.
            if not room[at.scale + t] < np.inf:
                for r in range(wide_b):
                    room[at.projections + t * wide_b + r] = np.nan
        return
    _product(tokens, start, stride, n, p.dim, room, base + at.first, wide_m, at.features)
    inverse = room[base + at.inverse]
    inverse_lengths(room, at.scale, n, inverse)
    for t in range(n):
        scale = room[at.scale + t]
        shift = _ZERO if scale == _ZERO else -_HALF * inverse
        row = at.features + t * wide_m
        kernel_row(room, row, room, base + at.offset, room, base + at.mean, wide_m, scale, shift)
    _product(room, at.features, wide_m, n, p.samples, room, base + at.second, wide_b, at.projections)


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
