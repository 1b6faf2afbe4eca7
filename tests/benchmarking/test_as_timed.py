"""Gradients of what is timed against those of a plain run."""

import pytest
import torch
from torch import nn

from ecoformer.benchmarking.as_timed import check_training


class Noisy(torch.autograd.Function):
    """The same numbers, with a gradient that is off by something else in every call, or by a factor."""

    @staticmethod
    def forward(ctx, x, noise, factor):
        ctx.noise, ctx.factor = noise, factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad + ctx.noise * grad.norm() * torch.randn_like(grad), None, None


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("noise", "factor", "right"), [(0.0, 1.0, True), (0.5, 1.0, True), (0.0, 2.0, False), (0.001, 2.0, False)]
)
def test_what_plain_runs_differ_by_is_no_error(noise, factor, right, half):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    check = check_training(
        lambda: Noisy.apply(model(x), noise, factor), lambda: Noisy.apply(model(x), noise, 1.0), model, half
    )
    assert check.passed == right
    assert all(parameter.grad is None for parameter in model.parameters())
