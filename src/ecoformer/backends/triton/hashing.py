# mypy: ignore-errors
"""Pieces of the kernels: exact products on tensor cores, tiles, codes, and the hash functions both ways.

Functions under `triton.jit` are not Python to a type checker, so this file is not checked.

Names of compile-time sizes: D channels of a token, E channels of a value, M support samples, BITS bits of a
code; BD, BE, BM, BB are the same rounded up to powers of two of at least 16; BLOCK tokens of a tile.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, summed in fp32. Triton's interpreter has a wrong bf16 product; widening is exact."""
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b in fp32. If one side is bf16, the other goes in as the sum of PIECES bf16 numbers.

    Three pieces hold all 24 bits of an fp32 number and every product is exact, so this is as good as fp32
    arithmetic at the speed of bf16. Two fp32 sides are multiplied with PRECISION.
    """
    if a.dtype == b.dtype:
        total = dot(a, b, PRECISION)
    elif a.dtype == tl.bfloat16:
        piece = b.to(tl.bfloat16)
        total = dot(a, piece, PRECISION)
        for _ in tl.static_range(PIECES - 1):
            b = b - piece.to(tl.float32)
            piece = b.to(tl.bfloat16)
            total += dot(a, piece, PRECISION)
    elif b.dtype == tl.bfloat16:
        piece = a.to(tl.bfloat16)
        total = dot(piece, b, PRECISION)
        for _ in tl.static_range(PIECES - 1):
            a = a - piece.to(tl.float32)
            piece = a.to(tl.bfloat16)
            total += dot(piece, b, PRECISION)
    else:
        total = dot(a.to(tl.float32), b.to(tl.float32), PRECISION)
    return total


@triton.jit
def whole_product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """The product of small whole numbers `a` in bf16, which are exact in fp16 too, and values."""
    if b.dtype == tl.float16:
        result = dot(a.to(tl.float16), b, PRECISION)
    else:
        result = product(a, b, PIECES, PRECISION)
    return result


@triton.jit
def far(start):
    """Where a tile begins, in 64 bits; offsets within one fit 32. The interpreter's loops count in Python."""
    return start if INTERPRETED else start.to(tl.int64)


@triton.jit
def load_tile(base, start, n, stride_n, stride_c, WIDTH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens start ... start + BLOCK of one head (BLOCK, BW), zero beyond the last token and channel."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BW)
    base += far(start) * stride_n
    inside = (start + rows < n)[:, None]
    if WIDTH < BW:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride_n + columns[None, :] * stride_c, mask=inside, other=0.0)


@triton.jit
def store_tile(
    base, tile, start, n, stride_n, stride_c, WIDTH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr
):
    """The inverse of `load_tile`, in the dtype of `base`."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BW)
    base += far(start) * stride_n
    inside = (start + rows < n)[:, None]
    if WIDTH < BW:
        inside = inside & (columns < WIDTH)[None, :]
    places = base + rows[:, None] * stride_n + columns[None, :] * stride_c
    tl.store(places, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(mask_base, stride_mask, start, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Which tokens of a tile are keys: those that exist and are no padding."""
    rows = start + tl.arange(0, BLOCK)
    keys = rows < n
    if MASKED:
        padding = tl.load(mask_base + rows.to(tl.int64) * stride_mask, mask=keys, other=1)
        keys = keys & (padding == 0)
    return keys


@triton.jit
def pack(y, BITS: tl.constexpr, BB: tl.constexpr):
    """The signs of y (BLOCK, BB) as one integer a token; bits beyond BITS are zero."""
    bits = tl.arange(0, BB)
    ones = (y >= 0) & (bits < BITS)[None, :]
    if BITS <= 32:
        packed = tl.sum(ones.to(tl.int32) << bits[None, :], axis=1)
    else:
        packed = tl.sum(ones.to(tl.int64) << bits.to(tl.int64)[None, :], axis=1)
    return packed


@triton.jit
def unpack(packed, BITS: tl.constexpr, BB: tl.constexpr):
    """Integers as ±1 in bf16 (BLOCK, BB), zero beyond BITS."""
    bits = tl.arange(0, BB)
    if BITS <= 32:
        ones = (packed.to(tl.int32)[:, None] >> bits[None, :]) & 1
    else:
        ones = ((packed.to(tl.int64)[:, None] >> bits.to(tl.int64)[None, :]) & 1).to(tl.int32)
    signs = 2 * ones - 1
    if BITS < BB:
        signs = tl.where((bits < BITS)[None, :], signs, 0)
    return signs.to(tl.float32).to(tl.bfloat16)


