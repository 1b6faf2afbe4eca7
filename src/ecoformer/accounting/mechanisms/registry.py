"""Formulas by the name of their mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecoformer.accounting.counts import Counts
from ecoformer.attention import Attention

Formula = Callable[[Any, int, int], Counts]

_REGISTRY: dict[str, Formula] = {}


def register_formula(*names: str) -> Callable[[Formula], Formula]:
    """Function decorator: `f(layer, batch, tokens)` is the cost of the mechanisms of these names."""

    def register(function: Formula) -> Formula:
        for name in names:
            if name in _REGISTRY:
                raise ValueError(f"a formula for {name!r} is registered already")
            _REGISTRY[name] = function
        return function

    return register


def list_formulas() -> list[str]:
    """Names of mechanisms that have a formula."""
    return sorted(_REGISTRY)


def formula(layer: Attention, batch: int, tokens: int) -> Counts:
    """What `layer` executes for `batch` samples of `tokens` tokens, in eval mode, fp32, without a mask."""
    if layer.name not in _REGISTRY:
        raise ValueError(
            f"no formula is registered for {layer.name!r}: known are {', '.join(list_formulas())}"
        )
    if batch < 1 or tokens < 1:
        raise ValueError(f"batch and tokens must be at least 1, got {batch} and {tokens}")
    return _REGISTRY[layer.name](layer, batch, tokens)
