"""Hash functions as plain tensors, and what they compute in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HashFunctions(NamedTuple):
    """Kernelised hash functions, head by head: sign((exp(-|x - s|^2 / (2 sigma)) - mean) A) of unit x."""

    support: Tensor
    """(H, m, D) support samples s."""
    mean: Tensor
    """(H, m) what makes the kernel zero-mean."""
    sigma: Tensor
    """(H,) kernel widths."""
    weight: Tensor
    """(H, m, b) A."""


class Hyperplanes(NamedTuple):
    """Plain hyperplanes, head by head: sign(x W) of unit tokens x."""

    weight: Tensor
    """(H, D, b) W."""


Functions = HashFunctions | Hyperplanes


def unit_length(tokens: Tensor) -> Tensor:
    """Tokens of length one; a zero vector stays zero and passes its gradient on unscaled.

    A length whose square overflows gives NaN, lest the token pass for a zero vector.
    """
    square = tokens.square().sum(dim=-1, keepdim=True)
    scale = torch.where(square == 0, 1, square).rsqrt()
    return tokens * torch.where(square.isinf(), torch.nan, scale)


def squared_distances(unit: Tensor, support: Tensor) -> Tensor:
    """|x - s|^2 of tokens (..., N, D) and support samples (..., m, D), by their inner products."""
    own = unit.square().sum(dim=-1, keepdim=True)
    theirs = support.square().sum(dim=-1).unsqueeze(-2)
    return (own + theirs - 2 * unit @ support.mT).clamp_min(0)


def project(tokens: Tensor, functions: Functions) -> Tensor:
    """Real numbers (B, H, N, b), whose signs are the codes, of tokens (B, H, N, D) in their dtype."""
    unit = unit_length(tokens)
    if isinstance(functions, Hyperplanes):
        return unit @ functions.weight.to(tokens.dtype)
    support, mean, sigma, weight = (x.to(tokens.dtype) for x in functions)
    kernel = torch.exp(-squared_distances(unit, support) / (2 * sigma.view(-1, 1, 1)))
    return (kernel - mean.unsqueeze(-2)) @ weight


def codes(tokens: Tensor, functions: Functions) -> Tensor:
    """Codes (B, H, N, b) of ±1 in fp32; sign(0) is +1, NaN stays NaN, the gradient passes where |y| <= 1."""
    y = project(tokens.float(), functions)
    signs = torch.where(y >= 0, 1.0, torch.where(y < 0, -1.0, y)).detach()
    smooth = y.clamp(-1, 1)
    return signs + (smooth - smooth.detach()) if y.requires_grad else signs
