"""Hashed attention on the CPU, compiled by numba: inference in fp32, by buckets and tables."""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from ecoformer.backends.hashing import Functions

__all__ = ["backward", "cannot", "forward", "kept"]


@cache
def _missing() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'ecoformer[cpu]'"
    return None


def cannot(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    *,
    causal: bool,
    needs_grad: bool,
) -> str | None:
    """Why this call cannot be run; None where it can."""
    if q.device.type != "cpu":
        return f"tokens are on {q.device.type}"
    if _missing() is not None:
        return _missing()
    return "not written yet"