@triton.jit
def load_codes(base, start, n, BITS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a tile as ±1 in bf16."""
    rows = start + tl.arange(0, BLOCK)
    return unpack(tl.load(base + rows, mask=rows < n, other=0), BITS, BB)


@triton.jit
def store_codes(base, y, start, n, BITS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr):
    """Pack and store the codes of a tile."""
    rows = start + tl.arange(0, BLOCK)
    tl.store(base + rows, pack(y, BITS, BB).to(base.dtype.element_ty), mask=rows < n)


@triton.jit
def signs_of(y, keys, BITS: tl.constexpr, BB: tl.constexpr):
    """The codes of keys in bf16, zero for other tokens; sign(0) is +1 and NaN stays NaN."""
    signs = tl.where(y >= 0, 1.0, tl.where(y < 0, -1.0, y))
    kept = keys[:, None]
    if BITS < BB:
        kept = kept & (tl.arange(0, BB) < BITS)[None, :]
    return tl.where(kept, signs, 0.0).to(tl.bfloat16)


@triton.jit
def load_functions(
    support,
    mean,
    sigma,
    weight,
    head,
    D: tl.constexpr,
    M: tl.constexpr,
    BITS: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BB: tl.constexpr,
):
    """A head's support (BD, BM), its squared lengths, mean, weight (BM, BB), and -log2(e) / (2 sigma).

    Weights beyond M are zero, so that what the kernel gives there does not count.
    """
    channel, sample, bit = tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BB)
    exists = sample < M
    places = support + head * M * D + sample[None, :] * D + channel[:, None]
    samples = tl.load(places, mask=exists[None, :] & (channel < D)[:, None], other=0.0)
    middle = tl.load(mean + head * M + sample, mask=exists, other=0.0)
    places = weight + head * M * BITS + sample[:, None] * BITS + bit[None, :]
    mix = tl.load(places, mask=exists[:, None] & (bit < BITS)[None, :], other=0.0)
    scale = -0.5 * LOG2E / tl.load(sigma + head)
    return samples, tl.sum(samples * samples, axis=0), middle, mix, scale


@triton.jit
def kernel_of(x, samples, lengths, scale, PRECISION: tl.constexpr):
    """Gaussian kernel (BLOCK, BM) of tokens and support samples, and one over the tokens' lengths.

    Tokens enter the product as they were loaded, and the length divides its result.
    """
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, axis=1)
    inverse = tl.rsqrt(tl.where(square == 0, 1.0, square))
    products = product(x, samples, 3, PRECISION)
    # One, zero for a zero vector, and NaN (infinity times zero) for a length whose square overflows.
    own = scale * (square * inverse * inverse)
    exponent = products * (-2.0 * scale * inverse)[:, None] + own[:, None] + (scale * lengths)[None, :]
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)), inverse


@triton.jit
def project(x, samples, lengths, middle, mix, scale, PRECISION: tl.constexpr):
    """Real numbers (BLOCK, BB) whose signs are the codes."""
    kernel, _ = kernel_of(x, samples, lengths, scale, PRECISION)
    return dot(kernel - middle[None, :], mix, PRECISION)


@triton.jit
def project_back(
    x, to_codes, samples, lengths, middle, mix, scale, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr
):
    """Gradient of tokens from that of their codes; also the features and the gradient of the projection.

    The gradient passes the sign where the projection is at most one. The part of it that lies along the
    token is lost, as its length does not count; so the derivative of |x|^2 in the distance needs no care.
    """
    kernel, inverse = kernel_of(x, samples, lengths, scale, PRECISION)
    features = kernel - middle[None, :]
    y = dot(features, mix, PRECISION)
    to_y = tl.where(tl.abs(y) <= 1.0, to_codes, 0.0)
    to_kernel = dot(to_y, tl.trans(mix), GRAD_PRECISION)
    pull = to_kernel * kernel * (-2.0 / LOG2E * scale)
    to_unit = dot(pull, tl.trans(samples), GRAD_PRECISION)
    wide = x.to(tl.float32)
    along = tl.sum(wide * to_unit, axis=1) * inverse * inverse
    return (to_unit - wide * along[:, None]) * inverse[:, None], features, to_y
