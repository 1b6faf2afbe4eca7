"""Grouped attention in whole numbers: from packed codes and int8 values to int8 outputs.

It computes what `reference.integer_attention` computes, bit for bit, on every backend: sums over keys are
int32 and exact in any order, key weights are shifts, and a query takes one division for all its channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer.arguments import EXACT_WIDTHS, shape

LEVEL_BITS = 24
"""The largest level of an affinity is 2^24."""
MOST_TOKENS = 1 << LEVEL_BITS
"""Keys of a sample: 127 * 2^24 is the largest sum that fits in 32 bits."""
LARGEST = 127
"""Of values and outputs."""


def integer_levels(scale: Tensor, ratio: Tensor, size: int) -> Tensor:
    """What groups of `size` bits count where d bits differ: int32 (H, G, size + 1), at most 2^24.

    `scale` and `ratio` are (H, G), see `Affinity.levels`.
    """
    distances = torch.arange(size + 1, device=scale.device)
    relative = scale.double() / scale.double().amax(dim=-1, keepdim=True)
    powers = torch.pow(ratio.double().unsqueeze(-1), distances)
    return (relative.unsqueeze(-1) * powers * float(1 << LEVEL_BITS)).round().to(torch.int32)


def integer_multiplier(factor: Tensor) -> Tensor:
    """Positive numbers (H,) as m / 2^e: int32 (H, 2) with 2^14 <= m < 2^15 and 0 <= e <= 22."""
    mantissa, exponent = torch.frexp(factor.double())
    whole = (mantissa * 2**15).round().to(torch.int32)
    over = whole == 2**15
    whole, exponent = torch.where(over, 2**14, whole), 15 - exponent - over.int()
    if not factor.is_meta and bool(((exponent < 0) | (exponent > 22)).any()):
        raise ValueError(f"factors must be between 2^-8 and 2^14, got {factor.tolist()}")
    return torch.stack([whole, exponent.to(torch.int32)], dim=-1)


def integer_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    levels: Tensor,
    multiplier: Tensor,
    exponent: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """int8 outputs (B, H, N_q, C) from packed codes and int8 values.

    Args:
        codes_q: packed codes (B, H, N_q), see `pack_codes`.
        codes_k: packed codes (B, H, N_k).
        v: int8 (B, H, N_k, C), from -127 to 127.
        levels: int32 (H, G, s + 1), see `integer_levels`.
        multiplier: int32 (H, 2), what outputs are scaled by, see `integer_multiplier`.
        exponent: int8 (B, H, N_k): keys count 2^exponent, relative to the heaviest one; those below about
            2^-24 N of it count nothing.
        key_padding_mask: (B, N_k) bool, True where a key is padding.
    """
    if v.dtype != torch.int8 or v.ndim != 4:
        raise ValueError(f"v must be int8 (B, H, N, C), got {v.dtype} {shape(v)}")
    if v.shape[2] > MOST_TOKENS:
        raise ValueError(f"v {shape(v)} has more than 2^24 keys, whose sums do not fit in 32 bits")
    if codes_k.shape != v.shape[:3] or codes_q.shape[:2] != v.shape[:2]:
        raise ValueError(f"codes {shape(codes_q)} and {shape(codes_k)} do not fit v {shape(v)}")
    return eager(codes_q, codes_k, v, levels, multiplier, exponent, key_padding_mask)


def pack_signs(sums: Tensor, thresholds: Tensor, bits: int) -> Tensor:
    """Packed codes (rows, columns / bits) of int32 sums (rows, columns): a bit says sum >= threshold."""
    ones = (sums >= thresholds).view(len(sums), -1, bits)
    weights = torch.ones(bits, dtype=torch.int64, device=sums.device) << torch.arange(
        bits, device=sums.device
    )
    return (ones * weights).sum(dim=-1).to(EXACT_WIDTHS.get(bits, torch.int64))


def eager(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    levels: Tensor,
    multiplier: Tensor,
    exponent: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """The same in plain PyTorch."""
    groups, size, channels = levels.shape[1], levels.shape[2] - 1, v.shape[-1]
    weight = _key_weights(v, exponent, mask)
    ones = v.new_ones(*v.shape[:3], 1)
    weighted = torch.cat([v, ones], dim=-1).to(torch.int32) * weight.unsqueeze(-1)
    rows = weighted.new_zeros(*v.shape[:2], groups << size, channels + 1)
    for index in _rows(codes_k, groups, size):
        rows.scatter_add_(2, index.unsqueeze(-1).expand_as(weighted), weighted)
    grouped = rows.view(*v.shape[:2], groups, 1 << size, channels + 1)
    tables = _mixed(grouped, levels).flatten(2, 3)
    above, below = tables[..., :-1], tables[..., -1]
    narrow = (_length(above.abs().amax(dim=(2, 3))) + (groups - 1).bit_length() - 30).clamp_min(0)
    above = _shifted(above, narrow[..., None, None])
    top = above.new_zeros(*codes_q.shape, channels)
    bottom = below.new_zeros(codes_q.shape)
    for index in _rows(codes_q, groups, size):
        top += above.gather(2, index.unsqueeze(-1).expand_as(top))
        bottom += below.gather(2, index)
    return _divided(top, bottom, narrow.unsqueeze(-1), multiplier.to(torch.int64))


def _key_weights(v: Tensor, exponent: Tensor | None, mask: Tensor | None) -> Tensor:
    """How much each key counts: int32 (B, H, N)."""
    hidden = None if mask is None else mask.unsqueeze(1)
    if exponent is None:
        weight = v.new_ones(v.shape[:3], dtype=torch.int32)
        return weight if hidden is None else weight.masked_fill(hidden, 0)
    exponent = exponent.to(torch.int32)
    if hidden is not None:
        exponent = exponent.masked_fill(hidden, -(1 << 20))
    reach = LEVEL_BITS - (v.shape[2] - 1).bit_length()
    shift = reach + exponent - exponent.amax(dim=-1, keepdim=True)
    weight = torch.where(shift < 0, 0, 1 << shift.clamp_min(0))
    return weight if hidden is None else weight.masked_fill(hidden, 0)


def _rows(codes: Tensor, groups: int, size: int) -> list[Tensor]:
    """For each group the row of the tables that each token has."""
    wide = codes.to(torch.int64)
    return [(wide >> (j * size) & (1 << size) - 1) + (j << size) for j in range(groups)]


def _mixed(rows: Tensor, levels: Tensor) -> Tensor:
    """What every value of a group reads, int64, from the values' own sums (B, H, G, 2^s, C).

    Sums over all values at each distance come first: they need additions only.
    """
    planes, size = [rows], levels.shape[2] - 1
    numbers = torch.arange(1 << size, device=rows.device)
    for r in range(size):
        flipped = [plane[..., numbers ^ (1 << r), :] for plane in planes]
        middle = [one + other for one, other in zip(planes[1:], flipped, strict=False)]
        planes = [planes[0], *middle, flipped[-1]]
    steps = levels.to(torch.int64)[:, :, :, None, None]
    total = steps[:, :, 0] * planes[0]
    for d in range(1, size + 1):
        total += steps[:, :, d] * planes[d]
    return total


def _length(numbers: Tensor) -> Tensor:
    """How many bits numbers of at least 0 have."""
    powers = torch.ones(63, dtype=torch.int64, device=numbers.device) << torch.arange(
        63, device=numbers.device
    )
    return (numbers.unsqueeze(-1) >= powers).sum(dim=-1)


def _shifted(numbers: Tensor, by: Tensor) -> Tensor:
    """numbers / 2^by, rounded to the nearest, halves upwards."""
    return (numbers + ((1 << by) >> 1)) >> by


def _divided(top: Tensor, bottom: Tensor, narrow: Tensor, multiplier: Tensor) -> Tensor:
    """top * 2^narrow / bottom * multiplier as int8; see `reference.integer_division`."""
    factor, exponent = multiplier[:, :1], multiplier[:, 1:, None]
    bottom = torch.maximum(bottom, 1 << narrow)
    length = _length(bottom)
    drop, short = (length - narrow - 8).clamp_min(0), (length - 24).clamp_min(0)
    reciprocal = (factor << (narrow + drop + 8 - short)) // (bottom >> short)
    part = _shifted(top, drop.unsqueeze(-1))
    out = _shifted(part * reciprocal.unsqueeze(-1), exponent + 8)
    return out.clamp(-LARGEST, LARGEST).to(torch.int8)
