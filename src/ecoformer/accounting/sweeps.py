"""Sweeps: what a model costs as one setting varies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.energy import EnergyTable, energy_table
from ecoformer.accounting.ledger import Accounting, Backend, Ledger, check_accounting, cost
from ecoformer.attention import list_attentions
from ecoformer.attention.registry import settings_of, unknown_setting
from ecoformer.conversion import convert

NATIVE = "native"
"""The name of a model as it is, as in recipes."""
INPUTS = ("resolution", "tokens")
"""Parameters of the input; all others are settings of mechanisms."""
SYNONYMS = {"m": "support"}
"""The paper's letters for settings of mechanisms."""


@dataclass(frozen=True)
class Point:
    """One value of the parameter, one mechanism (None for the model as it is), and the cost there."""

    parameter: str
    value: Any
    mechanism: str | None
    ledger: Ledger

    @property
    def about(self) -> dict[str, Any]:
        """The value and the mechanism."""
        return {self.parameter: self.value, "attention": self.mechanism or NATIVE}

    def to_dict(self) -> dict[str, Any]:
        """One flat row: value, mechanism, and the ledger's summary."""
        return self.about | self.ledger.summary()


def sweep(
    build: Callable[[], nn.Module],
    parameter: str,
    values: Iterable[Any],
    *,
    mechanisms: Sequence[str | None] = (None,),
    settings: Mapping[str, Any] | None = None,
    example: Any = (1, 3, 224, 224),
    accounting: Accounting = "paper",
    energy: str | Mapping[str, Any] | EnergyTable = "fp32-45nm",
    backend: Backend | None = None,
) -> list[Point]:
    """What a model costs for each mechanism and each value of one parameter.

    Args:
        build: returns a new model for every point. On the meta device it needs no memory.
        parameter: "resolution" (height and width of the image), "tokens" (length of the text), or an argument
            of the mechanisms, such as "bits" or "support" (also "m", as in the paper).
        values: its values.
        mechanisms: the model is converted to each of them in turn; None leaves it as it is.
        settings: other arguments of the mechanisms, the same at every point.
        example: the input if the parameter is a setting: its shape, or a tensor of tokens.
        accounting: see `cost`.
        energy: see `cost`.
        backend: see `cost`.

    Returns:
        One point for each mechanism and value, mechanism by mechanism.
    """
    name, fixed, table = SYNONYMS.get(parameter, parameter), dict(settings or {}), energy_table(energy)
    chosen = list(values)
    check_accounting(accounting, backend)
    _check(name, chosen, mechanisms, fixed)
    points = []
    for mechanism in mechanisms:
        for value in chosen:
            given = _input(name, value) if name in INPUTS else example
            changed = fixed if name in INPUTS else fixed | {name: value}
            model = build()
            if mechanism is not None:
                convert(model, mechanism, example=_as_tensor(given), **changed)
            ledger = cost(model, given, accounting=accounting, energy=table, backend=backend)
            points.append(Point(name, value, mechanism, ledger))
    return points


def _input(parameter: str, value: int) -> Any:
    if parameter == "resolution":
        return (1, 3, value, value)
    return torch.zeros(1, value, dtype=torch.long, device="meta")


def _as_tensor(given: Any) -> Any:
    return torch.empty(given, device="meta") if isinstance(given, tuple) else given


def _check(
    parameter: str, values: Sequence[Any], mechanisms: Sequence[str | None], settings: Mapping[str, Any]
) -> None:
    if not values or not mechanisms:
        raise ValueError(f"a sweep over {parameter} needs at least one value and one mechanism")
    if parameter in INPUTS:
        bad = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or v < 1]
        if bad:
            raise ValueError(f"{parameter} must be whole numbers from 1, got {bad[0]!r}")
        return
    if parameter in settings:
        raise ValueError(f"{parameter} is swept, so it cannot be set to {settings[parameter]!r} as well")
    for mechanism in mechanisms:
        if mechanism is None:
            raise ValueError(f"{parameter} is a setting of a mechanism: name one (--attention or --compare)")
        if parameter not in settings_of(mechanism):
            having = [name for name in list_attentions() if parameter in settings_of(name)]
            if not having:
                raise ValueError(unknown_setting(parameter, [mechanism]))
            known = f"mechanisms with it: {', '.join(having)}"
            raise ValueError(f"unknown setting {parameter!r} of {mechanism}; {known}")
