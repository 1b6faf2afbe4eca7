# mypy: ignore-errors
"""Building blocks of the kernels: exact products on tensor cores, tiles, codes, hash functions.

Functions under `triton.jit` are not Python to a type checker, so this file is not checked.

Compile-time sizes: D channels of a token, E channels of a value, M support samples, BITS bits of a code,
F features of a code (`groups.py`); BD, BE, BM, BB, BF are the same rounded up to powers of two of at least
16; BLOCK tokens of a tile. HASH is the kind of hash functions: KERNEL, PLANES (hyperplanes, M is D), or SIGNS
(tokens are projections already, D is BITS).
"""

from __future__ import annotations

import os
from functools import partial

import triton
import triton.language as tl

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NARROWEST = tl.constexpr(8 if VERSION >= (3, 5) else 16)
"""Columns that a product must have."""
LOG2E = tl.constexpr(1.4426950408889634)
KERNEL, PLANES, SIGNS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COUNTS = ("heads", "parts", "state_parts", "grad_parts", "stretches", "steps")
launched = partial(triton.jit, do_not_specialize=COUNTS)
"""What is launched. Triton would compile anew for a count that is one or that 16 divides: for a sequence that
is cut into fewer parts than the last one, seconds for nothing."""


@triton.jit
def plain_dot(a, b, PRECISION: tl.constexpr, onto=None):
    """a @ b + onto, summed in fp32. The interpreter has a wrong bf16 product; widening is exact."""
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        if onto is not None:
            result += onto
    elif onto is None:  # which `tl.dot` does not take as such before Triton 3.4
        result = tl.dot(a, b, input_precision=PRECISION)
    else:
        result = tl.dot(a, b, onto, input_precision=PRECISION)
    return result


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, onto=None, TURNED: tl.constexpr = False):
    """The same, or a^T @ b + onto where TURNED.

    64 columns of a turned `a` go in groups of 32: as 64 rows they would become a `wgmma`, see `configs`.
    """
    if not TURNED:
        result = plain_dot(a, b, PRECISION, onto)
    elif a.shape[1] < 64:
        result = plain_dot(tl.trans(a), b, PRECISION, onto)
    else:
        groups: tl.constexpr = a.shape[1] // 32
        grouped = tl.permute(tl.reshape(a, (a.shape[0], groups, 32)), (1, 2, 0))
        repeated = tl.broadcast_to(b[None, :, :], (groups, b.shape[0], b.shape[1]))
        result = tl.reshape(plain_dot(grouped, repeated, PRECISION), (a.shape[1], b.shape[1]))
        if onto is not None:
            result += onto
    return result


@triton.jit
def product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr, onto=None, TURNED: tl.constexpr = False):
    """`dot` in fp32. If one side is bf16, the other goes in as the sum of PIECES bf16 numbers.

    Three pieces hold all 24 bits of an fp32 number and every product is exact, so this is as good as fp32
    arithmetic at the speed of bf16. Two fp32 sides are multiplied with PRECISION. Pieces are cut before they
    are turned: afterwards several warps would do the same work.
    """
    if a.dtype == b.dtype:
        total = dot(a, b, PRECISION, onto, TURNED)
    elif a.dtype == tl.bfloat16:
        piece = b.to(tl.bfloat16)
        total = dot(a, piece, PRECISION, onto, TURNED)
        for _ in tl.static_range(PIECES - 1):
            b = b - piece.to(tl.float32)
            piece = b.to(tl.bfloat16)
            total = dot(a, piece, PRECISION, total, TURNED)
    elif b.dtype == tl.bfloat16:
        piece = a.to(tl.bfloat16)
        total = dot(piece, b, PRECISION, onto, TURNED)
        for _ in tl.static_range(PIECES - 1):
            a = a - piece.to(tl.float32)
            piece = a.to(tl.bfloat16)
            total = dot(piece, b, PRECISION, total, TURNED)
    else:
        total = dot(a.to(tl.float32), b.to(tl.float32), PRECISION, onto, TURNED)
    return total


