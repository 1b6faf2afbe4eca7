"""The exact accounting: everything that a model executes, memory traffic included, module by module.

The model runs on meta tensors while every operator is counted under the innermost module that is running, so
that sums of residual branches and whatever else no module stands for are found as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.cpu_kernels import CpuKernels
from ecoformer.accounting.executed import Counting
from ecoformer.accounting.parts import Parts
from ecoformer.accounting.unfitted import taken_for_fitted
from ecoformer.attention import Attention
from ecoformer.hashing import hashers_of
from ecoformer.running import eval_mode, run_on_meta

Row = tuple[str, str, Any, Counts]


@torch.no_grad()
def exact_rows(
    model: nn.Module, example: Any, kernels: CpuKernels | None = None
) -> tuple[list[Row], list[str]]:
    """(name, kind, part, counts) of every module that executes anything, and what could not be counted.

    A module's counts are of what it executes itself, outside of its submodules: all rows together are the
    whole model. Modules come in the order in which they are first called; the model itself is named "". The
    model runs in eval mode and is left as it was; its hashers need not be fitted.

    Args:
        model: any module.
        example: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.
        kernels: hashed layers count as these execute them; None counts all as eager PyTorch does.

    Returns:
        The rows, and "name (operator)" for every operator that was executed but is not known.
    """
    counting = Counting()
    modules = dict(model.named_modules())
    # Kernels stand in before our own hooks are there: layers with hooks are not for them.
    stand_in = nullcontext() if kernels is None else kernels.standing_in(model, counting)
    with _as_in_inference(model), stand_in, _attributed(modules, counting), counting:
        run_on_meta(model, example)
    parts = Parts(model)
    rows = [
        (name, kind_of(modules[name]), parts.of(name), counts)
        for name, counts in counting.counts.items()
        if counts != Counts()
    ]
    return rows, list(dict.fromkeys(f"{name} ({operator})" for name, operator in counting.uncounted))


def kind_of(module: nn.Module) -> str:
    """The mechanism's name, or the class of any other module."""
    return module.name if isinstance(module, Attention) else type(module).__name__


@contextmanager
def _attributed(modules: Mapping[str, nn.Module], counting: Counting) -> Iterator[None]:
    """Operators are counted under the module that is running."""
    names = {module: name for name, module in modules.items()}

    def before(module: nn.Module, args: Any) -> None:
        counting.enter(names[module])

    def after(module: nn.Module, args: Any, out: Any) -> None:
        counting.leave()

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def _as_in_inference(model: nn.Module) -> Iterator[None]:
    """Eval mode, and hashers that pass for fitted."""
    with taken_for_fitted(hashers_of(model).values()), eval_mode(model):
        yield
