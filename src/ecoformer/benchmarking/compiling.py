"""Contestants by `torch.compile`, each with compiled code of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`call` by `torch.compile`, apart from all others.

    Compiled code belongs to a Python code object, and models of one class share theirs: where two differ in
    the backend alone, the second would run what was compiled for the first, and after eight no other would
    be compiled at all.
    """

    def run(*tensors: Tensor) -> Tensor:
        return call(*tensors)

    run.__code__ = run.__code__.replace()
    return torch.compile(run, dynamic=False)