@triton.jit
def float_product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """The same where both sides may be fp32: two pieces of each or fewer, else PRECISION."""
    if a.dtype == tl.float32 and b.dtype == tl.float32 and PIECES < 3:
        high = b.to(tl.bfloat16)
        total = product(a, high, PIECES, PRECISION)
        if PIECES == 2:
            total = plain_dot(a.to(tl.bfloat16), (b - high.to(tl.float32)).to(tl.bfloat16), PRECISION, total)
    else:
        total = product(a, b, PIECES, PRECISION)
    return total


@triton.jit
def whole_product(a, b, PIECES: tl.constexpr, PRECISION: tl.constexpr, TURNED: tl.constexpr = False):
    """The product of small whole numbers `a` in bf16, which are exact in fp16 too, and values."""
    if b.dtype == tl.float16:
        result = dot(a.to(tl.float16), b, PRECISION, None, TURNED)
    else:
        result = product(a, b, PIECES, PRECISION, None, TURNED)
    return result


@triton.jit
def grad_product(a, b, GRAD_PRECISION: tl.constexpr):
    """a @ b of fp32 gradients; "bf16" rounds those of tokens, `a`, as the results will be."""
    if GRAD_PRECISION == "bf16":
        result = product(a.to(tl.bfloat16), b, 2, "ieee")
    else:
        result = dot(a, b, GRAD_PRECISION)
    return result


@triton.jit
def unit_product(x, samples, PRECISION: tl.constexpr):
    """Tokens times samples of about unit length; fp16 tokens take these in pieces of fp16."""
    if x.dtype == tl.float16:
        piece = samples.to(tl.float16)
        rest = (samples - piece.to(tl.float32)).to(tl.float16)
        result = dot(x, rest, PRECISION) + dot(x, piece, PRECISION)
    else:
        result = product(x, samples, 3, PRECISION)
    return result


@triton.jit
def weigh(features, mix):
    """features @ mix / largest, and the largest |weight|; features are at most about 1.

    Both enter as the sum of two fp16 numbers, which leaves an error of 2^-24: as fp32, on tensor cores.
    """
    largest = tl.max(tl.max(tl.abs(mix), axis=1), axis=0)
    largest = tl.where(largest == 0, 1.0, largest)
    mix = mix / largest
    high = mix.to(tl.float16)
    low = (mix - high.to(tl.float32)).to(tl.float16)
    upper = features.to(tl.float16)
    lower = (features - upper.to(tl.float32)).to(tl.float16)
    small = dot(lower, high, "ieee") + dot(upper, low, "ieee")
    return small + dot(upper, high, "ieee"), largest


@triton.jit
def row_sums(x, weights, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """The sum over the columns of x (BLOCK, K) times weights (K,): equal columns of a product."""
    columns = tl.broadcast_to(weights[:, None], (weights.shape[0], NARROWEST))
    return tl.sum(product(x, columns, PIECES, PRECISION), axis=1) * (1.0 / NARROWEST)


@triton.jit
def power(exponent):
    """Two to the power of `exponent`; what is too small for a normal number becomes zero."""
    if INTERPRETED:
        result = tl.exp2(exponent)
    else:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def reciprocal(x):
    """One over numbers that are neither tiny nor huge, to within a unit in the last place."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
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
def load_weights(base, stride, start, n, BLOCK: tl.constexpr):
    """Weights of a tile's tokens (BLOCK,) in fp32, zero beyond the last token."""
    rows = tl.arange(0, BLOCK)
    found = tl.load(base + far(start) * stride + rows * stride, mask=start + rows < n, other=0.0)
    return found.to(tl.float32)


@triton.jit
def once(x):
    """x. The compiler would rather load or compute narrow tensors again in each layout than convert them."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def pack(y, BITS: tl.constexpr, BB: tl.constexpr):
    """The signs of y (BLOCK, BB) as one integer a token; bits beyond BITS are zero."""
    bits = tl.arange(0, BB)
    ones = (y >= 0) & (bits < BITS)[None, :]
    if BITS <= 32:
        places = tl.full((BB,), 1, tl.int32) << bits
    else:
        places = tl.full((BB,), 1, tl.int64) << bits.to(tl.int64)
    return tl.sum(tl.where(ones, places[None, :], 0), axis=1)


@triton.jit
def unpack(packed, BITS: tl.constexpr, BB: tl.constexpr):
    """Integers as ±1 in bf16 (BLOCK, BB), zero beyond BITS."""
    bits = tl.arange(0, BB)
    if BITS <= 32:
        ones = packed.to(tl.int32)[:, None] & (tl.full((BB,), 1, tl.int32) << bits)[None, :]
    else:
        ones = packed.to(tl.int64)[:, None] & (tl.full((BB,), 1, tl.int64) << bits.to(tl.int64))[None, :]
    signs = tl.where(ones != 0, 1.0, -1.0)
    if BITS < BB:
        signs = tl.where((bits < BITS)[None, :], signs, 0.0)
    return signs.to(tl.bfloat16)


@triton.jit
def load_packed(base, start, n, BLOCK: tl.constexpr):
    """Codes of a tile as integers. The compiler never loads 16 bits ahead: loops ask for the next tile's."""
    rows = start + tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=rows < n, other=0)


