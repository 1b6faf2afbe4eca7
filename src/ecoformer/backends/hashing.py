"""Hash functions as plain tensors, and what they compute in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Size, Tensor


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


class Signs(NamedTuple):
    """Tokens are already projections, one channel per bit; codes are their signs, `reach` is 1."""


Functions = HashFunctions | Hyperplanes | Signs


def shapes(functions: Functions | None) -> tuple[Size, ...] | None:
    """Of all tensors."""
    return None if functions is None else tuple(x.shape for x in functions)


def check_functions(name: str, functions: Functions, tokens: Tensor) -> tuple[int, int, int]:
    """Heads, channels and bits; refuses tensors that do not fit each other: kernels would read past them."""
    if isinstance(functions, Signs):
        return tokens.shape[1], tokens.shape[-1], tokens.shape[-1]
    weight = functions.weight
    if isinstance(functions, Hyperplanes):
        if weight.ndim != 3:
            raise ValueError(f"{name}'s weight must be (H, D, b), got {tuple(weight.shape)}")
        heads, dim, bits = weight.shape
        return heads, dim, bits
    sizes = [tuple(x.shape) for x in functions]
    fitting = [len(size) for size in sizes] == [3, 2, 1, 3]
    if not fitting or sizes[1:3] != [sizes[0][:2], sizes[0][:1]] or sizes[3][:2] != sizes[0][:2]:
        named = ", ".join(f"{field} {size}" for field, size in zip(functions._fields, sizes, strict=True))
        raise ValueError(
            f"{name}'s support (H, m, D), mean (H, m), sigma (H,) and weight (H, m, b) must fit each other, "
            f"got {named}"
        )
    return sizes[0][0], sizes[0][2], sizes[3][2]


def transforming() -> bool:
    """Whether `torch.func` transforms or forward-mode AD are active."""
    # PyTorch's own autograd.Function asks the same question; there is no public name for it.
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def sign_ste(x: Tensor, reach: float | None = None) -> Tensor:
    """sign(x) in the forward pass, the gradient of hard tanh in the backward pass.

    sign(0) is +1, and NaN stays NaN. The gradient passes where |x| <= 1. With `reach`, hard tanh is taken of
    x (..., b) divided by `reach` times the root mean square of its last dimension, which counts as a
    constant: the gradient then passes for the same bits, however long x is.
    """
    with torch.no_grad():
        codes = torch.where(x >= 0, 1.0, torch.where(x < 0, -1.0, x)).to(x.dtype)
    if not x.requires_grad and not transforming():
        return codes
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        # Its own check would fail less clearly: that compares the graph with one recorded without gradients.
        raise RuntimeError(
            "torch.jit.trace records hashed attention for inference only: trace under torch.no_grad(), "
            "or use torch.export"
        )
    smooth = (x if reach is None else scaled(x) / reach).clamp(-1, 1)
    # (smooth - smooth) is zero, so the value stays exactly ±1 while the gradient is that of `smooth`.
    return codes + (smooth - smooth.detach())


def scaled(x: Tensor) -> Tensor:
    """x (..., b) over the root mean square of its last dimension, which counts as a constant.

    Zero where that overflows.
    """
    square = x.detach().square().mean(dim=-1, keepdim=True)
    return torch.where(square.isinf(), 0, x) * torch.where(square == 0, 1, square).rsqrt()


def unit_length(tokens: Tensor) -> Tensor:
    """Tokens of length one; a zero vector stays zero and passes its gradient on unscaled.

    A length whose square overflows gives NaN; the token would otherwise look like a zero vector.
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
    if isinstance(functions, Signs):
        return tokens
    unit = unit_length(tokens)
    if isinstance(functions, Hyperplanes):
        return unit @ functions.weight.to(tokens.dtype)
    support, mean, sigma, weight = (x.to(tokens.dtype) for x in functions)
    kernel = torch.exp(-squared_distances(unit, support) / (2 * sigma.view(-1, 1, 1)))
    return (kernel - mean.unsqueeze(-2)) @ weight


def codes(tokens: Tensor, functions: Functions) -> Tensor:
    """Codes (B, H, N, b) of ±1 in fp32, see `sign_ste`."""
    return sign_ste(project(tokens.float(), functions), 1.0 if isinstance(functions, Signs) else None)
