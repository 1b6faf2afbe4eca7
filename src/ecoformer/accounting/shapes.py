"""What shapes flow through a model: it runs on meta tensors, so that nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.attention import Attention
from ecoformer.running import eval_mode, run_on_meta

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A module was called with a tensor of this shape and gave one of that shape."""

    name: str
    module: nn.Module
    inputs: Shape
    output: Shape


@torch.no_grad()
def trace(model: nn.Module, example: Any) -> list[Call]:
    """Every call of a module while the model runs on `example`, a shape, a tensor or keyword arguments.

    The model is left as it was: its weights stay where they are, and its modes are restored.
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        inputs, output = _first((*args, *kwargs.values())), _first(out)
        if inputs is not None and output is not None:
            calls.append(Call(names[module], module, tuple(inputs.shape), tuple(output.shape)))

    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in names]
    mechanisms = [module for module in names if isinstance(module, Attention)]
    try:
        for layer in mechanisms:  # shapes do not hang on how a mechanism attends, nor on whether it is fitted
            layer.__dict__["attend"] = _values
        with eval_mode(model):
            run_on_meta(model, example)
    finally:
        for layer in mechanisms:
            layer.__dict__.pop("attend", None)
        for handle in hooks:
            handle.remove()
    return calls


def _values(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v


def _first(value: Any) -> Tensor | None:
    """The first tensor in what a module takes or gives."""
    if isinstance(value, Tensor):
        return value
    values = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    return next((v for v in values if isinstance(v, Tensor)), None)
