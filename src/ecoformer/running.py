"""Run a user's model in eval mode or on shapes only, and leave it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """All modules in eval mode; each gets its own mode back afterwards."""
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
    """PyTorch's encoder layers call their submodules instead of one fused operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run_on_meta(model: nn.Module, example: Any) -> None:
    """Run `model` on shapes only; its weights stay where they are.

    `example` is the input's shape, an input, or keyword arguments. Optional masks that mask nothing are left
    out of these, because models read their values. Weights keep `requires_grad`, which decides about some of
    PyTorch's copies.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {name: x.to("meta").requires_grad_(x.requires_grad) for name, x in tensors}
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = {key: _meta(x) for key, x in example.items() if not _masks_nothing(model, key, x)}
    elif isinstance(example, Sequence) and all(isinstance(size, int) for size in example):
        dtype = next((x.dtype for x in state.values() if x.is_floating_point()), torch.float32)
        args = (torch.empty(tuple(example), dtype=dtype, device="meta"),)
    else:
        args = (_meta(example),)
    kept: list[tuple[Any, Any]] = [
        (each, dict(each)) for m in model.modules() for each in (m._parameters, m._buffers)
    ]
    try:
        torch.func.functional_call(model, state, args, kwargs)
    finally:
        for each, before in kept:  # functional_call loses weights of modules that are used twice
            each.update(before)


NOT_TAKEN = (RuntimeError, ValueError, TypeError, AssertionError, IndexError, AttributeError)
"""What models raise for an input that they cannot take."""


def not_taken(model: nn.Module, example: Any, error: BaseException) -> ValueError:
    """One line about an input that a model cannot take."""
    return ValueError(
        f"{type(model).__name__} cannot take an input of {_described(example)}: {one_line(error, 200)}; "
        "images are floats (1, 3, 224, 224), in a shell --resolution 224; texts are ids "
        "torch.zeros(1, 128, dtype=torch.long), in a shell --tokens 128, without a mask"
    )


def _described(example: Any) -> str:
    """Shapes, not values."""
    if isinstance(example, Tensor):
        return str(tuple(example.shape))
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{key}: {_described(x)}" for key, x in example.items()) + "}"
    return str(example)


def _masks_nothing(model: nn.Module, name: str, value: Any) -> bool:
    if not name.endswith("mask") or not isinstance(value, Tensor) or value.is_meta:
        return False
    known = inspect.signature(model.forward).parameters.get(name)
    return known is not None and known.default is None and bool((value == 1).all())


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
