"""The exact accounting: everything that a model executes, memory traffic included, module by module.

The model runs on meta tensors. Every operator is counted under the innermost module that is running, so
residual sums and everything else that no module stands for are included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ecoformer.accounting.conventions import (
    INTEGER_PRODUCTS,
    RULES,
    attention_counts,
    cost_of,
    moved_by_kernels,
    name_of,
    read,
    tensors,
    width_of,
    written,
)
from ecoformer.accounting.cpu_kernels import CpuKernels
from ecoformer.accounting.layers import Part, Parts
from ecoformer.backends import eager
from ecoformer.conversion.layers import kind_of
from ecoformer.operations import Counts
from ecoformer.running import eval_mode, run_on_meta, without_fast_path

Row = tuple[str, str, Part, Counts]


@torch.no_grad()
def exact_rows(
    model: nn.Module, example: Any, kernels: CpuKernels | None = None
) -> tuple[list[Row], list[str]]:
    """(name, kind, part, counts) of every module that executes anything, and what could not be counted.

    A row counts what a module executes itself, outside of its submodules, so all rows together are the entire
    model. Modules come in the order in which they are first called; the model itself is named "". The model
    runs in eval mode and is left as it was; its hashers need not be fitted.

    Args:
        model: any module.
        example: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.
        kernels: counts hashed layers as the CPU kernels execute them, and integer layers as fused kernels do.
            Default: as eager PyTorch does.

    Returns:
        The rows, and "name (operator)" for every executed operator that has no rule.
    """
    modules = dict(model.named_modules())
    with ExitStack() as around:
        counting = around.enter_context(count_operators(fused=kernels is not None))
        around.enter_context(eval_mode(model))
        if kernels is not None:  # before our own hooks: kernels refuse layers with hooks
            around.enter_context(kernels.replace(model, counting.add))
        for name, module in modules.items():
            enter = partial(counting.enter, name)
            around.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            around.callback(module.register_forward_hook(counting.leave, always_call=True).remove)
        run_on_meta(model, example)
    parts = Parts(model)
    rows = [
        (name, kind_of(modules[name]), parts.of(name), counts)
        for name, counts in counting.counts.items()
        if counts != Counts()
    ]
    return rows, list(dict.fromkeys(f"{name} ({operator})" for name, operator in counting.uncounted))


@contextmanager
def count_operators(fused: bool = False) -> Iterator[Counting]:
    """Count every operator that PyTorch executes inside the block.

    Our registered operators count as the plain PyTorch that they wrap, whatever backend they would run on;
    those of integers have rules.
    Fused attention counts as one operator whichever kernel PyTorch picks, and its result has the memory
    layout of the fused kernels; so has a convolution's on meta tensors. `nn.MultiheadAttention`'s fast path
    is off: a mode cannot look into it.

    With `fused`, a module that multiplies int8 numbers itself counts as the kernels of a runtime do it: of
    its steps, only int8 numbers and codes reach memory, besides its input and output.
    """
    counting = Counting(fused)
    with counting, _SeeAttention(counting), without_fast_path():
        yield counting


@dataclass
class _Running:
    """A module that is running, and the bytes that its single steps move and fused kernels would not."""

    name: str
    spared: int = 0
    integer: bool = False
    """Whether it multiplies int8 numbers."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators under the name of the running module, and nothing outside of modules."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, Counts] = {}
        """Counts by name, in the order in which modules are first called."""
        self.uncounted: list[tuple[str, str]] = []
        """(name, operator) for every call of an operator without a rule."""
        self._fused = fused
        self._running: list[_Running] = []
        self._paused = False

    def enter(self, name: str, *_: Any) -> None:
        """Count under this name from now on."""
        self._running.append(_Running(name))
        self.counts.setdefault(name, Counts())

    def leave(self, *call: Any) -> None:
        """Return to the previous name; `call` is the module, its arguments and its result."""
        running = self._running[-1]
        if self._fused and running.integer:
            _, args, out = call
            self.add(Counts(bytes=read(args) + written(*tensors(out)) - running.spared))
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one operator, or its parts."""
        kwargs = kwargs or {}
        if self._paused or not self._running:
            return func(*args, **kwargs)
        if func.namespace == "ecoformer" and name_of(func) not in RULES:
            with self._inside():
                return getattr(eager, func._opname)(*args, **kwargs)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            return self.attention(*args, **kwargs)
        if _is_composite(func):
            with self._inside():
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not func.is_view:
            counts = cost_of(func, args, kwargs, out)
            if counts is None:
                self.uncounted.append((self._running[-1].name, name_of(func)))
            else:
                self.add(counts)
                running = self._running[-1]
                running.integer |= name_of(func) in INTEGER_PRODUCTS
                running.spared += counts.bytes - moved_by_kernels(func, (*args, *kwargs.values()), out)
        return _laid_out(out, *args[:2]) if func is torch.ops.aten.convolution.default else out

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Fused attention: counted here, then run without counting."""
        self._paused = True
        try:
            out = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
            if out.ndim == 4:
                out = out.transpose(1, 2).contiguous().transpose(1, 2)
        finally:
            self._paused = False
        mask = args[0] if args else kwargs.get("attn_mask")
        counts = attention_counts(query, key, value, mask).of(width_of(query))
        self.add(counts + Counts(bytes=read([query, key, value, mask]) + written(out)))
        return out

    def add(self, counts: Counts) -> None:
        """Count these under the current name."""
        self.counts[self._running[-1].name] += counts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Keep counting inside an operator, where fused attention arrives as an operator too."""
        with torch._C.DisableTorchFunction(), self:
            yield


class _SeeAttention(TorchFunctionMode):
    """Intercepts fused attention where it is called, before PyTorch has chosen a kernel."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counting = self._counting
        if func is F.scaled_dot_product_attention and counting._running and not counting._paused:
            return counting.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _laid_out(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A convolution's result in the layout of real devices, on which later copies depend."""
    if not out.is_meta:
        return out
    channels_last = suggest_memory_format(x) != torch.contiguous_format
    return out.contiguous(memory_format=suggest_memory_format(x if channels_last else weight))


@cache
def _is_composite(func: Any) -> bool:
    """Whether PyTorch composes this operator of others, on every device."""
    name = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name))
