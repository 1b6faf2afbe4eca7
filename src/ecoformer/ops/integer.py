"""Hashed attention in whole numbers: packed codes and int8 values to int8 outputs.

Kernels in C (`integer.c`) and plain PyTorch give the bits that `reference.integer_attention` says. Sums over keys
are int32, exact in any order; key weights are shifts; a query takes one reciprocal for all its channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.affinity import LARGEST, distances
from ecoformer.ops import cpu
from ecoformer.ops.eager import pack_codes
from ecoformer.ops.hash_attention import _wanted

LEVELS = 1 << 31
"""What the largest levels of all groups of a head add up to, at most."""
WEIGHT_BITS = 24
"""The weights of all keys add up to at most 2^24, and so many keys there may be: 127 * 2^24 fits in 32 bits."""


def integer_levels(f: Tensor, bits: int | None = None) -> Tensor:
    """An affinity f (H, G, s + 1) as whole numbers, int32, in 2^31 steps up to the largest affinity of a head.

    `bits` is b, if the last group has fewer bits: what no code of b bits reaches is 0.
    """
    groups, size = f.shape[1], f.shape[2] - 1
    last = size if bits is None else bits - (groups - 1) * size
    if not 1 <= last <= size:
        raise ValueError(f"f {tuple(f.shape)} does not have the groups of bits={bits}")
    levels = f.double()
    if last < size:
        levels = torch.cat([levels[:, :-1], levels[:, -1:].clone()], 1)
        levels[:, -1, last + 1 :] = 0
    peaks = levels.amax(-1, keepdim=True).sum(1, keepdim=True)
    return (levels * ((LEVELS - groups) / peaks)).round().to(torch.int32)


def integer_multiplier(factor: Tensor) -> Tensor:
    """Numbers (H,) from 2^-8 to below 2^12 as m / 2^e: int32 (H, 2), 2^14 <= m < 2^15 and 3 <= e <= 22."""
    mantissa, exponent = torch.frexp(factor.double())
    whole = (mantissa * 2**15).round().to(torch.int32)
    over = whole == 1 << 15
    found = torch.stack([torch.where(over, 1 << 14, whole), 15 - exponent - over.int()], -1).to(torch.int32)
    if not factor.is_meta and not bool(_is_multiplier(found)):
        raise ValueError(f"factors must be from 2^-8 to 2^12, got {factor.tolist()}")
    return found


def integer_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    levels: Tensor,
    multiplier: Tensor,
    exponent: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """int8 outputs (B, H, N_q, D) from packed codes and int8 values.

    An output is sum_k a_k w_k v_k / sum_k a_k w_k * m / 2^e, rounded and cut off at +-127, a_k the sum of the levels
    that its code and that of key k have, w_k = 2^exponent. It is within 0.58 of that for all levels and multipliers,
    however small the levels that are read, while the seen keys together weigh at most 2^24 times the lightest one.
    Beyond, a key that has less than 2^-24 of all weight may count nothing. Compared with the affinity f that levels
    come from, it is within one unit while a query's affinity to all seen keys is at least G * m / 2^e * 2^-22 of the
    largest. A query that sees no key reads zero.

    Args:
        codes_q: packed codes (B, H, N_q), int64, see `pack_codes`; bits that the last group lacks are 0.
        codes_k: packed codes (B, H, N_k).
        v: int8 (B, H, N_k, D), N_k <= 2^24.
        levels: int32 (H, G, s + 1), see `integer_levels`.
        multiplier: int32 (H, 2), what outputs are scaled by, see `integer_multiplier`.
        exponent: int8 (B, H, N_k): keys count 2^exponent.
        key_padding_mask: (B, N_k) bool, True where a key is padding.
    """
    if v.dtype != torch.int8 or v.ndim != 4 or v.shape[2] > 1 << WEIGHT_BITS:
        raise ValueError(f"v must be int8 (B, H, N, D) with N <= 2^24, got {v.dtype} {tuple(v.shape)}")
    batch, heads, keys, _ = v.shape
    _check("codes_q", codes_q, v, torch.int64, (batch, heads, *codes_q.shape[2:3]))
    _check("codes_k", codes_k, v, torch.int64, (batch, heads, keys))
    _check("levels", levels, v, torch.int32, (heads, *levels.shape[1:3]))
    _check("multiplier", multiplier, v, torch.int32, (heads, 2))
    if levels.ndim != 3 or not (
        1 <= levels.shape[2] - 1 <= LARGEST and (levels.shape[1] - 1) * (levels.shape[2] - 1) < 64
    ):
        raise ValueError(
            f"levels {tuple(levels.shape)} must be (H, G, s + 1), s <= {LARGEST}, of at most 64 bits"
        )
    if exponent is not None:
        _check("exponent", exponent, v, torch.int8, (batch, heads, keys))
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, v, torch.bool, (batch, keys))
    given = (codes_q, codes_k, v, levels, multiplier, exponent, key_padding_mask)
    return torch.ops.ecoformer.integer_attention(*given)


def pack_signs(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    """Packed codes, int64 (rows, columns / bits), of int32 sums (rows, columns): bits are 1 where sums >= least.

    Args:
        sums: what an int8 product gives.
        least: int32 (columns,), where bits change.
        bits: columns of a code, from 1 to 64.
    """
    if sums.dtype != torch.int32 or sums.ndim != 2:
        raise ValueError(f"sums must be int32 (rows, columns), got {sums.dtype} {tuple(sums.shape)}")
    _check("least", least, sums, torch.int32, (sums.shape[1],))
    if not 1 <= bits <= 64 or sums.shape[1] % bits:
        raise ValueError(
            f"bits={bits} must be from 1 to 64 and divide the columns of sums {tuple(sums.shape)}"
        )
    return torch.ops.ecoformer.pack_signs(sums, least, bits)


def _check(name: str, x: Tensor, beside: Tensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    if x.dtype != dtype or x.shape != sizes or x.device != beside.device:
        raise ValueError(
            f"{name} must be {dtype} {sizes} on {beside.device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def _is_multiplier(multiplier: Tensor) -> Tensor:
    m, e = multiplier.unbind(-1)
    return ((m >= 1 << 14) & (m < 1 << 15) & (e >= 3) & (e <= 22)).all()


# ---- The registered operators ------------------------------------------------------------------------------

_operators = torch.library.Library("ecoformer", "FRAGMENT")
_operators.define(
    "integer_attention(Tensor codes_q, Tensor codes_k, Tensor v, Tensor levels, Tensor multiplier, "
    "Tensor? exponent, Tensor? mask) -> Tensor"
)
_operators.define("pack_signs(Tensor sums, Tensor least, int bits) -> Tensor")


@torch.library.impl(_operators, "integer_attention", "CompositeExplicitAutograd")
def _attention(*given: Any) -> Tensor:
    codes_q, _, v = given[:3]
    out = _empty_out(*given)
    if not (codes_q.numel() and v.numel()):
        return out.zero_()
    refused = _in_c(*given, out) if _runs_in_c(v) else _eager(*given, out)
    if refused:
        raise ValueError(
            "levels must be at least 0 and the largest of all groups add up to at most 2^31, multipliers m / 2^e have "
            f"2^14 <= m < 2^15 and 3 <= e <= 22, got {given[3].amax(-1).tolist()} and {given[4].tolist()}"
        )
    return out


@torch.library.impl(_operators, "pack_signs", "CompositeExplicitAutograd")
def _packed(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    if not _runs_in_c(sums):
        return pack_codes((sums >= least).unflatten(1, (-1, bits)).to(torch.int8) - 1)
    sums = sums if sums.stride(1) == 1 else sums.contiguous()
    out, least = _empty_codes(sums, least, bits), least.contiguous()
    numbers = [len(sums), out.shape[1], bits, sums.stride(0), cpu.threads(sums.numel())]
    cpu.call("ecoformer_pack_signs", *numbers, sums.data_ptr(), least.data_ptr(), out.data_ptr(), 0)
    return out


@torch.library.register_fake("ecoformer::integer_attention")
def _empty_out(codes_q: Tensor, codes_k: Tensor, v: Tensor, *_: Any) -> Tensor:
    (batch, heads, n), d = codes_q.shape, v.shape[3]
    return v.new_empty(batch, n, heads, d).transpose(1, 2)


@torch.library.register_fake("ecoformer::pack_signs")
def _empty_codes(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    return sums.new_empty(sums.shape[0], sums.shape[1] // bits, dtype=torch.int64)


# ---- In C --------------------------------------------------------------------------------------------------


def _runs_in_c(x: Tensor) -> bool:
    return _wanted.get() in (None, "cpu") and cpu.unavailable(x.device) is None


def _in_c(
    q: Tensor, k: Tensor, v: Tensor, levels: Tensor, multiplier: Tensor, exponent: Any, mask: Any, out: Tensor
) -> int:
    v = v if v.stride(3) == 1 else v.contiguous()
    levels, multiplier = levels.contiguous(), multiplier.contiguous()
    (batch, heads, nk, d), nq, (groups, size) = v.shape, q.shape[2], (levels.shape[1], levels.shape[2] - 1)
    rows, threads = batch * heads, cpu.threads(batch * heads * max(nq, k.shape[2]) * d)
    pieces = threads if rows < 4 * threads and rows % threads else 1
    table = (groups << size) * (-(-d // 32) * 32) + -(-(groups << size) // 16) * 16
    partial = torch.empty(rows * pieces * table if pieces > 1 else 0, dtype=torch.int32)
    tensors = (q, k, v, exponent, mask, levels, multiplier, out, partial)
    strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
    strides += [0] * 3 if exponent is None else exponent.stride()
    strides += [0] * 2 if mask is None else mask.stride()
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    numbers = (heads, rows, nq, nk, groups, size, d, pieces, threads)
    return cpu.call("ecoformer_integer_attention", *numbers, *addresses, *strides, 0, 0)


# ---- In plain PyTorch --------------------------------------------------------------------------------------


def _eager(
    q: Tensor, k: Tensor, v: Tensor, levels: Tensor, multiplier: Tensor, exponent: Any, mask: Any, out: Tensor
) -> bool:
    groups, size = levels.shape[1], levels.shape[2] - 1
    if bool(
        (levels < 0).any() | (levels.amax(-1).long().sum(-1) > LEVELS).any() | ~_is_multiplier(multiplier)
    ):
        return True
    y = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1).long() * _weights(v, exponent, mask).unsqueeze(-1)
    held = y.new_zeros(*v.shape[:2], groups << size, y.shape[-1])
    for rows in _picked(k, groups, size):
        held.scatter_add_(2, rows.unsqueeze(-1).expand_as(y), y)
    held, mixed = held.unflatten(2, (groups, -1)).double(), 0
    for differ in range(size + 1):  # sums of different keys, exact in fp64
        plane = (distances(size, v.device) == differ).double() @ held
        mixed = mixed + levels[..., differ, None, None].long() * plane.long()
    mixed = mixed.flatten(2, 3)
    read = sum(
        mixed.gather(2, rows.unsqueeze(-1).expand(*q.shape, y.shape[-1])) for rows in _picked(q, groups, size)
    )
    (top, bottom), (m, e) = read.split([v.shape[3], 1], -1), multiplier.long()[..., None, None].unbind(1)
    bottom = bottom.clamp_min(1)
    length = _length(bottom)
    reciprocal = (m << 12) // ((bottom << 15 - length.clamp_max(15)) >> (length - 15).clamp_min(0))
    drop = (length + e - 25).clamp_min(0)
    shift = length + e - 3 - drop
    part = (top >> drop).clamp(-255 << 10, 255 << 10)
    out.copy_(((part * reciprocal + (1 << shift - 1)) >> shift).clamp(-127, 127))
    return False


def _weights(v: Tensor, exponent: Tensor | None, mask: Tensor | None) -> Tensor:
    """How much each key counts: (B, H, N), at most 2^24 together."""
    hidden = v.new_zeros(1, 1, 1, dtype=torch.bool) if mask is None else mask.unsqueeze(1)
    if exponent is None:
        return v.new_ones(v.shape[:3], dtype=torch.int64).masked_fill(hidden, 0)
    e = exponent.long().masked_fill(hidden, -1024)
    powers = ((1 << WEIGHT_BITS) >> (e.amax(-1, keepdim=True) - e).clamp_max(31)).masked_fill(hidden, 0)
    return powers >> (_length(powers.sum(-1, keepdim=True) - 1) - WEIGHT_BITS).clamp_min(0)


def _picked(codes: Tensor, groups: int, size: int) -> list[Tensor]:
    """For each group the rows that codes pick."""
    masks = [(1 << min(size, 64 - j * size)) - 1 for j in range(groups)]
    return [(codes >> j * size & mask) + (j << size) for j, mask in enumerate(masks)]


def _length(x: Tensor) -> Tensor:
    """How many bits whole numbers have; none below 1."""
    return sum((x >= 1 << r).long() for r in range(63))
