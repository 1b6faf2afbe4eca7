"""What PyTorch really executes, counted operator by operator while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ecoformer.accounting.conventions import attention_counts, cost_of, name_of, read, written
from ecoformer.accounting.counts import Counts
from ecoformer.backends import Plain
from ecoformer.running import without_fast_path


def executed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Counts, tuple[str, ...]]:
    """Run a function or a module and count what it executes, as in inference: no gradients are prepared.

    Tensors on the meta device are counted alike, and then nothing is computed.

    Returns:
        The counts by the conventions of `conventions.py`, and the names of operators that were executed but
        are unknown there.
    """
    with torch.no_grad(), Counting("") as counting:
        function(*args, **kwargs)
    return counting.total, tuple(dict.fromkeys(name for _, name in counting.uncounted))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operator that PyTorch executes is counted under the current place.

    Our registered operators are seen through: they count as the plain PyTorch that they stand for, whatever
    backend they would run on. Fused attention counts as one operator whichever kernel PyTorch picks, and its
    result has the memory layout that the fused kernels give it; so has a convolution's on meta tensors.
    `nn.MultiheadAttention`'s fast path is off: a mode cannot look into it.

    Args:
        place: where to count; None counts nothing until a place is entered.
    """

    def __init__(self, place: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, Counts] = {}
        """Counts by place, in the order in which places were entered."""
        self.uncounted: list[tuple[str, str]] = []
        """(place, operator) for every call of an unknown operator."""
        self._places: list[str] = []
        self._paused = False
        self._depth = 0
        self._around = ExitStack()
        if place is not None:
            self.enter(place)

    @property
    def total(self) -> Counts:
        """All places together."""
        return sum(self.counts.values(), Counts())

    def enter(self, place: str) -> None:
        """Count under this place from now on."""
        self._places.append(place)
        self.counts.setdefault(place, Counts())

    def leave(self) -> None:
        """Count under the place before again."""
        self._places.pop()

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
        """Count one operator, or what it is made of."""
        kwargs = kwargs or {}
        if self._paused or not self._places:
            return func(*args, **kwargs)
        if func.namespace == "ecoformer":
            with self._inside():
                return getattr(Plain, func._opname)(*args, **kwargs)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            return self.attention(*args, **kwargs)
        if _is_composite(func):
            with self._inside():
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not func.is_view:
            counts = cost_of(func, args, kwargs, out)
            if counts is None:
                self.uncounted.append((self._places[-1], name_of(func)))
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
        """Count these under the current place."""
        self.counts[self._places[-1]] += counts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Count on within an operator; there fused attention comes as an operator, not as a function."""
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
    """Catches fused attention where it is called: below, PyTorch has chosen a kernel already."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counting = self._counting
        if func is F.scaled_dot_product_attention and counting._places and not counting._paused:
            return counting.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _laid_out(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A convolution's result in the layout that real devices give it: which copies follow depends on it."""
    if not out.is_meta:
        return out
    return out.contiguous(memory_format=suggest_memory_format(x if _channels_last(x) else weight))


def _channels_last(x: Tensor) -> bool:
    return suggest_memory_format(x) != torch.contiguous_format


@cache
def _is_composite(func: Any) -> bool:
    """Whether PyTorch makes this operator of others, on every device."""
    name = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name))
