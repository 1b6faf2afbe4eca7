"""Hashed attention in whole numbers: packed codes and int8 values to int8 outputs.

Kernels in C (`integer.c`) and plain PyTorch give the bits that `reference.integer_attention` says. Sums over
keys are int32, exact in any order; key weights are shifts; a query has one reciprocal for all its channels.
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
"""The largest levels of a head's groups add up to at most this."""
WEIGHT_BITS = 24
"""Keys weigh at most 2^24 together, and there are at most so many: 127 * 2^24 fits in 32 bits."""
WIDTHS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
"""What codes of so many bits are packed as; others are int64."""
_CODES = (torch.int8, torch.int64, *WIDTHS.values())


def integer_levels(f: Tensor, bits: int | None = None) -> Tensor:
    """An affinity f (H, G, s + 1) as whole numbers, int32: the largest affinity of a head is about 2^31.

    `bits` says how many the last group has: what no code of so many bits reaches is 0.
    """
    groups, size = f.shape[1], f.shape[2] - 1
    last = size if bits is None else bits - (groups - 1) * size
    if not 1 <= last <= size:
        raise ValueError(f"f {tuple(f.shape)} does not have the groups of bits={bits}")
    levels = f.double().clone()
    levels[:, -1, last + 1 :] = 0
    peaks = levels.amax(-1, keepdim=True).sum(1, keepdim=True)
    return (levels * ((LEVELS - groups) / peaks)).round().to(torch.int32)


