"""Tokens to codes, a block at a time: unit length, kernel, projection, sign bits.

Where there are no hash functions, tokens are projections already.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, inlined, int64
from ecoformer.backends.cpu.problem import BLOCK, LANES, Worker
from ecoformer.backends.cpu.rows import clear_row, inverse_lengths, kernel_row, scale_row
from ecoformer.backends.cpu.vectors import (
    TILE,
    floats,
    nan_bits,
    padded,
    row_product,
    sign_bits,
    square_sum,
    tile_product,
)

_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)


@inlined
def prepare(w: Worker, head: int) -> None:
    """A head's hash functions, those of keys too where they have their own."""
    p = w.p
    if not p.weight:
        return
    _prepare(w, head, int64(0), p.support, p.mean, p.sigma, p.weight)
    if p.key_hash:
        _prepare(w, head, w.at.keys, p.key_support, p.key_mean, p.key_sigma, p.key_hash)


@compiled
def _prepare(
    w: Worker, head: int, base: int, to_support: int, to_mean: int, to_sigma: int, to_weight: int
) -> None:
    """Rows padded and laid out as the products read them, from `base` on."""
    p, at, memory = w.p, w.at, w.memory
    m, b, dim = p.samples, p.bits, p.dim
    wide_m, wide_b = padded(m), padded(b)
    clear_row(memory, base + at.first, at.inverse - at.first)
    weight = floats(to_weight)
    rows, to = (m, base + at.second) if m else (dim, base + at.first)
    for i in range(rows):
        for r in range(b):
            memory[to + i * wide_b + r] = weight[(head * rows + i) * b + r]
    if m == 0:
        return
    support, mean, sigma = floats(to_support), floats(to_mean), floats(to_sigma)[head]
    memory[base + at.inverse] = _ONE / sigma
    for j in range(m):
        row = (head * m + j) * dim
        memory[base + at.offset + j] = -_HALF * square_sum(support, row, dim) / sigma
        memory[base + at.mean + j] = mean[head * m + j]
    for d in range(dim):
        for j in range(m):
            memory[base + at.first + d * wide_m + j] = support[(head * m + j) * dim + d]


@compiled
def hash_tokens(w: Worker, base: int, tokens: Any, start: int, stride: int, count: int, to: int) -> None:
    """Codes of `count` tokens whose first number is at `start`, and whether they are NaN, from `to` on.

    The hash functions begin at `base`.
    """
    for first in range(0, count, BLOCK):
        n = min(BLOCK, count - first)
        if w.p.weight == 0 and w.p.bits % LANES == 0:
            _pack(w, tokens, start + first * stride, stride, n, to + first)
            continue
        _project(w, base, tokens, start + first * stride, stride, n)
        _pack(w, w.memory, w.at.projections, padded(w.p.bits), n, to + first)


@inlined
def _project(w: Worker, base: int, tokens: Any, start: int, stride: int, n: int) -> None:
    """Projections of a block of tokens."""
    p, at, memory = w.p, w.at, w.memory
    wide_m, wide_b = padded(p.samples), padded(p.bits)
    if p.weight == 0:
        for t in range(n):
            row = at.projections + t * wide_b
            scale_row(memory, row, tokens, start + t * stride, p.bits, _ONE)
            for r in range(p.bits, wide_b):
                memory[row + r] = _ZERO
        return
    for t in range(n):
        memory[at.scale + t] = square_sum(tokens, start + t * stride, p.dim)
    if p.samples == 0:
        product(tokens, start, stride, n, p.dim, memory, base + at.first, wide_b, at.projections)
        for t in range(n):
            # Signs do not depend on the length, but a length that overflows makes NaN.
            if not memory[at.scale + t] < np.inf:
                for r in range(wide_b):
                    memory[at.projections + t * wide_b + r] = np.nan
        return
    product(tokens, start, stride, n, p.dim, memory, base + at.first, wide_m, at.features)
    inverse = memory[base + at.inverse]
    inverse_lengths(memory, at.scale, n, inverse)
    for t in range(n):
        scale = memory[at.scale + t]
        shift = _ZERO if scale == _ZERO else -_HALF * inverse
        row = at.features + t * wide_m
        kernel_row(memory, row, memory, base + at.offset, memory, base + at.mean, wide_m, scale, shift)
    product(memory, at.features, wide_m, n, p.samples, memory, base + at.second, wide_b, at.projections)


@compiled
def product(x: Any, x0: int, dx: int, n: int, length: int, memory: Any, w0: int, wide: int, y0: int) -> None:
    """n rows of x times a matrix (length, wide) in scratch memory."""
    tiled = n - n % TILE
    for j in range(0, wide, 16):
        for t in range(0, tiled, TILE):
            tile_product(x, x0 + t * dx, dx, length, memory, w0 + j, wide, memory, y0 + t * wide + j, wide)
        for t in range(tiled, n):
            row_product(x, x0 + t * dx, dx, length, memory, w0 + j, wide, memory, y0 + t * wide + j, wide)


@inlined
def _pack(w: Worker, x: Any, start: int, stride: int, n: int, to: int) -> None:
    """Signs of n rows of projections as integers."""
    bits = w.p.bits
    kept = int64(-1) if bits == 64 else (int64(1) << bits) - 1
    for t in range(n):
        row = start + t * stride
        code = nan = int64(0)
        for r in range(0, padded(bits), LANES):
            code |= sign_bits(x, row + r) << r
            nan |= nan_bits(x, row + r)
        w.codes[to + t] = code & kept
        w.nans[to + t] = 1 if nan != 0 else 0
