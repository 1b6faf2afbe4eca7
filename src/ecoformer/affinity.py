"""The affinity of two codes: what each group of bits counts when d of its bits differ.

A code of b bits is cut into G groups of s consecutive bits; the last group may have fewer. An affinity is a
tensor f (1 or H, G, s + 1), one row for all heads or a row for each, and two codes have the affinity

    a(h, g) = sum over groups j of f[j, d_j],   d_j the number of bits in group j where h and g differ.

The most general affinity is full: f (1 or H, G, 2^s, 2^s), indexed by the two values that the group has.
What must be positive is the sum of the groups' smallest reachable numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 8
"""Bits of a group: it has 2^s values."""


def paper(bits: int, size: int = 4, *, device: torch.device | str | None = None) -> Tensor:
    """2^c + h . g with c = ceil(log2(b + 1)), as in the paper: (1, G, s + 1) in groups of `size` bits."""
    return _linear(bits, 1 << bits.bit_length(), size, device)


def tight(bits: int, size: int = 4, *, device: torch.device | str | None = None) -> Tensor:
    """b + 1 + h . g, with the smallest whole constant that keeps every affinity positive."""
    return _linear(bits, bits + 1, size, device)


def grouped(beta: float | Tensor, weight: float | Tensor, bits: int, size: int = 4) -> Tensor:
    """weight * product over the bits r of a group of (1 + beta h_r g_r), differentiable in both.

    `beta`, 0 < beta <= 1, and `weight`, positive, are numbers or tensors (1 or H, G).
    """
    groups = group_count(bits, size)
    beta, weight = (x if isinstance(x, Tensor) else torch.full((1, groups), float(x)) for x in (beta, weight))
    for name, x in (("beta", beta), ("weight", weight)):
        if x.ndim != 2 or x.shape[1] != groups:
            raise ValueError(
                f"{name} must be a number or (H, G) with G = {groups} groups of {size} of the {bits} bits, "
                f"got {tuple(x.shape)}"
            )
    differ = torch.arange(size + 1.0, device=beta.device)
    sizes = torch.full((groups, 1), float(size), device=beta.device)
    sizes[-1] = bits - (groups - 1) * size
    agree = (sizes - differ).clamp_min(0)
    beta = beta.unsqueeze(-1)
    return weight.unsqueeze(-1) * (1 + beta) ** agree * (1 - beta) ** differ


def group_count(bits: int, size: int) -> int:
    """G, the number of groups that a code is cut into."""
    if bits < 1 or not 1 <= size <= LARGEST:
        raise ValueError(
            f"groups must have 1 to {LARGEST} bits of at least one, got bits={bits}, size={size}"
        )
    return -(-bits // size)


def group_size(f: Tensor) -> int:
    """s, the bits of a group."""
    return f.shape[2] - 1 if f.ndim == 3 else f.shape[2].bit_length() - 1


def distances(size: int, device: torch.device | None = None) -> Tensor:
    """In how many bits two values of a group differ: (2^s, 2^s)."""
    bits = torch.arange(1 << size, device=device).unsqueeze(-1) // 2 ** torch.arange(size, device=device) % 2
    return (bits.unsqueeze(1) != bits).sum(-1)


def mixing(f: Tensor, bits: int) -> Tensor:
    """What groups count for pairs of values (1 or H, G, 2^s, 2^s), zero where codes cannot reach."""
    size = group_size(f)
    full = f if f.ndim == 4 else f[..., distances(size, f.device)]
    last = bits - (f.shape[1] - 1) * size
    if last == size:
        return full
    reach = torch.arange(1 << size, device=f.device) < 1 << last
    return torch.cat([full[:, :-1], torch.where(reach & reach.unsqueeze(-1), full[:, -1:], 0)], 1)


def least(f: Tensor, bits: int) -> Tensor:
    """The smallest affinity of any two codes of `bits` bits, one number for each row of f (1 or H,)."""
    size = group_size(f)
    last = bits - (f.shape[1] - 1) * size
    if f.ndim == 3:
        reachable = [f[:, :-1].amin(-1), f[:, -1:, : last + 1].amin(-1)]
    else:
        values = slice(None, 1 << last)
        reachable = [f[:, :-1].amin((-2, -1)), f[:, -1:, values, values].amin((-2, -1))]
    return torch.cat(reachable, -1).sum(-1)


def _linear(bits: int, constant: int, size: int, device: torch.device | str | None) -> Tensor:
    """constant + h . g in whole numbers: what does not divide evenly goes to the first group."""
    groups = group_count(bits, size)
    share, rest = divmod(constant, groups)
    f = (share + size - 2.0 * torch.arange(size + 1, device=device)).expand(1, groups, -1)
    short = groups * size - bits
    if rest or short:
        group = torch.arange(groups, device=device).unsqueeze(-1)
        f = f + rest * (group == 0) - short * (group == groups - 1)
    return f
