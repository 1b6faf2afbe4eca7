"""Kernelised hash functions as one operator: tokens to numbers whose signs are codes, or to packed codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.ops import eager
from ecoformer.ops.hash_attention import as_heads, heads_of, kernels_for, wants_gradient


def hash_tokens(
    x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, *, packed: bool = False
) -> Tensor:
    """y = (exp(-|x - s|^2 / (2 sigma)) - mean) A for tokens x of unit length; a zero token stays zero.

    Args:
        x: (B, H, N, D) tokens.
        support: (H, m, D) support samples s.
        mean: (H, m).
        sigma: (H,) kernel widths.
        weight: (H, m, b) A. It and the tokens get gradients.
        packed: return packed codes (B, H, N), if b <= 64 and no gradient is wanted.

    Returns:
        (B, H, N, b) in fp32 (fp64 for fp64), or packed codes.
    """
    if wants_gradient(x, weight):
        return _HashTokens.apply(x, support, mean, sigma, weight)
    return torch.ops.ecoformer.hash_tokens(x, support, mean, sigma, weight, packed and weight.shape[2] <= 64)


class _HashTokens(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor) -> Any:
        return torch.ops.ecoformer.hash_tokens(x, support, mean, sigma, weight, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dx, dweight = torch.ops.ecoformer.hash_tokens_backward(grad, *ctx.saved_tensors)
        return dx, None, None, None, dweight if ctx.needs_input_grad[4] else None


_library = torch.library.Library("ecoformer", "FRAGMENT")
_GIVEN = "Tensor x, Tensor support, Tensor mean, Tensor sigma, Tensor weight"
_library.define(f"hash_tokens({_GIVEN}, bool packed) -> Tensor")
_library.define(f"hash_tokens_backward(Tensor grad, {_GIVEN}) -> (Tensor, Tensor)")


@torch.library.impl(_library, "hash_tokens", "CompositeExplicitAutograd")
def _forward(x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool) -> Tensor:
    with eager.full_precision(x.device):
        found: Tensor = kernels_for(x, weight.shape[2], "hash_forward")(
            x, support, mean, sigma, weight, packed
        )
    return found


@torch.library.impl(_library, "hash_tokens_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    with eager.full_precision(x.device):
        found: tuple[Tensor, Tensor] = kernels_for(x, given[3].shape[2], "hash_backward")(grad, x, *given)
    return found


@torch.library.register_fake("ecoformer::hash_tokens")
def _(x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool) -> Tensor:
    if packed:
        return x.new_empty(x.shape[:3], dtype=torch.int64)
    return x.new_empty(*x.shape[:3], weight.shape[2], dtype=eager.accumulator(x.dtype))


@torch.library.register_fake("ecoformer::hash_tokens_backward")
def _(
    grad: Tensor, x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


@torch.library.register_vmap("ecoformer::hash_tokens")
def _(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
    found = torch.ops.ecoformer.hash_tokens(
        *as_heads(info.batch_size, dims, given, heads_of(given[0], dims[0]), {1, 2, 3, 4})
    )
    return found.unflatten(1, (info.batch_size, -1)), 1


@torch.library.register_vmap("ecoformer::hash_tokens_backward")
def _(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
    dx, dweight = torch.ops.ecoformer.hash_tokens_backward(
        *as_heads(info.batch_size, dims, given, heads_of(given[0], dims[0]), {2, 3, 4, 5})
    )
    return (dx.unflatten(1, (info.batch_size, -1)), dweight.unflatten(0, (info.batch_size, -1))), (1, 0)
