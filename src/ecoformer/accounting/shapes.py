"""The shapes that flow through a model, found by running it on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ecoformer.attention import Attention
from ecoformer.running import eval_mode, run_on_meta, without_fast_path

Shape = tuple[int, ...]

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "convolution"}
_PRODUCTS |= {"_int_mm", "integer_conv2d"}
_ATTENTION = "scaled_dot_product"
_SUMS_AND_COPIES = {"add", "add_", "sub", "rsub", "cat", "stack", "clone", "copy_", "_to_copy", "repeat"}
_SUMS_AND_COPIES |= {"where", "masked_fill", "index", "index_select", "gather", "embedding"}
"""Uses of a parameter that are free: the paper does not count sums outside of layers."""


@dataclass(frozen=True)
class Call:
    """One call of a module: the shapes of its first input tensor and of its first output tensor.

    `given` and `named` are all arguments, with shapes in place of tensors. `works` are operators executed by
    the module itself, outside of its submodules, that multiply matrices or its own parameters.
    """

    name: str
    module: nn.Module
    inputs: Shape
    output: Shape
    given: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    works: tuple[str, ...] = ()

    def argument(self, name: str) -> Any:
        """An argument by its name in the module's `forward`; None if it was not passed."""
        bound = signature(type(self.module).forward).bind(self.module, *self.given, **self.named)
        return bound.arguments.get(name)


@torch.no_grad()
def trace(model: nn.Module, example: Any) -> list[Call]:
    """Every call of a module while the model runs on `example`, a shape, a tensor or keyword arguments.

    Calls come in the order in which they end. Weights stay where they are, and modes are restored.
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}
    watch = _Watch()

    def before(module: nn.Module, args: Any) -> None:
        watch.enter(module)

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        inputs, output = _first((*args, *kwargs.values())), _first(out)
        given = {"given": _shapes(args), "named": _shapes(kwargs), "works": watch.leave()}
        calls.append(Call(names[module], module, _shape(inputs), _shape(output), **given))

    with ExitStack() as around:
        for module in names:
            around.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            around.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        for manager in (_values_pass(names), eval_mode(model), without_fast_path(), watch):
            around.enter_context(manager)
        run_on_meta(model, example)
    return calls


@contextmanager
def _values_pass(modules: Mapping[nn.Module, str]) -> Iterator[None]:
    """Mechanisms return their values: shapes do not depend on how they attend or on what they learned."""
    mechanisms = [module for module in modules if isinstance(module, Attention)]
    try:
        for layer in mechanisms:
            layer.__dict__["attend"] = _values
        yield
    finally:
        for layer in mechanisms:
            layer.__dict__.pop("attend", None)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which multiplying operators each module executes itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running: list[tuple[set[int], dict[str, None]]] = []

    def enter(self, module: nn.Module) -> None:
        own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
        self._running.append((own, {}))

    def leave(self) -> tuple[str, ...]:
        return tuple(self._running.pop()[1])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and not func.is_view:
            own, works = self._running[-1]
            name = func._opname
            if name in _PRODUCTS or _ATTENTION in name or (own and _takes(own, name, args)):
                works[name] = None
        return func(*args, **(kwargs or {}))


def _takes(own: set[int], operator: str, args: Any) -> bool:
    """Whether an argument is one of these parameters, or a view of one."""
    if operator in _SUMS_AND_COPIES:
        return False
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return any(id(x) in own or (x._base is not None and id(x._base) in own) for x in tensors)


def _values(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return v


def _shape(tensor: Tensor | None) -> Shape:
    return () if tensor is None else tuple(tensor.shape)


def _shapes(arguments: Any) -> Any:
    return tree_map_only(Tensor, _shape, arguments)


def _first(value: Any) -> Tensor | None:
    """The first tensor in the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        return value
    values = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    return next((v for v in values if isinstance(v, Tensor)), None)
