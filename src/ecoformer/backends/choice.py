"""Which backend computes hashed attention: what can run, what is preferred, what the user asks for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from ecoformer.backends.fused import FusedCall, load, warn_once
from ecoformer.backends.hashing import HashFunctions

F = TypeVar("F", bound=Callable[..., Any])
VARIABLE = "ECOFORMER_BACKEND"
"""The environment variable that names the default backend. It is read once, at the first call."""
PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",)}
"""Fused backends by type of device, best first; eager runs everywhere."""
NAMES = ("eager", *dict.fromkeys(name for names in PREFERRED.values() for name in names))


class _Request(threading.local):
    """The backend that `use_backend` asks for, in each thread. `torch.compile` guards on it."""

    def __init__(self) -> None:
        # Runs once per thread. PyTorch 2.6 would compile the value of a class attribute instead.
        self.name: str | None = None


_request = _Request()


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Compute hashed attention inside the block by the backend `name`: "eager", "cpu" or "triton".

    None asks for the default: the environment variable `ECOFORMER_BACKEND`, else the fastest backend that
    can run the call. The choice holds for the current thread, as with `torch.no_grad`: neither other threads
    nor what autograd recomputes in threads of its own see it. Compiled code is compiled again for each name.
    """
    before = _request.name
    _request.name = check_name("backend", name)
    try:
        yield
    finally:
        _request.name = before


def check_name(argument: str, name: str | None) -> str | None:
    """`name`, which must be None or a known backend."""
    if name is not None and name not in NAMES:
        raise ValueError(f"{argument} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


def requested(name: str | None = None) -> str | None:
    """The backend requested by `name`, `use_backend` or the environment, in this order; None for none."""
    return check_name("backend", name) or _request.name or _default()


def constant(function: F) -> F:
    """Compiled code keeps the result that the function has at compile time.

    This is `torch.compiler.assume_constant_result`, which would import the compiler at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def available(device: torch.device | str) -> list[str]:
    """Names of the backends that can run on `device`, in the order in which they are preferred."""
    names = PREFERRED.get(torch.device(device).type, ())
    return [*(name for name in names if why_not_on(name, device) is None), "eager"]


@cache
def why_not_on(name: str, device: torch.device | str) -> str | None:
    """Why the fused backend `name` can run no call on `device`; None if it can run some."""
    x = torch.zeros(1, 1, 1, 16, device=device)
    row = torch.zeros(1, 1, device=device)
    functions = HashFunctions(x[0], row, row[0], torch.zeros(1, 1, 16, device=device))
    return why_not(name, FusedCall.simple(x, x, functions), False)


def why_not(name: str, call: FusedCall, needs_grad: bool) -> str | None:
    """Why the fused backend `name` cannot run a call; None if it can."""
    return _cannot(name, needs_grad, *call.flat())


def pick(call: FusedCall, needs_grad: bool, wanted: str | None) -> str:
    """The backend for one call: `wanted`, or the first that can run it.

    If the requested backend cannot run it, eager does, with one warning.
    """
    if wanted == "eager":
        return wanted
    for name in PREFERRED.get(call.q.device.type, ()) if wanted is None else (wanted,):
        reason = why_not(name, call, needs_grad)
        if reason is None:
            return name
        warn_if_requested(wanted, reason)
    return "eager"


@constant
def warn_if_requested(wanted: str | None, reason: str) -> None:
    """Warn once that the requested backend cannot run a call."""
    if wanted not in (None, "eager"):
        warn_once(str(wanted), reason)


@constant
def _default() -> str | None:
    return default_backend()


@cache
def default_backend() -> str | None:
    """The backend that the environment variable names; None where it is unset."""
    return check_name(VARIABLE, os.environ.get(VARIABLE) or None)


@constant
def _cannot(name: str, needs_grad: bool, *flat: Any) -> str | None:
    """Asked with single tensors, as the compiler hands tuples of them over empty or not at all."""
    module = load(name)
    return module if isinstance(module, str) else module.cannot(FusedCall.of(*flat), needs_grad=needs_grad)