def integer_multiplier(factor: Tensor) -> Tensor:
    """Numbers (H,) from 2^-8 to 2^12 as m / 2^e: int32 (H, 2), 2^14 <= m < 2^15 and 3 <= e <= 22."""
    mantissa, exponent = torch.frexp(factor.double())
    whole = (mantissa * 2**15).round().long()
    over = whole == 1 << 15
    found = torch.stack([torch.where(over, 1 << 14, whole), 15 - exponent - over.int()], -1)
    if not factor.is_meta and not bool(_is_multiplier(found)):
        raise ValueError(f"factors must be from 2^-8 to 2^12, got {factor.tolist()}")
    return found.to(torch.int32)


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

    An output stands for y = m / 2^e * sum_k a_k w_k v_k / sum_k a_k w_k, cut off at ±127: a_k adds up the
    levels of all groups, w_k is 2^exponent. It is within 0.57 of y for all levels and multipliers, however
    small the levels that a query reads, while all seen keys together weigh at most 2^24 times the lightest
    one. Beyond that, keys with less than 2^-24 of the weight of all may count nothing.
    With the affinity f in place of its levels, it is within one unit of y where a query's affinity to each
    seen key is at least G m / 2^e 2^-22 of the largest. A query that sees no key reads zero.

    Args:
        codes_q: packed codes (B, H, N_q), see `pack_codes` and `pack_signs`; bits from b on are 0.
        codes_k: packed codes (B, H, N_k).
        v: int8 (B, H, N_k, D), from -127 to 127, at most 2^24 keys.
        levels: int32 (H, G, s + 1), see `integer_levels`.
        multiplier: int32 (H, 2), m and e, see `integer_multiplier`.
        exponent: int8 (B, H, N_k); keys count alike without it.
        key_padding_mask: (B, N_k) bool, True where a key is padding.
    """
    if v.dtype != torch.int8 or v.ndim != 4 or v.shape[2] > 1 << WEIGHT_BITS:
        raise ValueError(f"v must be int8 (B, H, N, D) with N <= 2^24, got {v.dtype} {tuple(v.shape)}")
    (batch, heads, keys), (groups, size) = v.shape[:3], (levels.shape[1:2], levels.shape[-1] - 1)
    _check("codes_q", codes_q, v, _CODES, (batch, heads, *codes_q.shape[2:3]))
    _check("codes_k", codes_k, v, _CODES, (batch, heads, keys))
    _check("levels", levels, v, (torch.int32,), (heads, *groups, min(max(size, 1), LARGEST) + 1))
    _check("multiplier", multiplier, v, (torch.int32,), (heads, 2))
    if exponent is not None:
        _check("exponent", exponent, v, (torch.int8,), (batch, heads, keys))
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, v, (torch.bool,), (batch, keys))
    for codes in (codes_q, codes_k):
        if not 0 <= (groups[0] - 1) * size < 8 * codes.element_size():
            raise ValueError(f"codes of {codes.dtype} do not hold the bits of levels {tuple(levels.shape)}")
    given = (codes_q, codes_k, v, levels, multiplier, exponent, key_padding_mask)
    out: Tensor = torch.ops.ecoformer.integer_attention(*given)
    return out


def pack_signs(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    """Packed codes (rows, columns / bits) of int32 sums (rows, columns): bits are 1 where sums >= least.

    Args:
        sums: what an int8 product gives.
        least: int32 (columns,), where bits change.
        bits: columns of a code, from 1 to 64. Codes of 8, 16 and 32 bits take as many, others 64.
    """
    if sums.ndim != 2 or not 1 <= bits <= 64 or sums.shape[1] % bits:
        raise ValueError(
            f"sums must be (rows, columns), columns a multiple of {bits=}, got {tuple(sums.shape)}"
        )
    _check("sums", sums, sums, (torch.int32,), tuple(sums.shape))
    _check("least", least, sums, (torch.int32,), (sums.shape[1],))
    codes: Tensor = torch.ops.ecoformer.pack_signs(sums, least, bits)
    return codes


def _check(
    name: str, x: Tensor, beside: Tensor, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]
) -> None:
    if x.dtype not in dtypes or x.shape != sizes or x.device != beside.device:
        kinds = " or ".join(map(str, dtypes))
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} must be {kinds} {sizes} on {beside.device}, got {got}")


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
    codes_q, _, v, levels, multiplier = given[:5]
    out = _empty_out(*given)
    if not (codes_q.numel() and v.numel()):
        return out.zero_()
    if not (_in_c(out, *given) if _runs_in_c(v) else _eager(out, *given)):
        raise ValueError(
            "levels must be at least 0 and the groups' largest add up to at most 2^31, multipliers have "
            f"2^14 <= m < 2^15 and 3 <= e <= 22, got {levels.amax(-1).tolist()} and {multiplier.tolist()}"
        )
    return out


@torch.library.impl(_operators, "pack_signs", "CompositeExplicitAutograd")
def _packed(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    if not _runs_in_c(sums):
        ones = (sums >= least).unflatten(1, (-1, bits))
        return pack_codes(ones.to(torch.int8) - 1).to(WIDTHS.get(bits, torch.int64))
    sums, least = sums if sums.stride(1) == 1 else sums.contiguous(), least.contiguous()
    out = _empty_codes(sums, least, bits)
    numbers = [cpu.threads(sums.numel()), len(sums), out.shape[1], bits, sums.stride(0)]
    cpu.call("ecoformer_pack_signs", *numbers, sums.data_ptr(), least.data_ptr(), out.data_ptr(), 0)
    return out


@torch.library.register_fake("ecoformer::integer_attention")
def _empty_out(codes_q: Tensor, codes_k: Tensor, v: Tensor, *_: Any) -> Tensor:
    (batch, heads, n), d = codes_q.shape, v.shape[3]
    return v.new_empty(batch, n, heads, d).transpose(1, 2)


@torch.library.register_fake("ecoformer::pack_signs")
def _empty_codes(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    return sums.new_empty(sums.shape[0], sums.shape[1] // bits, dtype=WIDTHS.get(bits, torch.int64))


# ---- In C --------------------------------------------------------------------------------------------------


def _runs_in_c(x: Tensor) -> bool:
    return _wanted.get() in (None, "cpu") and cpu.unavailable(x.device) is None


def _in_c(out: Tensor, *given: Any) -> bool:
    q, k, v, levels, multiplier, exponent, mask = given
    v = v if v.stride(3) == 1 else v.contiguous()
    levels, multiplier = levels.contiguous(), multiplier.contiguous()
    (batch, heads, nk, d), nq, (groups, size) = v.shape, q.shape[2], (levels.shape[1], levels.shape[2] - 1)
    rows, threads = batch * heads, cpu.threads(batch * heads * max(nq, nk) * d)
    pieces = threads if rows < 4 * threads and rows % threads else 1
    table = (groups << size) * (-(-d // 32) * 32) + -(-(groups << size) // 16) * 16
    partial = torch.empty(rows * pieces * table if pieces > 1 else 0, dtype=torch.int32)
    numbers = [threads, heads, rows, nq, nk, groups, size, d, q.element_size(), k.element_size(), pieces]
    tensors = (q, k, v, exponent, mask, levels, multiplier, out, partial)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    strides += [0] * 3 if exponent is None else exponent.stride()
    strides += [0] * 2 if mask is None else mask.stride()
    return cpu.call("ecoformer_integer_attention", *numbers, *addresses, *strides, 0, 0) == 0


# ---- In plain PyTorch --------------------------------------------------------------------------------------


def _eager(out: Tensor, *given: Any) -> bool:
    q, k, v, levels, multiplier, exponent, mask = given
    groups, size = levels.shape[1], levels.shape[2] - 1
    too_large = levels.amax(-1).long().sum(-1) > LEVELS
    if bool((levels < 0).any() | too_large.any() | ~_is_multiplier(multiplier)):
        return False
    y = torch.cat([v, torch.ones_like(v[..., :1])], -1).long() * _weights(v, exponent, mask).unsqueeze(-1)
    held = y.new_zeros(*v.shape[:2], groups << size, y.shape[-1])
    for rows in _picked(k, groups, size):
        held.scatter_add_(2, rows.unsqueeze(-1).expand_as(y), y)
    mixed = torch.zeros_like(held)
    for d in range(size + 1):  # sums of different keys, exact in fp64
        plane = (distances(size, v.device) == d).double() @ held.unflatten(2, (groups, -1)).double()
        mixed += (levels[..., d, None, None].long() * plane.long()).flatten(2, 3)
    read = y.new_zeros(*q.shape, y.shape[-1])
    for rows in _picked(q, groups, size):
        read += mixed.gather(2, rows.unsqueeze(-1).expand_as(read))
    top, bottom = read[..., :-1], read[..., -1:].clamp_min(1)
    m, e = multiplier.long()[..., None, None].unbind(1)
    length = _length(bottom)
    mantissa = (bottom << (15 - length).clamp_min(0)) >> (length - 15).clamp_min(0)
    drop = (length + e - 25).clamp_min(0)
    shift = length + e - 3 - drop
    part = (top >> drop).clamp(-255 << 10, 255 << 10)
    found = part * ((m << 12) // mantissa) + (1 << shift - 1) >> shift
    out.copy_(found.clamp(-127, 127))
    return True


def _weights(v: Tensor, exponent: Tensor | None, mask: Tensor | None) -> Tensor:
    """How much each key counts (B, H, N): whole numbers that add up to at most 2^24."""
    hidden = torch.zeros_like(v[:, :1, :, 0], dtype=torch.bool) if mask is None else mask.unsqueeze(1)
    if exponent is None:
        return v.new_ones(v.shape[:3], dtype=torch.int64).masked_fill(hidden, 0)
    e = exponent.long()
    behind = e.masked_fill(hidden, -128).amax(-1, keepdim=True) - e
    powers = ((1 << WEIGHT_BITS) >> behind.clamp(0, 31)).masked_fill(hidden, 0)
    return powers >> (_length(powers.sum(-1, keepdim=True) - 1) - WEIGHT_BITS).clamp_min(0)


def _picked(codes: Tensor, groups: int, size: int) -> list[Tensor]:
    """For each group the rows that codes pick."""
    width = 8 * codes.element_size()
    masks = [(1 << min(size, width - j * size)) - 1 for j in range(groups)]
    return [(codes.long() >> j * size & mask) + (j << size) for j, mask in enumerate(masks)]


def _length(x: Tensor) -> Tensor:
    """How many bits whole numbers have; none below 1."""
    length = torch.zeros_like(x)
    for r in range(63):
        length += x >= 1 << r
    return length
