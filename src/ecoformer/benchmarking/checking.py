"""No time for a wrong result: how results are held against better ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ecoformer import reference
from ecoformer.attention import HashedAttention
from ecoformer.functional import sign_ste
from ecoformer.hashing import Hasher, KernelHasher

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Largest relative error of an output; gradients may have three times as much."""
_MARGIN = 1e-4
"""Tokens whose projections come closer than this to a threshold are drawn anew: rounding decides there."""


def bound_of(dtype: torch.dtype, backward: bool, tokens: int = 0) -> float:
    """Largest relative error. Beyond 1024 tokens it grows as errors of long sums do, with their root."""
    return BOUNDS[dtype] * (3 if backward else 1) * math.sqrt(max(tokens, 1024) / 1024)


def relative_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The largest |result - truth| / |truth| of the pairs; NaN if any is. A truth of zero counts as one."""
    errors = []
    for result, truth in zip(results, truths, strict=True):
        if result.shape != truth.shape:
            return math.nan
        difference = _norm(result.to(truth.dtype) - truth)
        size, root = _norm(truth), math.sqrt(truth.numel())
        errors.append(difference / (size if size > 1e-6 * root else root))
    return float(torch.tensor(errors, dtype=torch.float64).max())


def median_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The median over all tokens: for mechanisms that sort by hashes, where ties move single tokens."""
    errors = []
    for result, truth in zip(results, truths, strict=True):
        difference = (result.to(truth.dtype) - truth).norm(dim=-1)
        errors.append(float((difference / truth.norm(dim=-1).clamp_min(1e-12)).median()))
    return max(errors)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def hashed_truth(
    layer: HashedAttention,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    *,
    doubted: bool = False,
) -> Call:
    """Hashed attention of the paper, dense and in fp64, with the sign's stand-in for its gradient.

    `doubted` turns every other of the bits round that fp32 might get wrong, which shows how much rounding
    may change; if all were turned, products of codes would stay as they are.
    """
    hasher = layer.hasher
    mask = None if key_padding_mask is None else key_padding_mask[:, None]

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = _projections(hasher, q.double())
        if doubted:
            error = (y - hasher.project(q.float(), None)).abs().amax(dim=-2, keepdim=True)
            doubt = y.abs() < 4 * error + 1e-6
            y = torch.where(doubt & (doubt.cumsum(dim=-2) % 2 == 1), -y, y)
        codes = sign_ste(y, hasher.surrogate, hasher.sign_of_zero)
        return reference.hash_attention(codes, codes, v.double(), mask, is_causal, layer.bias)

    return truth


def _projections(hasher: Hasher, tokens: Tensor) -> Tensor:
    if not isinstance(hasher, KernelHasher) or hasher.sigma_from != "stored":
        return hasher.project(tokens, None)
    support, sigma = hasher.support_samples.double(), hasher.sigma.double().view(-1, 1, 1)
    kernel = reference.rbf_kernel(reference.unit(tokens), support, sigma)
    return (kernel - hasher.mean.double().unsqueeze(-2)) @ hasher.weight.double()


@torch.no_grad()
def steady_tokens(draw: Callable[[], Tensor], hashers: Sequence[Hasher], backward: bool) -> Tensor:
    """Tokens (B, H, N, D) whose codes do not hang on rounding, by drawing the others again."""
    tokens = draw()
    for _ in range(100):
        unsteady = torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
        for hasher in hashers:
            size = hasher.project(tokens.float(), None).abs()
            close = size < _MARGIN
            if backward:  # where the stand-in's gradient stops
                close |= (size - 1).abs() < _MARGIN
            unsteady |= close.any(dim=-1)
        if not unsteady.any():
            return tokens
        tokens = torch.where(unsteady.unsqueeze(-1), draw(), tokens)
    return tokens
