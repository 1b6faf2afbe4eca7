"""What is measured of a model: accuracy and loss on test data, and the cost of a sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.accounting import cost
from ecoformer.data.splits import Splits
from ecoformer.running import eval_mode
from ecoformer.training.building import example_of
from ecoformer.training.recipe import Recipe
from ecoformer.training.tasks import Task

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(precision: str, device: torch.device) -> Any:
    """Context in which a model computes in a recipe's precision; training and measuring share it."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALVES[precision])


@torch.no_grad()
def judge(
    model: nn.Module,
    task: Task,
    batches: Iterator[tuple[Tensor, Tensor]],
    device: torch.device,
) -> Tensor:
    """Right answers, loss and number of questions over all batches, (3,), in the precision of the recipe."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    with eval_mode(model), mixed_precision(task.recipe.precision, device):
        for inputs, targets in batches:
            x, y = task.test_batch(inputs, targets)
            total = total + task.judge(task.answer(model, x), y)
    return total


def figures(sums: Tensor) -> dict[str, float]:
    """Sums as an accuracy (0 to 1) and a mean loss."""
    right, loss, asked = sums.tolist()
    if not asked:
        raise ValueError("the test data ask for nothing: every target is ignored")
    return {"accuracy": right / asked, "loss": loss / asked}


def costs(model: nn.Module, recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Multiplications, additions and energy of one sample, as the paper counts and as executed."""
    example: Any = example_of(recipe, splits)
    if splits.kind == "pairs":
        example = {"first": example[:, 0], "second": example[:, 1]}
    found = {}
    for accounting in ("paper", "exact"):
        ledger = cost(model, example, accounting=accounting)
        found[accounting] = {"mul": ledger.total.mul, "add": ledger.total.add, "energy_pj": ledger.energy_pj}
        if ledger.uncounted:
            found[accounting]["uncounted"] = len(ledger.uncounted)
    return found


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters are numbers; of a sharded model, this process's share of them."""
    shares = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return all(bool(torch.isfinite(share).all()) for share in shares)
