"""Hashed attention in plain PyTorch: on every device, in every dtype, for any number of bits.

A token's code picks one row in each group; its row of ones and zeros is `one_hot`. *scatter* adds keys to the
rows they pick, *mix* lets the rows of a group exchange what they hold, *gather* sums the rows a query picks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.affinity import distances, group_size, mixing

FLOOR = 2.0**-30
"""Denominators are at least this share of what they were if every key had the mean affinity of all codes."""
NEGATIVE = "affinity {} is negative for some codes: the sum of the groups' smallest numbers must be positive"
BLOCK = 64
"""Tokens of a causal block, whose pairs are looked at one by one."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    bits: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the state of these keys alone, and each query's denominator; see `hash_attention`."""
    y, zq, zk, m = prepare(q, k, v, f, weight, bits)
    own = zk.mT @ y
    if is_causal:
        top = causal_product(mixed(zq, m), zk, y)
        seen = y[..., -1].cumsum(-1)
        if state is not None:
            before = state.to(y.dtype)
            top, seen = top + mixed(zq, m) @ before, seen + count(before, m)
    else:
        total = own if state is None else own + state.to(y.dtype)
        top, seen = mixed(zq, m) @ total, count(total, m)
    floor = FLOOR * m.mean((-2, -1)).sum(-1).unsqueeze(-1) * seen
    bounded = (top[..., -1] < floor) | (seen == 0)
    below = torch.where(bounded, floor, top[..., -1])
    out = torch.where(below == 0, 0, 1 / torch.where(below == 0, 1, below)).unsqueeze(-1) * top[..., :-1]
    return _rows_last(out.to(v.dtype)), own, torch.where(bounded, -below, below)


def backward(
    grad: Tensor,
    grad_own: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    out: Tensor,
    own: Tensor,
    below: Tensor,
    bits: int,
    is_causal: bool,
) -> Gradients:
    """Gradients of q, k, v, f, weight and state. A denominator that was below its floor is negative here."""
    y, zq, zk, m = prepare(q, k, v, f, weight, bits)
    scale = torch.where(below == 0, 0, 1 / torch.where(below == 0, 1, below.abs())).unsqueeze(-1)
    dn = grad.to(y.dtype) * scale
    count = torch.where(below > 0, -(dn * out.to(y.dtype)).sum(-1), 0)
    dn = torch.cat([dn, count.unsqueeze(-1)], -1)
    read = mixed(zq, m)
    # What a query's gradient makes of each row of the state, and what a key's value makes of each row of
    # its gradient.
    if is_causal:
        held, reads = causal_product(dn, y, zk), causal_product(y, dn, read, reverse=True)
        to_y = causal_product(zk, read, dn, reverse=True)
        if state is not None:
            held = held + dn @ state.to(y.dtype).mT
        rows = read.mT @ dn if state is not None else None
    else:
        rows = read.mT @ dn
        total = own if state is None else own + state.to(y.dtype)
        held, reads, to_y = dn @ total.mT, y @ rows.mT, zk @ rows
    if grad_own is not None:
        reads, to_y = reads + y @ grad_own.mT, to_y + zk @ grad_own
    to_q, to_k = _flips(mixed(held, m.mT), q, f, bits), _flips(reads, q if k is None else k, f, bits)
    w = y[..., -1]
    plain = torch.where(w.unsqueeze(-1) == 0, 0, v.to(y.dtype))
    to_w = torch.where(w == 0, 0, (plain * to_y[..., :-1]).sum(-1) + to_y[..., -1])
    return (
        to_q + to_k if k is None else to_q,
        None if k is None else to_k,
        (w.unsqueeze(-1) * to_y[..., :-1]).to(v.dtype),
        to_affinity(_pairs(zq, held, f), f),
        None if weight is None else to_w.sum_to_size(weight.shape).to(weight.dtype),
        None if state is None or rows is None else rows.to(state.dtype),
    )


