"""Mechanisms by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from ecoformer.attention.base import Attention

_REGISTRY: dict[str, type[Attention]] = {}

A = TypeVar("A", bound=type[Attention])


def register_attention(name: str, *, listed: bool = True) -> Callable[[A], A]:
    """Class decorator that registers a mechanism as `name`; `list_attentions` leaves out unlisted ones."""

    def register(cls: A) -> A:
        if name in _REGISTRY:
            raise ValueError(f"attention {name!r} is already registered: {_REGISTRY[name].__name__}")
        cls.name, cls.listed = name, listed
        _REGISTRY[name] = cls
        return cls

    return register


def list_attentions() -> list[str]:
    """Names that `create_attention` knows."""
    return sorted(name for name, cls in _REGISTRY.items() if cls.listed)


def attention_class(name: str) -> type[Attention]:
    """The class registered as `name`."""
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(list_attentions())}"
        raise ValueError(f"unknown attention {name!r}: {hint}")
    return _REGISTRY[name]


def create_attention(name: str, dim: int, num_heads: int, **kwargs: Any) -> Attention:
    """A new attention module by name; `kwargs` are those of its class."""
    cls = attention_class(name)
    try:
        return cls(dim, num_heads, **kwargs)
    except TypeError as error:
        raise constructor_error(name, error) from error


def constructor_error(mechanism: str, error: TypeError) -> TypeError:
    """A constructor's error, with the mechanism's name."""
    if str(error).startswith("unknown setting"):
        return error
    name = attention_class(mechanism).__name__
    return TypeError(f"{mechanism}: {error} (see help(ecoformer.attention.{name}))")
