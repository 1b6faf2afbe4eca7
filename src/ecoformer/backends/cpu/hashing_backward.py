"""Gradients of bits to gradients of tokens and of hash functions, a block at a time.

A bit's gradient passes where its projection is at most 1 (`sign_ste`); projections without hash functions
are divided by their root mean square first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ecoformer.backends.cpu.compiler import compiled, float32, inlined, int64
from ecoformer.backends.cpu.hashing import prepare, product
from ecoformer.backends.cpu.problem import Worker
from ecoformer.backends.cpu.rows import (
    add_row,
    blend_row,
    clear_row,
    combine_row,
    kernel_grad_row,
    pass_row,
    scale_row,
)
from ecoformer.backends.cpu.vectors import TILE, dot, floats, padded, row_outer, square_sum, tile_outer

_ONE, _ZERO = np.float32(1), np.float32(0)


@inlined
def prepare_backward(w: Worker, head: int) -> None:
    """A head's hash functions as `prepare` has them, and transposed."""
    prepare(w, head)
    if not w.p.weight:
        return
    _transpose(w, head, int64(0), w.p.weight, w.p.support)
    if w.p.key_hash:
        _transpose(w, head, w.at.keys, w.p.key_hash, w.p.key_support)


@compiled
def _transpose(w: Worker, head: int, base: int, to_weight: int, to_support: int) -> None:
    p, at, memory = w.p, w.at, w.memory
    rows = p.samples if p.samples else p.dim
    wide, wide_d = padded(rows), padded(p.dim)
    weight, support = floats(to_weight), floats(to_support)
    clear_row(memory, base + at.turned, at.support + p.samples * wide_d - at.turned)
    for r in range(p.bits):
        for i in range(rows):
            memory[base + at.turned + r * wide + i] = weight[(head * rows + i) * p.bits + r]
    for j in range(p.samples):
        for d in range(p.dim):
            memory[base + at.support + j * wide_d + d] = support[(head * p.samples + j) * p.dim + d]


@compiled
def hash_gradients(
    w: Worker,
    base: int,
    tokens: Any,
    start: int,
    stride: int,
    n: int,
    out: int,
    to: int,
    add: bool,
    weight: bool,
) -> None:
    """From `bit_grads` of the block that was hashed last to the tokens' gradients at address `out`.

    `add`: to what is there; `weight`: hash functions need a gradient too, which joins `weight_grads`.
    """
    p, at, memory = w.p, w.at, w.memory
    wide_m, wide_b, wide_d = padded(p.samples), padded(p.bits), padded(p.dim)
    results = floats(out)
    if p.weight == 0:
        for t in range(n):
            token, grads = start + t * stride, at.bit_grads + t * wide_b
            square = square_sum(tokens, token, p.bits) / float32(p.bits)
            pass_row(
                memory, grads, tokens, token, p.bits, _ONE if square == _ZERO else _ONE / np.sqrt(square)
            )
            if add:
                add_row(results, to + t * p.bits, memory, grads, p.bits)
            else:
                scale_row(results, to + t * p.bits, memory, grads, p.bits, _ONE)
        return
    for t in range(n):
        length = np.sqrt(square_sum(tokens, start + t * stride, p.dim))
        inverse = _ONE if length == _ZERO else _ONE / length
        memory[at.scale + t] = inverse = inverse if length < np.inf else float32(np.nan)
        # The kernel's tokens have unit length; projections on hyperplanes get it here.
        grads, projections = at.bit_grads + t * wide_b, at.projections + t * wide_b
        pass_row(memory, grads, memory, projections, wide_b, _ONE if p.samples else inverse)
    if weight and p.samples:
        _outer(w, memory, at.features, wide_m, p.samples, n)
    elif weight:
        _outer(w, tokens, start, stride, p.dim, n)
    if not out:
        return
    if p.samples:
        product(memory, at.bit_grads, wide_b, n, p.bits, memory, base + at.turned, wide_m, at.feature_grads)
        for t in range(n):
            grads, features, mean = at.feature_grads + t * wide_m, at.features + t * wide_m, base + at.mean
            inverse = memory[base + at.inverse]
            kernel_grad_row(memory, grads, memory, features, memory, mean, wide_m, inverse)
        grads = at.feature_grads
        product(memory, grads, wide_m, n, p.samples, memory, base + at.support, wide_d, at.token_grads)
    else:
        product(memory, at.bit_grads, wide_b, n, p.bits, memory, base + at.turned, wide_d, at.token_grads)
    for t in range(n):
        inverse, token = memory[at.scale + t], start + t * stride
        scale = inverse if p.samples else _ONE
        # Only what is orthogonal to a token changes the token of unit length.
        grads, result = at.token_grads + t * wide_d, to + t * p.dim
        along = dot(tokens, token, memory, grads, p.dim) * inverse * inverse
        if add:
            combine_row(results, result, memory, grads, tokens, token, p.dim, scale, -along * scale)
        else:
            blend_row(results, result, memory, grads, tokens, token, p.dim, scale, -along * scale)


@inlined
def _outer(w: Worker, x: Any, x0: int, dx: int, rows: int, n: int) -> None:
    """weight_grads += x^T bit_grads over n tokens."""
    memory, wide = w.memory, padded(w.p.bits)
    tiled = rows - rows % TILE
    for j in range(0, wide, 16):
        grads, to = w.at.bit_grads + j, w.at.weight_grads + j
        for i in range(0, tiled, TILE):
            tile_outer(x, x0 + i, dx, n, memory, grads, wide, memory, to + i * wide, wide)
        for i in range(tiled, rows):
            row_outer(x, x0 + i, dx, n, memory, grads, wide, memory, to + i * wide, wide)