@triton.jit
def store_packed(base, packed, start, n, BLOCK: tl.constexpr):
    """The inverse of `load_packed`."""
    rows = start + tl.arange(0, BLOCK)
    tl.store(base + rows, packed.to(base.dtype.element_ty), mask=rows < n)


@triton.jit
def exact_signs(y, BITS: tl.constexpr, BB: tl.constexpr):
    """Codes ±1 in bf16 of projections y, zero beyond BITS; sign(0) is +1 and NaN stays NaN."""
    if INTERPRETED or y.dtype != tl.bfloat16:
        signs = tl.where(y >= 0, 1.0, tl.where(y < 0, -1.0, float("nan"))).to(tl.bfloat16)
    else:
        # y + 0 has the sign of y, and + for -0; 1 + 0 * min(|y|, 1) is 1, or NaN for NaN.
        signs = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d;
            mov.b32 c, 0x3f803f80;
            mov.b32 d, 0;
            fma.rn.bf16x2 a, $1, c, d;
            abs.bf16x2 b, a;
            min.NaN.bf16x2 b, b, c;
            fma.rn.bf16x2 b, b, d, c;
            lop3.b32 $0, a, 0x80008000, b, 0xea; }""",
            "=r,r", [y], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    if BITS < BB:
        signs = tl.where((tl.arange(0, BB) < BITS)[None, :], signs.to(tl.float32), 0.0).to(tl.bfloat16)
    return signs


@triton.jit
def clean_signs(signs, keys):
    """The same without NaN for tokens that are not keys."""
    return tl.where(keys[:, None], signs.to(tl.float32), 1.0).to(tl.bfloat16)


@triton.jit
def load_signs(base, start, n, stride_n, stride_c, BITS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr):
    """Codes ±1 in bf16 of a tile of projections."""
    return exact_signs(load_tile(base, start, n, stride_n, stride_c, BITS, BB, BLOCK), BITS, BB)


@triton.jit
def load_functions(
    support, mean, sigma, weight, head,
    HASH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """A head's support (BD, BM), its squared lengths, mean, weight (BM, BB), and -log2(e) / (2 sigma).

    Weights beyond M are zero, so the kernel's values there do not count. PLANES have a weight only, SIGNS
    nothing.
    """
    samples, lengths, middle, mix, scale = 0.0, 0.0, 0.0, 0.0, 0.0
    if HASH != SIGNS:
        channel, sample, bit = tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BB)
        exists = sample < M
        places = weight + head * M * BITS + sample[:, None] * BITS + bit[None, :]
        mix = tl.load(places, mask=exists[:, None] & (bit < BITS)[None, :], other=0.0)
    if HASH == KERNEL:
        places = support + head * M * D + sample[None, :] * D + channel[:, None]
        samples = tl.load(places, mask=exists[None, :] & (channel < D)[:, None], other=0.0)
        middle = tl.load(mean + head * M + sample, mask=exists, other=0.0)
        lengths = tl.sum(samples * samples, axis=0)
        scale = -0.5 * LOG2E / tl.load(sigma + head)
    return samples, lengths, middle, mix, scale


@triton.jit
def token_features(x, samples, lengths, middle, scale, HASH: tl.constexpr, PRECISION: tl.constexpr):
    """What the weight of hash functions multiplies (BLOCK, BM), the Gaussian kernel, and 1 / |x|.

    For hyperplanes these are tokens of unit length. The kernel takes tokens as they were loaded, and the
    length divides the product.
    """
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, axis=1)
    inverse = tl.rsqrt(tl.where(square == 0, 1.0, square))
    if HASH == PLANES:
        return wide * inverse[:, None], 0.0, inverse
    else:
        products = unit_product(x, samples, PRECISION)
        exponent = products * (-2.0 * scale * inverse)[:, None] + (scale + scale * lengths)[None, :]
        # The exponent assumes unit vectors. Zero vectors get their share back (against a support sample of
        # length zero too, down to sigma = 0.0057). A length whose square overflows gives NaN: inf * 0.
        back = tl.where(square == 0, power(tl.minimum(-scale, 126.0)), square * inverse * inverse)
        kernel = power(exponent) * back[:, None]
        return kernel - middle[None, :], kernel, inverse


@triton.jit
def hash_tile(
    tokens, keys, samples, lengths, middle, mix, scale, codes, start, n,
    HASH: tl.constexpr, PRECISION: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of tokens as ±1 in bf16, stored as integers if CODES, and marks (BLOCK,).

    A mark is 1 for a key, 0 for another token, and NaN for a key that holds NaN or infinity: packed codes
    cannot hold NaN, and count it as -1. The signs of SIGNS hold NaN themselves.
    """
    wide = tokens.to(tl.float32)
    if HASH == SIGNS:
        y = wide
        h = exact_signs(tokens, BITS, BB)
        mark = keys.to(tl.float32)
    else:
        features, _, _ = token_features(tokens, samples, lengths, middle, scale, HASH, PRECISION)
        y, _ = weigh(features, mix)
        signs = tl.where(y >= 0, 1.0, -1.0)
        if BITS < BB:
            signs = tl.where((tl.arange(0, BB) < BITS)[None, :], signs, 0.0)
        h = signs.to(tl.bfloat16)
        mark = tl.where(keys, 1.0 + 0.0 * tl.sum(wide * wide, axis=1), 0.0)
    if CODES:
        store_packed(codes, pack(y, BITS, BB), start, n, BLOCK)
    return h, mark


