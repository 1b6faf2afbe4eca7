"""numba's decorators as the kernels use them; its own types do not say what they make of a function."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_numba: Any = importlib.import_module("numba")
_extending: Any = importlib.import_module("numba.extending")
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
"""Zero division as in NumPy, fused multiply-adds, and nothing that takes NaN or infinity for absent."""

types: Any = importlib.import_module("numba.core.types")
cgutils: Any = importlib.import_module("numba.core.cgutils")
ir: Any = importlib.import_module("llvmlite.ir")
carray: Any = _numba.carray
int32: Any = _numba.int32
int64: Any = _numba.int64
float32: Any = _numba.float32
float64: Any = _numba.float64
to_fixed_tuple: Any = importlib.import_module("numba.np.unsafe.ndarray").to_fixed_tuple
intrinsic: Callable[[Any], Any] = _extending.intrinsic


def compiled(function: F) -> F:
    """A function that is compiled once.

    It is not cached by itself: it would be found again although one that it calls has changed. What threads
    call is cached with all that it holds, by a digest of all sources.
    """
    made: F = _numba.njit(**_OPTIONS)(function)
    return made


def digest_of_sources() -> int:
    """A number that changes with any file of this package, never zero."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return 1 + int.from_bytes(hashlib.sha256(sources).digest()[:6], "big")


def callback(function: Any) -> Any:
    """A C function of an address of int64 numbers, compiled at once or read from disk."""
    signature = types.void(types.CPointer(types.int64))
    return _numba.cfunc(signature, **{**_OPTIONS, "nogil": False, "cache": True})(function)


def inlined(function: F) -> F:
    """A function compiled into each of its callers, which saves optimising it at every level of calls."""
    made: F = _numba.njit(**_OPTIONS, inline="always")(function)
    return made
