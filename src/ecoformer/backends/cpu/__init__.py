"""Hashed attention on the CPU, compiled by numba: by buckets and tables.

numba is imported by the first call, and compiles then or reads what an earlier process compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.backends.cpu.problem import keep_for as kept
from ecoformer.backends.fused import CannotRun, FusedCall, Grads, Needs
from ecoformer.backends.hashing import shapes

__all__ = ["backward", "cannot", "forward", "integer_attention", "kept", "pack_signs", "unavailable"]


def cannot(call: FusedCall, *, needs_grad: bool) -> str | None:
    """Why this call cannot be run; None where it can."""
    reason = unavailable(call.q.device)
    if reason is not None:
        return reason
    if call.key_functions is not None and shapes(call.key_functions) != shapes(call.functions):
        return "queries and keys have hash functions of different shapes"
    return None


def unavailable(device: torch.device) -> str | None:
    """Why no call with tokens on that device can be run; None where some can."""
    if device.type != "cpu":
        return f"it runs on the CPU, tokens are on {device.type}"
    return None if _installed() else "numba is not installed: pip install 'ecoformer[cpu]'"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def forward(call: FusedCall, *, keep: bool = True) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the backward needs."""
    found: tuple[Tensor, list[Tensor]] = _compiled("launch").attend(call, keep)
    return found


@cache
def _compiled(module: str) -> Any:
    """A module with its kernels, compiled or read from numba's cache."""
    try:
        return importlib.import_module(f"ecoformer.backends.cpu.{module}")
    except Exception as error:  # whatever numba stumbles over, eager still runs
        what = f"{type(error).__name__}: {one_line(error, 200)}"
        raise CannotRun(f"numba cannot compile its kernels ({what})") from error


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs) -> Grads:
    """Gradients of all inputs, by kernels that are compiled when they are first needed."""
    found: Grads = _compiled("launch_backward").backward(call, grad, saved, needs)
    return found


def integer_attention(*given: Any) -> Tensor:
    """What `backends.integer.integer_attention` computes, with its checked arguments."""
    found: Tensor = _compiled("launch_integer").integer_attention(*given)
    return found


def pack_signs(*given: Any) -> Tensor:
    """What `backends.integer.pack_signs` computes, with its checked arguments and the output."""
    found: Tensor = _compiled("launch_integer").pack_signs(*given)
    return found
