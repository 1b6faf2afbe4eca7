"""The exact accounting: everything that a model executes, memory traffic included, module by module.

The model runs on meta tensors. Every operator is counted under the innermost module that is running, so
residual sums and everything else that no module stands for are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ecoformer.accounting.conventions import attention_counts, cost_of, name_of, read, written
from ecoformer.accounting.cpu_kernels import CpuKernels, as_if_fitted
from ecoformer.accounting.layers import Part, Parts, kind_of
from ecoformer.backends import eager
from ecoformer.hashing import hashers_of
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
        kernels: counts hashed layers as the CPU kernels execute them. Default: as eager PyTorch does.

    Returns:
        The rows, and "name (operator)" for every executed operator that has no rule.
    """
    counting = Counting()
    modules = dict(model.named_modules())
    # Kernels come before our own hooks: they refuse layers with hooks.
    replaced = nullcontext() if kernels is None else kernels.replace(model, counting.add)
    fitted = as_if_fitted(hashers_of(model).values())
    with fitted, eval_mode(model), replaced, _attributed(modules, counting), counting:
        run_on_meta(model, example)
    parts = Parts(model)
    rows = [
        (name, kind_of(modules[name]), parts.of(name), counts)
        for name, counts in counting.counts.items()
        if counts != Counts()
    ]
    return rows, list(dict.fromkeys(f"{name} ({operator})" for name, operator in counting.uncounted))


@contextmanager
def _attributed(modules: Mapping[str, nn.Module], counting: Counting) -> Iterator[None]:
    """Count operators under the module that is running."""
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


def executed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Counts, tuple[str, ...]]:
    """Run a function or a module without gradients and count what it executes, also on meta tensors.

    Returns:
        The counts by the conventions of `conventions.py`, and executed operators that have no rule there.
    """
    with torch.no_grad(), Counting("") as counting:
        function(*args, **kwargs)
    return counting.total, tuple(dict.fromkeys(name for _, name in counting.uncounted))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which every operator that PyTorch executes is counted under the current name.

    Our registered operators count as the plain PyTorch that they wrap, whatever backend they would run on.
    Fused attention counts as one operator whichever kernel PyTorch picks, and its result has the memory
    layout of the fused kernels; so has a convolution's on meta tensors. `nn.MultiheadAttention`'s fast path
    is off: a mode cannot look into it.

    Args:
        name: where to count; None counts nothing until a name is entered.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, Counts] = {}
        """Counts by name, in the order in which names were first entered."""
        self.uncounted: list[tuple[str, str]] = []
        """(name, operator) for every call of an operator without a rule."""
        self._names: list[str] = []
        self._paused = False
        self._depth = 0
        self._around = ExitStack()
        if name is not None:
            self.enter(name)

    @property
    def total(self) -> Counts:
        """All names together."""
        return sum(self.counts.values(), Counts())

    def enter(self, name: str) -> None:
        """Count under this name from now on."""
        self._names.append(name)
        self.counts.setdefault(name, Counts())

    def leave(self) -> None:
        """Return to the previous name."""
        self._names.pop()

    def __enter__(self) -> Counting:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._depth:
            self._around.enter_context(_SeeAttention(self))
            self._around.enter_context(without_fast_path())
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._around.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one operator, or its parts."""
        kwargs = kwargs or {}
        if self._paused or not self._names:
            return func(*args, **kwargs)
        if func.namespace == "ecoformer":
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
                self.uncounted.append((self._names[-1], name_of(func)))
            else:
                self.add(counts)
        return _laid_out(out, *args[:2]) if func is torch.ops.aten.convolution.default else out

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Fused attention: counted here, then run without counting."""
        with self._pause():
            out = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
            if out.ndim == 4:
                out = out.transpose(1, 2).contiguous().transpose(1, 2)
        mask = args[0] if args else kwargs.get("attn_mask")
        counts = attention_counts(query, key, value, mask)
        self.add(counts + Counts(bytes=read([query, key, value, mask]) + written(out)))
        return out

    def add(self, counts: Counts) -> None:
        """Count these under the current name."""
        self.counts[self._names[-1]] += counts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Keep counting inside an operator, where fused attention arrives as an operator too."""
        with torch._C.DisableTorchFunction(), self:
            yield

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class _SeeAttention(TorchFunctionMode):
    """Intercepts fused attention where it is called, before PyTorch has chosen a kernel."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counting = self._counting
        if func is F.scaled_dot_product_attention and counting._names and not counting._paused:
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
