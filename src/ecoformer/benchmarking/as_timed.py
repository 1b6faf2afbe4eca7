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
_LEAST = 1e-2
"""Gradients smaller than this share of all are judged as if they had this size."""
_NOISE = 4.0
"""How often what two plain runs differ by is no error: SDPA's backward adds in another order every time."""

Forward = Callable[[], Tensor]


def check_inference(timed: Forward, plain_on_first: Forward, half: bool) -> Check:
    """Outputs of the first sample."""
    with torch.inference_mode():
        found, truth = timed()[:1].float(), plain_on_first().float()
    return Check(relative_error([found], [truth]), _OUTPUTS[half], "a plain run of the first sample")


def check_training(timed: Forward, plain: Forward, model: nn.Module, half: bool) -> Check | None:
    """Gradients of the loss that is timed; None for a model that draws random numbers."""
    with torch.no_grad():
        once, again = (plain().float() for _ in range(2))
    if not relative_error([again], [once]) <= _OUTPUTS[half]:
        return None
    found, truth, repeated = (_gradients(forward, model) for forward in (timed, plain, plain))
    return Check(_worst(found, truth, repeated), _GRADIENTS[half], "gradients of a plain run")


def loss_of(out: Tensor) -> Tensor:
    """The loss of a timed step."""
    return out.float().square().mean()


def _gradients(forward: Forward, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(forward()).backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _worst(found: Sequence[Tensor], truth: Sequence[Tensor], repeated: Sequence[Tensor]) -> float:
    """The largest relative error of a gradient beyond what the truth itself differs by; NaN if any is."""
    sizes = torch.stack([x.double().norm() for x in truth])
    errors, noise = (_distances(x, truth) for x in (found, repeated))
    beyond = (errors - _NOISE * noise).clamp_min(0.0)
    return float((beyond / sizes.clamp_min(_LEAST * float(sizes.norm()) + 1e-12)).max())


def _distances(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.double() - y.double()).norm() for x, y in zip(some, others, strict=True)])
