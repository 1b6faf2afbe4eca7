"""Implementations of hashed attention, all with one contract.

`eager.py` is plain PyTorch and runs everywhere; `operators.py` registers it with `torch.library`.
`fused.py` says what a fused backend is, from tokens to output; `choice.py` chooses one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ecoformer.backends import eager, operators
from ecoformer.backends.choice import available

__all__ = ["Backend", "Plain", "Registered", "available"]


class Backend(Protocol):
    """The steps of hashed attention; `eager.py` says what each means."""

    @staticmethod
    def code_sums(codes: Tensor, v: Tensor, mask: Tensor | None, bits: int, /) -> Tensor:
        """Keys' codes and values to a state."""

    @staticmethod
    def code_read(
        codes: Tensor, state: Tensor, own: Tensor | None, bits: int, beta: float, dtype: torch.dtype, /
    ) -> Tensor:
        """Queries' codes read a state."""

    @staticmethod
    def causal_read(
        codes_q: Tensor,
        codes_k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: Tensor | None,
        bits: int,
        beta: float,
        own_value: bool,
        /,
    ) -> Tensor:
        """Both in causal order."""

    @staticmethod
    def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool, /) -> Tensor:
        """Sums of (a_t . b_s) c_s over s <= t, or s >= t if `reverse`."""


class Plain(Backend):
    """Plain PyTorch functions."""

    code_sums = staticmethod(eager.sums)
    code_read = staticmethod(eager.read)
    causal_read = staticmethod(eager.causal)
    causal_product = staticmethod(eager.causal_product)


class Registered(Backend):
    """The same as `torch.library` operators."""

    code_sums = staticmethod(operators.code_sums)
    code_read = staticmethod(operators.code_read)
    causal_read = staticmethod(operators.causal_read)
    causal_product = staticmethod(operators.causal_product)
