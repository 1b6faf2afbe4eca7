"""Running a model that belongs to somebody else: in eval mode, on shapes alone, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and each in its own again afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def without_fast_path() -> Iterator[None]:
    """PyTorch's encoder layers call their submodules, in the place of one operator that passes by them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run_on_meta(model: nn.Module, example: Any) -> None:
    """Run `model` on shapes alone; its weights stay where they are.

    `example` is the input's shape, an input, or keyword arguments. Weights keep `requires_grad`, which
    decides over some of PyTorch's copies.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {name: x.to("meta").requires_grad_(x.requires_grad) for name, x in tensors}
    if isinstance(example, Mapping):
        torch.func.functional_call(model, state, (), {key: _meta(x) for key, x in example.items()})
        return
    if isinstance(example, Sequence) and all(isinstance(size, int) for size in example):
        dtype = next((x.dtype for x in state.values() if x.is_floating_point()), torch.float32)
        example = torch.empty(tuple(example), dtype=dtype, device="meta")
    torch.func.functional_call(model, state, (_meta(example),))


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
