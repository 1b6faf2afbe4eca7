"""Hashed attention on the CPU, compiled by numba: inference, by buckets and tables.

numba is imported by the first call, and compiles then or reads what an earlier process compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.backends.fused import CannotRun, FusedCall, Grads, Needs, Signs

__all__ = ["backward", "cannot", "forward", "kept"]


def cannot(call: FusedCall, *, needs_grad: bool) -> str | None:
    """Why this call cannot be run; None where it can."""
    device = call.q.device.type
    if device != "cpu":
        return f"it runs on the CPU, tokens are on {device}"
    if not _installed():
        return "numba is not installed: pip install 'ecoformer[cpu]'"
    if isinstance(call.functions, Signs):
        return "it does not take projections"
    if call.key_functions is not None and call.key_functions[0].shape != call.functions[0].shape:
        return "queries and keys have hash functions of different shapes"
    return "it has no gradient" if needs_grad else None


@cache
def _installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def forward(call: FusedCall, *, keep: bool = True) -> tuple[Tensor, list[Tensor]]:
    """The output, and nothing for a backward."""
    return _attend()(call), []


@cache
def _attend() -> Callable[[FusedCall], Tensor]:
    """The kernels, compiled or read from numba's cache."""
    try:
        from ecoformer.backends.cpu.launch import attend
    except Exception as error:  # whatever numba stumbles over, eager still runs
        what = f"{type(error).__name__}: {one_line(error, 200)}"
        raise CannotRun(f"numba cannot compile its kernels ({what})") from error
    return attend


def kept(call: FusedCall) -> list[Tensor]:
    """Nothing is kept for a backward."""
    return []


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs) -> Grads:
    """There is none: `cannot` says so."""
    raise NotImplementedError("the CPU backend has no gradient")
