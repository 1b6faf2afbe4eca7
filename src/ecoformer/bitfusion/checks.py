"""Checks of the accelerator's arguments: one line that names the argument and the remedy."""

from __future__ import annotations

import math
import operator
from typing import Any


def whole(name: str, value: Any, least: int = 1, remedy: str = "") -> int:
    """`value` as an int of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        remedy = remedy or f"pass a whole number of at least {least}"
        raise ValueError(f"{name} must be a whole number from {least}, got {value!r}: {remedy}")
    return number


def pair(name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """A whole number for both axes, or one for each: (vertical, horizontal)."""
    if not isinstance(value, tuple | list):
        return whole(name, value, least), whole(name, value, least)
    if len(value) != 2:
        raise ValueError(f"{name} must be one number or (vertical, horizontal), got {value!r}: pass two")
    return whole(f"{name}[0]", value[0], least), whole(f"{name}[1]", value[1], least)


def amount(name: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a finite float above zero, or from zero on."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero) or isinstance(value, bool):
        bound = "at least 0" if zero else "above 0"
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}: pass such a number")
    return number