def one_hot(y: Tensor, f: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Which rows tokens pick (..., N, G 2^s), of numbers (..., N, b) or packed codes (..., N)."""
    groups, size = f.shape[1], group_size(f)
    if y.dtype.is_floating_point:
        ones = y >= 0
    else:
        ones = (y.long().unsqueeze(-1) >> torch.arange(bits, device=y.device) & 1).bool()
    ones = F.pad(ones, (0, groups * size - bits)).unflatten(-1, (groups, size))
    values = (ones * 2 ** torch.arange(size, device=y.device)).sum(-1)  # runtimes have no shifts
    picks = values.unsqueeze(-1) == torch.arange(1 << size, device=y.device)
    return picks.flatten(-2).to(dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over tokens."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """x in the dtype of sums over it."""
    return x.to(accumulator(x.dtype))


def without(mask: Tensor | None, x: Tensor) -> Tensor:
    """x (..., N, D) with masked tokens at zero, whatever they held (NaN included)."""
    return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Sums over tokens stay in fp32 under autocast too."""
    if device.type == "meta":  # autocast does not know it, and nothing is rounded there
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def prepare(
    q: Tensor, k: Tensor | None, v: Tensor, f: Tensor, weight: Tensor | None, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted [v, 1], the rows that queries and keys pick, and what the rows of a group exchange."""
    dtype = accumulator(v.dtype)
    y = F.pad(v.to(dtype), (0, 1), value=1.0)
    if weight is not None:
        w = weight.to(dtype).unsqueeze(-1)
        y = torch.where(w == 0, 0, y * w)  # what is padded may hold anything
    zq = one_hot(q, f, bits, dtype)
    return y, zq, zq if k is None else one_hot(k, f, bits, dtype), mixing(f, bits).to(dtype)


def mixed(z: Tensor, m: Tensor) -> Tensor:
    """What z (..., N, G 2^s) reads after the rows of each group were mixed: z_j M_j for each group j."""
    groups, values = m.shape[1:3]
    return (z.unflatten(-1, (groups, values)).transpose(-3, -2) @ m).transpose(-3, -2).flatten(-2)


def count(state: Tensor, m: Tensor) -> Tensor:
    """The weight of all keys of a state (..., 1): every group has counted them."""
    return state[..., : m.shape[-1], -1].sum(-1, keepdim=True)


def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t (s >= t if `reverse`), block by block."""
    if reverse:
        return causal_product(a.flip(-2), b.flip(-2), c.flip(-2)).flip(-2)
    n = a.shape[-2]
    blocks = (n + BLOCK - 1) // BLOCK
    a, b, c = (
        F.pad(x, (0, 0, 0, blocks * BLOCK - n)).reshape(*x.shape[:-2], blocks, BLOCK, x.shape[-1])
        for x in (a, b, c)
    )
    before = F.pad((b.mT @ c).cumsum(-3), (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return ((a @ b.mT).tril() @ c + a @ before).flatten(-3, -2)[..., :n, :]


def _flips(p: Tensor, y: Tensor, f: Tensor, bits: int) -> Tensor:
    """Gradients of y (..., N, b) from products p (..., N, G 2^s) with the rows its code picks or could pick.

    That of a bit is half the difference between its two values; it passes where abs(y) <= 1.
    """
    groups, size = f.shape[1], group_size(f)
    if not y.dtype.is_floating_point:
        return y.new_empty(0)
    ones = F.pad(y >= 0, (0, groups * size - bits)).unflatten(-1, (groups, size))
    flip = 2 ** torch.arange(size, device=y.device)
    here = (ones * flip).sum(-1, keepdim=True)
    grouped = p.unflatten(-1, (groups, 1 << size))
    half = 0.5 * (grouped.gather(-1, here) - grouped.gather(-1, here ^ flip))
    found = torch.where(ones, half, -half).flatten(-2)[..., :bits]
    return torch.where(y.abs() <= 1, found, 0).to(y.dtype)


def _pairs(zq: Tensor, held: Tensor, f: Tensor) -> Tensor:
    """How much each pair of a group's values adds to the result: (H, G, 2^s, 2^s)."""
    split = (f.shape[1], 1 << group_size(f))
    zq, held = (x.unflatten(-1, split).transpose(-3, -2) for x in (zq, held))
    return (zq.mT @ held).sum(0)


def to_affinity(pairs: Tensor, f: Tensor) -> Tensor:
    """The gradient of f from that of its pairs of values (H, G, 2^s, 2^s)."""
    pairs = pairs.sum_to_size(f.shape[0], *pairs.shape[1:])
    if f.ndim == 3:
        at = distances(group_size(f), f.device).flatten().expand(*pairs.shape[:2], -1)
        pairs = pairs.new_zeros(f.shape).scatter_add_(-1, at, pairs.flatten(2))
    return pairs.to(f.dtype)


def _rows_last(x: Tensor) -> Tensor:
    """(B, H, N, D) laid out as (B, N, H, D), so that joining the heads copies nothing."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- Kernelised hash functions -----------------------------------------------------------------------------


def hash_forward(
    x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool
) -> Tensor:
    """See `hash_tokens`."""
    _, _, kernel, mean, _, weight = _kernels(x, support, mean, sigma, weight)
    y = (kernel - mean) @ weight
    return pack_codes(y) if packed else y


def hash_backward(
    grad: Tensor, x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and A."""
    dtype = weight.dtype
    unit, scale, kernel, mean, sigma, weight = _kernels(x, support, mean, sigma, weight)
    to_weight = ((kernel - mean).mT @ grad).sum(0).to(dtype)
    to_unit = (grad @ weight.mT * kernel / sigma) @ support.to(unit.dtype)
    to_x = scale * (to_unit - (to_unit * unit).sum(-1, keepdim=True) * unit)  # what lengthens a token is lost
    return to_x.to(x.dtype), to_weight


def unit_length(x: Tensor) -> Tensor:
    """Tokens of length one; a zero token stays zero."""
    return x * _per_length(x)


def squared_distances(x: Tensor, support: Tensor) -> Tensor:
    """|x - s|^2 of tokens (..., N, D) and support samples (..., m, D), by their inner products."""
    own, theirs = x.square().sum(-1, keepdim=True), support.square().sum(-1).unsqueeze(-2)
    return (own + theirs - 2 * x @ support.mT).clamp_min(0)


def _per_length(x: Tensor) -> Tensor:
    """1 / |x| (..., 1), 1 for a zero token.

    A length whose square overflows gives NaN; the token would otherwise look like zero.
    """
    square = x.square().sum(-1, keepdim=True)
    return torch.where(square.isinf(), torch.nan, torch.where(square == 0, 1, square).rsqrt())


def pack_codes(y: Tensor) -> Tensor:
    """The signs of y (..., b), b <= 64, as one integer each (...): bit r is 1 where y[..., r] >= 0."""
    bits = y.shape[-1]
    if not 1 <= bits <= 64:
        raise ValueError(f"y {tuple(y.shape)} must have 1 to 64 bits to be packed")
    powers = 1 << torch.arange(bits, device=y.device)  # the top bit of an int64 is its sign
    return ((y >= 0) * powers).sum(-1)


def unpack_codes(packed: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of `pack_codes`: ±1 (..., bits)."""
    ones = (packed.long().unsqueeze(-1) >> torch.arange(bits, device=packed.device)) & 1
    return (2 * ones - 1).to(dtype)


def _kernels(x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x = widened(x)
    support, mean, sigma, weight = (p.to(x.dtype) for p in (support, mean, sigma, weight))
    scale, sigma = _per_length(x), sigma.view(-1, 1, 1)
    unit = x * scale
    kernel = torch.exp(-squared_distances(unit, support) / (2 * sigma))
    return unit, scale, kernel, mean.unsqueeze(-2), sigma, weight
