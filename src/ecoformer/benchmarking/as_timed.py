"""What is about to be timed, held against a plain run of that model: precision, compilation, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ecoformer.benchmarking.checking import relative_error
from ecoformer.benchmarking.results import Check

_OUTPUTS = {False: 1e-2, True: 1e-1}
"""Largest relative error of outputs, in fp32 and in half precision: codes that hang on rounding are in it."""
_GRADIENTS = {False: 5e-2, True: 2.5e-1}
"""The same of a parameter's gradient, where rounding also decides where the sign's stand-in is flat."""
_LEAST = 1e-3
"""Gradients smaller than this share of all are judged as if they had this size."""
_NOISE, _ROUNDING = 4.0, 2.0
"""How often what two plain runs differ by is no error: SDPA's backward adds in another order every time. And
how often what half precision takes from a plain run: of an N x N matrix that is most of a gradient."""

Forward = Callable[[], Tensor]


def check_inference(timed: Forward, plain_on_first: Forward, half: bool) -> Check:
    """Outputs of the first sample."""
    with torch.inference_mode():
        found, truth = timed()[:1].float(), plain_on_first().float()
    return Check(relative_error([found], [truth]), _OUTPUTS[half], "a plain run of the first sample")


def check_training(
    timed: Forward, plain: Forward, model: nn.Module, precise: Forward | None = None
) -> Check | None:
    """Gradients of the loss that is timed; None for a model that draws random numbers.

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
        except torch.OutOfMemoryError:  # the check is the stricter one then
            model.zero_grad(set_to_none=True)
    return Check(_worst(found, truth, allowed), _GRADIENTS[half], "gradients of a plain run")


def loss_of(out: Tensor) -> Tensor:
    """The loss of a timed step."""
    return out.float().square().mean()


def _gradients(forward: Forward, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(forward()).backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _worst(found: Sequence[Tensor], truth: Sequence[Tensor], allowed: Tensor) -> float:
    """The largest relative error of a gradient beyond what the truth itself may be off; NaN if any is."""
    sizes = torch.stack([x.double().norm() for x in truth])
    beyond = (_distances(found, truth) - allowed).clamp_min(0.0)
    return float((beyond / sizes.clamp_min(_LEAST * float(sizes.norm()) + 1e-12)).max())


def _distances(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.double() - y.double()).norm() for x, y in zip(some, others, strict=True)])
