"""Mechanisms by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any, TypeVar

from torch import nn

from ecoformer.attention.base import Attention

_REGISTRY: dict[str, type[Attention]] = {}

A = TypeVar("A", bound=type[Attention])


def register_attention(name: str) -> Callable[[A], A]:
    """Class decorator: makes a mechanism known as `name`."""

    def register(cls: A) -> A:
        if name in _REGISTRY:
            raise ValueError(f"an attention named {name!r} is registered already: {_REGISTRY[name].__name__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return register


def list_attentions() -> list[str]:
    """Names that `create_attention` knows."""
    return sorted(_REGISTRY)


def attention_class(name: str) -> type[Attention]:
    """The class registered as `name`."""
    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(list_attentions())}"
        raise ValueError(f"no attention is named {name!r}: {hint}")
    return _REGISTRY[name]


def create_attention(name: str, dim: int, num_heads: int, **kwargs: Any) -> Attention:
    """A new attention module by name; keyword arguments as its class takes them."""
    cls = attention_class(name)
    try:
        return cls(dim, num_heads, **kwargs)
    except TypeError as error:
        raise constructor_error(name, error) from error


def settings_of(mechanism: str) -> set[str]:
    """Names of the arguments that a mechanism takes besides its sizes."""
    initialisers = [cls.__dict__["__init__"] for cls in attention_class(mechanism).__mro__ if _own(cls)]
    return {
        parameter.name
        for function in initialisers
        for parameter in signature(function).parameters.values()
        if parameter.kind is Parameter.KEYWORD_ONLY
    }


def no_setting(key: str, mechanisms: Iterable[str]) -> str:
    """That none of the mechanisms has such a setting, which one may be meant, and which there are."""
    names = list(mechanisms)
    known = sorted(set().union(*map(settings_of, names)))
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{key!r} is no setting of {' or '.join(names)}{hint}; known are {', '.join(known)}"


def constructor_error(mechanism: str, error: TypeError) -> TypeError:
    """A constructor's error in terms of the mechanism's settings."""
    odd = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if odd and odd[1] not in settings_of(mechanism):
        return TypeError(no_setting(odd[1], [mechanism]))
    name = attention_class(mechanism).__name__
    return TypeError(f"{mechanism}: {error} (see help(ecoformer.attention.{name}))")


def _own(cls: type) -> bool:
    return "__init__" in cls.__dict__ and issubclass(cls, nn.Module) and cls is not nn.Module
