"""The exact accounting: everything that a model computes, memory traffic included, module by module.

The model runs on meta tensors. Every operator is counted under the innermost module that is running, so
residual sums and everything else that no module stands for are included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ecoformer.accounting.layers import Part, Parts
from ecoformer.accounting.operators import (
    INTEGER_OPERATORS,
    cost_of,
    hashed_attention,
    name_of,
    read,
    softmax_attention,
    tensors,
    width_of,
    written,
)
from ecoformer.attention import HashedAttention
from ecoformer.conversion.layers import kind_of
from ecoformer.operations import Counts
from ecoformer.ops import eager
from ecoformer.ops.hash_attention import with_affinity
from ecoformer.quantization.layers import HasGrids
from ecoformer.running import eval_mode, run_on_meta, without_fast_path

Row = tuple[str, str, Part, Counts]
GROUP = 4
"""Bits of a group where an affinity has no groups: the paper's adds up bit by bit, so any cut will do."""


@torch.no_grad()
def exact_rows(model: nn.Module, example: Any) -> tuple[list[Row], list[str]]:
    """(name, kind, part, counts) of every module that computes anything, and what could not be counted.

    A row counts what a module computes itself, outside of its submodules, so all rows together are the entire
    model. Modules come in the order in which they are first called; the model itself is named "". The model
    runs in eval mode and is left as it was; its hashers need not be fitted.

    Args:
        model: any module.
        example: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.

    Returns:
        The rows, and "name (operator)" for every operator that is not one of PyTorch's or ours.
    """
    modules = dict(model.named_modules())
    with ExitStack() as around:
        counting = around.enter_context(count_operators())
        around.enter_context(eval_mode(model))
        for name, module in modules.items():
            enter, leave = partial(counting.enter, name), counting.leave
            around.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hook = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
            around.callback(hook.remove)
            if isinstance(module, HashedAttention) and _by_definition(module):
                module.__dict__["attend"] = partial(_attend, counting, module)
                around.callback(module.__dict__.pop, "attend")
        run_on_meta(model, example)
    parts = Parts(model)
    rows = [
        (name, kind_of(modules[name]), parts.of(name), counts)
        for name, counts in counting.counts.items()
        if counts != Counts()
    ]
    return rows, list(dict.fromkeys(f"{name} ({operator})" for name, operator in counting.uncounted))


def _plain(name: str, given: tuple[Any, ...]) -> Any:
    """One of our operators in plain PyTorch; packing codes costs nothing where signs are bits."""
    if name == "hash_attention":
        return eager.forward(*with_affinity(given, 3))
    x, support, mean, sigma, weight, _ = given
    return eager.hash_forward(x, support, mean, sigma, weight, packed=False)


def _by_definition(layer: HashedAttention) -> bool:
    """Whether heads attend as the operator does; what somebody has overridden is counted step by step."""
    return type(layer).attend is HashedAttention.attend and "attend" not in layer.__dict__


def _attend(
    counting: Counting,
    layer: HashedAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Hashed attention by its definition, in fp32; its hash functions are a module and run."""
    (batch, heads, queries, _), (keys, channels) = q.shape, v.shape[2:]
    bits = layer.hasher.bits
    size = bits // layer.groups if layer.groups else min(GROUP, bits)
    groups = -(-bits // size)
    with counting.one_operator():
        layer.hasher(k, key_padding_mask)
        if layer.separate:
            layer.hasher(q)
    how = {"weighted": key_weight is not None, "is_causal": is_causal}
    counts = hashed_attention(queries, keys, channels, groups, size, **how) * (batch * heads)
    out = v.new_empty(batch, queries, heads, channels).transpose(1, 2)
    operands = (q, k if layer.separate else None, v, key_padding_mask, key_weight, _state(layer.hasher))
    counting.add(counts + Counts(bytes=read(operands) + written(out)))
    return out


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextmanager
def count_operators() -> Iterator[Counting]:
    """Count every operator that PyTorch executes inside the block.

    Our registered operators count as the plain PyTorch that they wrap, whatever backend they would run on;
    those of whole numbers have formulas. Fused attention counts as one operator whichever kernel PyTorch
    picks, and its result has the memory layout of the fused kernels. `nn.MultiheadAttention`'s fast path is
    off: a mode cannot look into it.
    """
    counting = Counting()
    with counting, _SeeAttention(counting), without_fast_path():
        yield counting


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators under the name of the running module, and nothing outside of modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, Counts] = {}
        """Counts by name, in the order in which modules are first called."""
        self.uncounted: list[tuple[str, str]] = []
        """(name, operator) for every call of an operator that is not one of PyTorch's or ours."""
        self._running: list[str] = []
        self._inside_operator = 0
        self._paused = False

    def enter(self, name: str, module: nn.Module | None = None, *_: Any) -> None:
        """Count under this name from now on."""
        self._running.append(name)
        self.counts.setdefault(name, Counts())
        self._inside_operator += isinstance(module, HasGrids)

    def leave(self, module: nn.Module | None = None, *call: Any) -> None:
        """Return to the previous name; `call` is the module's arguments and its result."""
        if isinstance(module, HasGrids):
            self._inside_operator -= 1
            *arguments, out = call
            self.add(Counts(bytes=read([arguments, _state(module)]) + written(*tensors(out))))
        self._running.pop()

    @contextmanager
    def one_operator(self) -> Iterator[None]:
        """Inside, operators move no bytes: they are steps of one that keeps its numbers to itself."""
        self._inside_operator += 1
        try:
            yield
        finally:
            self._inside_operator -= 1

    def add(self, counts: Counts) -> None:
        """Count these under the current name."""
        if self._inside_operator:
            counts = counts + Counts(bytes=-counts.bytes)
        self.counts[self._running[-1]] += counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one operator, or its parts."""
        kwargs = kwargs or {}
        if self._paused or not self._running:
            return func(*args, **kwargs)
        if func.namespace == "ecoformer" and func._opname not in INTEGER_OPERATORS:
            with self._inside():
                return _plain(func._opname, args)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            return self.attention(*args, **kwargs)
        if _is_composite(func):
            with self._inside():
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not func.is_view:
            counts = cost_of(func, args, kwargs, out)
            if counts is None:
                self.uncounted.append((self._running[-1], name_of(func)))
            else:
                self.add(counts)
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
        moved = Counts(bytes=read([query, key, value, mask]) + written(out))
        self.add(softmax_attention(query, key, value).of(width_of(query)) + moved)
        return out

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