@triton.jit
def project_back(
    x, to_codes, factors, samples, lengths, middle, mix, scale,
    HASH: tl.constexpr, PRECISION: tl.constexpr, GRAD_PRECISION: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Gradient of tokens from that of their codes, `to_codes` times factors (BLOCK,).

    Also returns the features and the gradient of the projection. The gradient passes the sign where |y| <= 1;
    that of SIGNS where |y| <= r, the root mean square of the token's projections, and is divided by r. For
    other functions the length of a token does not count, so the part of the gradient along the token is
    dropped, and with it the derivative of |x|^2.
    """
    wide = x.to(tl.float32)
    if HASH == SIGNS:
        square = wide * wide
        mean = tl.sum(square, axis=1) * (1.0 / BITS)
        mean = tl.where(mean == 0, 1.0, mean)[:, None]
        to_y = tl.where(square <= mean, to_codes * (tl.rsqrt(mean) * factors[:, None]), 0.0)
        return to_y, 0.0, 0.0
    else:
        to_codes *= factors[:, None]
        features, kernel, inverse = token_features(x, samples, lengths, middle, scale, HASH, PRECISION)
        y, largest = weigh(features, mix)
        to_y = tl.where(tl.abs(y) * largest <= 1.0, to_codes, 0.0)
        to_unit = grad_product(to_y, tl.trans(mix), GRAD_PRECISION)
        pull = inverse
        if HASH == KERNEL:
            to_unit = grad_product(to_unit * kernel, tl.trans(samples), GRAD_PRECISION)
            pull *= -2.0 / LOG2E * scale
        along = tl.sum(wide * to_unit, axis=1) * inverse * inverse
        return (to_unit - wide * along[:, None]) * pull[:, None], features, to_y
