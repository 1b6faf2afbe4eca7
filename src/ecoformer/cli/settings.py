"""Models, mechanisms and their arguments from the options of a command: `--compare`, `--set`, `--sweep`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.accounting.sweeps import NATIVE, SYNONYMS
from ecoformer.attention.registry import settings_of, unknown_setting
from ecoformer.cli.sources import open_model
from ecoformer.conversion import convert


def example_input(batch: int = 1, resolution: int | None = None, tokens: int | None = None) -> Tensor:
    """An image, or else a text, on the meta device."""
    if resolution is not None:
        return torch.zeros(batch, 3, resolution, resolution, device="meta")
    return torch.zeros(batch, tokens or 1, dtype=torch.long, device="meta")


def counted_model(
    name: str,
    attention: str | None,
    *,
    batch: int = 1,
    resolution: int | None = None,
    tokens: int | None = None,
    **settings: Any,
) -> tuple[nn.Module, Tensor]:
    """A model to be counted, converted if a mechanism is named, and an input for it."""
    example = example_input(batch, resolution, tokens)
    # Models built from a name need no weights; files and folders bring theirs.
    with nullcontext() if Path(name).exists() else torch.device("meta"):
        model = open_model(name, image_size=resolution).model
    if attention is not None:
        convert(model, attention, example=example, **settings)
    return model, example


def exclude(*options: tuple[str, Any]) -> None:
    """Refuse more than one of these options."""
    given = [name for name, value in options if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other")


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """The settings of several `KEY=VALUE`; a value is a Python literal or else a string."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set takes KEY=VALUE, such as bits=8, got {text!r}")
        found[SYNONYMS.get(key, key)] = _value(value)
    return found


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """The name and the values of `KEY=VALUE,VALUE,...`."""
    key, equals, values = text.partition("=")
    if not equals or not key.isidentifier() or not values.strip():
        raise ValueError(f"--sweep takes KEY=VALUE,VALUE, such as resolution=224,384, got {text!r}")
    return SYNONYMS.get(key, key), [_value(value.strip()) for value in values.split(",")]


def swept(text: str | None, sizes: dict[str, int]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """`tokens=196,784` as (what changes, all sizes) for each value; one pair if nothing is swept."""
    if text is None:
        return [({}, sizes)]
    name, equals, values = (part.strip() for part in text.partition("="))
    numbers = [value.strip() for value in values.split(",")]
    if name not in sizes or not equals or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
        known = " or ".join(f"{size}=1,2,4" for size in sizes)
        raise ValueError(f"--sweep takes {known}, whole numbers from 1, got {text!r}")
    return [({name: int(n)}, sizes | {name: int(n)}) for n in numbers]


def settings_for(mechanisms: list[str | None], given: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that each mechanism has; one that none of them has is refused."""
    known = [set() if name is None else settings_of(name) for name in mechanisms]
    for key in given:
        if not any(key in names for names in known):
            named = [name for name in mechanisms if name]
            native = f"{key!r} is a setting of a mechanism: name one (--attention or --compare)"
            raise ValueError(f"--set: {unknown_setting(key, named) if named else native}")
    return [{key: value for key, value in given.items() if key in names} for names in known]


def names_in(text: str | None, option: str) -> list[str]:
    """Names separated by commas; none if the option was not given."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} takes names separated by commas, such as softmax,eco, got {text!r}")
    return names


def mechanisms_in(attention: str | None, compare: str | None) -> list[str | None]:
    """The mechanisms of `--compare`, or of `--attention`; None is the model as it is."""
    exclude(("--attention", attention), ("--compare", compare))
    if compare is None:
        return [attention]
    return [None if name == NATIVE else name for name in names_in(compare, "--compare")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
