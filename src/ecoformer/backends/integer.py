"""Grouped attention in whole numbers: from packed codes and int8 values to int8 outputs.

It computes what `reference.integer_attention` computes, bit for bit, on every backend: sums over keys are
int32 and exact in any order, key weights are shifts, and a query takes one division for all its channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.arguments import EXACT_WIDTHS, INTEGERS, shape
from ecoformer.backends.choice import requested, warn_if_requested
from ecoformer.backends.eager import pack
from ecoformer.backends.fused import PLAIN, CannotRun, empty_out, give_up, load, warn_once

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
    if codes_k.shape != v.shape[:3] or codes_q.ndim != 3 or codes_q.shape[:2] != v.shape[:2]:
        raise ValueError(f"codes {shape(codes_q)} and {shape(codes_k)} do not fit v {shape(v)}")
    batch, heads, keys, _ = v.shape
    _check("levels", levels, torch.int32, (heads, *levels.shape[1:]), 3)
    _check("multiplier", multiplier, torch.int32, (heads, 2), 2)
    bits = levels.shape[1] * (levels.shape[2] - 1)
    for codes in (codes_q, codes_k):
        if codes.dtype not in INTEGERS or 8 * codes.element_size() < bits:
            raise ValueError(f"codes of {codes.dtype} {shape(codes)} do not hold {bits} bits")
    if exponent is not None:
        _check("exponent", exponent, torch.int8, (batch, heads, keys), 3)
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, torch.bool, (batch, keys), 2)
    given = (codes_q, codes_k, v, levels, multiplier, exponent, key_padding_mask)
    if _traced(*given):
        found: Tensor = registered_attention(*given)
        return found
    return _attention(*given)


def _check(name: str, x: Tensor, dtype: torch.dtype, sizes: tuple[int, ...], ndim: int) -> None:
    if x.dtype != dtype or x.ndim != ndim or x.shape != sizes:
        raise ValueError(f"{name} must be {dtype} {sizes}, got {x.dtype} {shape(x)}")


def _traced(*tensors: Tensor | None) -> bool:
    """Whether to call the registered operator: while recording or counting. Direct calls are cheaper."""
    recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return recorded or torch._C._len_torch_dispatch_stack() > 0 or any(type(x) not in PLAIN for x in tensors)


def _attention(*given: Any) -> Tensor:
    codes_q, _, v = given[:3]
    if codes_q.numel() and v.numel():
        out = _by_kernel("integer_attention", *given)
        if out is not None:
            return out
    return empty_out(codes_q, v).copy_(eager(*given))


def _by_kernel(name: str, *given: Any) -> Tensor | None:
    """Call `name` of the requested backend; None means that eager should compute it."""
    wanted = requested()
    if wanted == "eager":
        return None
    backend = wanted or "cpu"
    module: Any = load(backend)
    if isinstance(module, str):
        reason = module
    elif not hasattr(module, name):
        reason = "it has no kernels for whole numbers"
    else:
        reason = module.unavailable(given[0].device)
        if reason is None:
            try:
                found: Tensor = getattr(module, name)(*given)
                return found
            except CannotRun as error:
                warn_once(backend, give_up(backend, error))
                return None
    warn_if_requested(wanted, reason)
    return None


@torch.library.custom_op(
    "ecoformer::integer_attention",
    mutates_args=(),
    schema="(Tensor codes_q, Tensor codes_k, Tensor v, Tensor levels, Tensor multiplier, Tensor? exponent, "
    "Tensor? mask) -> Tensor",
)
def registered_attention(*given: Any) -> Tensor:
    """`integer_attention` as an operator, for compiled graphs."""
    return _attention(*given)


@registered_attention.register_fake
def _(*given: Any) -> Tensor:
    return empty_out(given[0], given[2])


def pack_signs(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    """Packed codes (rows, columns / bits) of int32 sums (rows, columns): bits are 1 where sums >= least.

    Args:
        sums: what an int8 product gives, int32 (rows, columns), a part of wider rows or not.
        least: int32 (columns,), where bits change.
        bits: columns of a code, from 1 to 64. The dtype of packed codes is that of `pack_codes`.
    """
    if sums.dtype != torch.int32 or sums.ndim != 2:
        raise ValueError(f"sums must be int32 (rows, columns), got {sums.dtype} {shape(sums)}")
    _check("least", least, torch.int32, (sums.shape[1],), 1)
    if not 1 <= bits <= 64 or sums.shape[1] % bits:
        raise ValueError(f"bits={bits} must be from 1 to 64 and divide the columns of sums {shape(sums)}")
    if _traced(sums, least):
        found: Tensor = registered_packing(sums, least, bits)
        return found
    return _packed(sums, least, bits)


def _packed(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    if sums.numel():
        out = _by_kernel("pack_signs", sums, least, _empty_codes(sums, bits), bits)
        if out is not None:
            return out
    return pack((sums >= least).view(len(sums), sums.shape[1] // bits, bits))


def _empty_codes(sums: Tensor, bits: int) -> Tensor:
    rows, columns = sums.shape
    return sums.new_empty(rows, columns // bits, dtype=EXACT_WIDTHS.get(bits, torch.int64))


@torch.library.custom_op(
    "ecoformer::pack_signs", mutates_args=(), schema="(Tensor sums, Tensor least, int bits) -> Tensor"
)
def registered_packing(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    """`pack_signs` as an operator, for compiled graphs."""
    return _packed(sums, least, bits)


@registered_packing.register_fake
def _(sums: Tensor, least: Tensor, bits: int) -> Tensor:
    return _empty_codes(sums, bits)


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
