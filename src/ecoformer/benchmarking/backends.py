"""The backends of hashed attention that can run here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ecoformer.backends.choice import available, why_not
from ecoformer.backends.fused import DTYPES, Call
from ecoformer.hashing import Hasher


def hashed_backends(
    hashers: Iterable[Hasher], device: torch.device, needs_grad: bool, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Names of the backends that run layers with these hashers on `device` and do not leave it to eager."""
    if dtype not in DTYPES:
        return ["eager"]
    calls = [_smallest_call(hasher, device) for hasher in hashers]
    return [name for name in available(device) if name == "eager" or _runs(name, calls, needs_grad)]


def _runs(name: str, calls: list[Call | None], needs_grad: bool) -> bool:
    return all(call is not None and why_not(name, call, needs_grad) is None for call in calls)


def _smallest_call(hasher: Hasher, device: torch.device) -> Call | None:
    functions = hasher.functions()
    if functions is None:
        return None
    token = torch.zeros(1, hasher.num_heads, 1, hasher.head_dim, device=device)
    return Call(token, None, token, None, functions, 2.0, False)
