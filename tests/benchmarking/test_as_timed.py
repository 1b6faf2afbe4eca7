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


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def forward(model, factor, noise=0.0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return lambda: Noisy.apply(model(x), noise, factor)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("noise", "factor", "right"), [(0.0, 1.0, True), (0.5, 1.0, True), (0.0, 2.0, False), (0.001, 2.0, False)]
)
def test_what_plain_runs_differ_by_is_no_error(model, noise, factor, right, half):
    precise = forward(model, 1.0) if half else None
    check = check_training(forward(model, factor, noise), forward(model, 1.0, noise), model, precise)
    assert check.passed == right
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("factor", "right"), [(1.5, True), (1.0, True), (0.5, True), (-0.5, False), (3.0, False)]
)
def test_what_is_nearer_to_the_truth_than_a_plain_run_is_right(model, factor, right):
    """As compiled code may be that keeps fp32 between operators."""
    check = check_training(forward(model, factor), forward(model, 1.5), model, forward(model, 1.0))
    assert check.passed == right
