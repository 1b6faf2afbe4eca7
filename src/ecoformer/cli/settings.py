"""Mechanisms and their arguments from what a user types: `--compare`, `--set`, `--sweep`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from ecoformer.accounting.sweeps import NATIVE, SYNONYMS
from ecoformer.attention.registry import no_setting, settings_of


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Of several `KEY=VALUE`, a value being a Python literal or else a word."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set takes KEY=VALUE, such as bits=8, got {text!r}")
        found[SYNONYMS.get(key, key)] = _value(value)
    return found


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Of `KEY=VALUE,VALUE,...`."""
    key, equals, values = text.partition("=")
    if not equals or not key.isidentifier() or not values.strip():
        raise ValueError(f"--sweep takes KEY=VALUE,VALUE, such as resolution=224,384, got {text!r}")
    return SYNONYMS.get(key, key), [_value(value.strip()) for value in values.split(",")]


def settings_for(mechanisms: list[str | None], given: dict[str, Any]) -> list[dict[str, Any]]:
    """What each mechanism gets of the settings: those that it has; one that none has is refused."""
    known = [set() if name is None else settings_of(name) for name in mechanisms]
    for key in given:
        if not any(key in names for names in known):
            named = [name for name in mechanisms if name]
            taken = f"{key!r} is no setting of a model that is taken as it is"
            raise ValueError(f"--set: {no_setting(key, named) if named else taken}")
    return [{key: value for key, value in given.items() if key in names} for names in known]


def names_in(text: str | None, option: str) -> list[str]:
    """Names between commas; none where the option was not given."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} takes names between commas, such as softmax,eco, got {text!r}")
    return names


def mechanisms_in(attention: str | None, compare: str | None) -> list[str | None]:
    """Of `--compare`, or else of `--attention`; None is the model as it is."""
    if compare is None:
        return [attention]
    return [None if name == NATIVE else name for name in names_in(compare, "--compare")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
