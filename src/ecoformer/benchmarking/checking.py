"""Compare results with better ones, so that nothing wrong is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ecoformer.benchmarking.results import Check

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Largest relative error of an output; gradients may have three times as much."""
_MARGIN = 1e-4
"""Tokens whose projections are closer than this to a threshold are drawn again: rounding decides there."""
_OUTPUTS = {False: 1e-2, True: 1e-1}
"""Bounds for a model's outputs in fp32 and in half precision, including codes that rounding flips."""
_GRADIENTS = {False: 5e-2, True: 2.5e-1}
"""Bounds for the gradient of a parameter: rounding also decides where the gradient of the sign vanishes."""
_SMALLEST = 1e-3
"""Gradients smaller than this share of the total are judged as if they had this size."""
_NOISE, _ROUNDING = 4.0, 2.0
"""How often the difference of two plain runs is allowed, because SDPA's backward adds in another order every
time; and how often what half precision changes: for an N x N matrix that is most of a gradient."""

Forward = Callable[[], Tensor]


def bound_of(dtype: torch.dtype, backward: bool, tokens: int = 0) -> float:
    """Largest relative error. Beyond 1024 tokens it grows with the root of their number, as long sums do."""
    return BOUNDS[dtype] * (3 if backward else 1) * math.sqrt(max(tokens, 1024) / 1024)


def relative_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The largest |result - truth| / |truth| of the pairs; NaN if any is. A truth of zero counts as one."""
    errors = [0.0]
    for result, truth in zip(results, truths, strict=True):
        if result.shape != truth.shape:
            return math.nan
        difference = float(torch.linalg.vector_norm(result.to(truth.dtype) - truth, dtype=torch.float64))
        size = float(torch.linalg.vector_norm(truth, dtype=torch.float64))
        root = math.sqrt(truth.numel())
        errors.append(difference / (size if size > 1e-6 * root else root))
    return float(torch.tensor(errors, dtype=torch.float64).max())


def median_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The median over all tokens, for mechanisms that sort by hashes: ties move single tokens."""
    errors = []
    for result, truth in zip(results, truths, strict=True):
        difference = (result.to(truth.dtype) - truth).norm(dim=-1)
        errors.append(float((difference / truth.norm(dim=-1).clamp_min(1e-12)).median()))
    return max(errors)


def finite(out: Tensor) -> Check:
    """Check that all numbers are finite, where there is nothing to compare with."""
    return Check(float((~out.isfinite()).float().mean()), 0.0, "finite numbers")


@torch.no_grad()
def steady_tokens(
    draw: Callable[[], Tensor], projections: Sequence[Callable[[Tensor], Tensor]], backward: bool
) -> Tensor:
    """Tokens (B, H, N, D) whose codes do not depend on rounding: the others are drawn again.

    Args:
        draw: makes tokens.
        projections: tokens in fp32 to what the signs are taken of.
        backward: also avoid ±1, where the straight-through gradient stops.
    """
    tokens = draw()
    for _ in range(100):
        unsteady = torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
        for project in projections:
            size = project(tokens.float()).abs()
            close = size < _MARGIN
            if backward:
                close |= (size - 1).abs() < _MARGIN
            unsteady |= close.any(dim=-1)
        if not unsteady.any():
            return tokens
        tokens[unsteady] = draw()[unsteady]
    return tokens


def check_inference(timed: Forward, plain_on_first: Forward, half: bool) -> Check:
    """Compare the first sample's output with a plain run of the model on that sample."""
    with torch.inference_mode():
        found, truth = timed()[:1].float(), plain_on_first().float()
    return Check(relative_error([found], [truth]), _OUTPUTS[half], "a plain run of the first sample")


def check_training(
    timed: Forward, plain: Forward, model: nn.Module, precise: Forward | None = None
) -> Check | None:
    """Compare gradients of the loss that is timed; None for a model that draws random numbers.

    Args:
        timed: what is timed.
        plain: the same model in plain PyTorch.
        model: whose gradients are compared.
        precise: `plain` in fp32, where that is in half precision.
    """
    half = precise is not None
    with torch.no_grad():
        once, again = (plain().float() for _ in range(2))
    if not relative_error([again], [once]) <= _OUTPUTS[half]:
        return None
    found, truth, repeated = (_gradients(forward, model) for forward in (timed, plain, plain))
    allowed = _NOISE * _distances(repeated, truth)
    if precise is not None:
        try:
            allowed += _ROUNDING * _distances(_gradients(precise, model), truth)
        except torch.OutOfMemoryError:  # then the check is stricter
            model.zero_grad(set_to_none=True)
    sizes = torch.stack([x.double().norm() for x in truth])
    beyond = (_distances(found, truth) - allowed).clamp_min(0.0)
    worst = (beyond / sizes.clamp_min(_SMALLEST * float(sizes.norm()) + 1e-12)).max()
    return Check(float(worst), _GRADIENTS[half], "gradients of a plain run")


def loss_of(out: Tensor) -> Tensor:
    """The loss of a timed training step."""
    return out.float().square().mean()


def _gradients(forward: Forward, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(forward()).backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _distances(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.double() - y.double()).norm() for x, y in zip(some, others, strict=True)])
