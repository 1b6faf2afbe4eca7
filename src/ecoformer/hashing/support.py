"""Support samples: the tokens that the kernel compares others with."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer.arguments import shape

_STEPS = 10
"""Rounds of k-means: the centres hardly move after that, and the codes no longer notice."""


def draw_support(unit: Tensor, valid: Tensor | None, count: int, generator: torch.Generator) -> Tensor:
    """`count` random tokens of every head (H, m, D) out of all samples' unit tokens (H, B, N, D)."""
    heads, batch, n, dim = unit.shape
    candidates = torch.arange(batch * n, device="cpu")
    if valid is not None:
        candidates = candidates[valid.flatten().cpu()]
    if len(candidates) < count:
        raise ValueError(
            f"tokens {shape(unit.transpose(0, 1))} hold {len(candidates)} tokens a head (padding apart), "
            f"fewer than support={count}: pass more tokens or lower support"
        )
    picks = [
        candidates[torch.randperm(len(candidates), generator=generator, device="cpu")] for _ in range(heads)
    ]
    index = torch.stack(picks)[:, :count, None].expand(-1, -1, dim).to(unit.device)
    return unit.flatten(1, 2).gather(1, index)


def spread_support(unit: Tensor, valid: Tensor | None, support: Tensor) -> Tensor:
    """Support samples moved by k-means: each becomes the mean of the tokens nearest to it."""
    points = unit.flatten(1, 2)
    weight = points.new_ones(points.shape[1])
    if valid is not None:
        weight = valid.flatten().to(points.dtype)
        points = points.masked_fill(~valid.flatten().unsqueeze(-1), 0)
    for _ in range(_STEPS):
        nearest = (points @ support.mT - support.square().sum(dim=-1).unsqueeze(1) / 2).argmax(dim=-1)
        member = torch.nn.functional.one_hot(nearest, support.shape[1]).to(points.dtype)
        member = member * weight.unsqueeze(-1)
        size = member.sum(dim=1).unsqueeze(-1)
        support = torch.where(size > 0, (member.mT @ points) / size.clamp_min(1), support)
    return support
