"""Before a conversion: what each layer would save."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.ledger import Ledger, aligned, cost, short
from ecoformer.conversion import convert
from ecoformer.conversion.convert import unwrapped
from ecoformer.conversion.layers import Selection
from ecoformer.hashing.fitting import move, run
from ecoformer.running import NOT_TAKEN, eval_mode, not_taken, without_fast_path

_SAME = 0.01
"""Differences up to this share do not count as a gain."""


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as it is and converted: picojoules and, if measured, seconds of one forward pass."""

    name: str
    was: str
    energy_pj: float
    energy_after_pj: float
    seconds: float | None = None
    seconds_after: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a conversion would change; the last layer in `rows` is the entire model."""

    mechanism: str
    config: dict[str, Any]
    rows: tuple[PlannedLayer, ...]
    left: tuple[str, ...]

    @property
    def total(self) -> PlannedLayer:
        """The entire model."""
        return self.rows[-1]

    @property
    def pays_off(self) -> bool:
        """Whether the converted model takes less energy than the model as it is."""
        return self.total.energy_after_pj < (1 - _SAME) * self.total.energy_pj

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"pays_off": self.pays_off}

    def __str__(self) -> str:
        timed = self.total.seconds is not None
        head = ["layer", "is", "mJ", "after", "ratio"] + ["ms", "after", "ratio"] * timed
        lines = [head]
        for row in self.rows:
            cells = [row.name, row.was, *_ratio(row.energy_pj, row.energy_after_pj, 1e9)]
            lines.append(cells + (_ratio(row.seconds, row.seconds_after, 1e-3) if timed else []))
        return "\n".join(aligned(lines) + self.verdict())

    def verdict(self) -> list[str]:
        """In words: whether to convert, and which layers not to."""
        saved = 1 - self.total.energy_after_pj / self.total.energy_pj
        worse = [row.name for row in self.rows[:-1] if row.energy_after_pj > row.energy_pj]
        if self.pays_off:
            lines = [f"{self.mechanism} saves {saved:.0%} of the model's energy at this size"]
        else:
            lines = [
                f"{self.mechanism} does not pay off at this size: {1 - saved:.2f} times the energy of now"
            ]
        if self.total.seconds is not None and self.total.seconds_after is not None:
            speed = self.total.seconds / self.total.seconds_after
            slower = " (slower)" if speed < 1 - _SAME else ""
            lines.append(f"measured here, it is {speed:.2f} times as fast{slower}")
        if worse and len(worse) < len(self.rows) - 1:
            lines.append(f"these layers would take more: {', '.join(worse)}; leave them out with layers=")
        return lines


def _ratio(before: float | None, after: float | None, unit: float) -> list[str]:
    if before is None or after is None:
        return ["", "", ""]
    return [short(before / unit), short(after / unit), f"{after / before:.2f}" if before else "-"]


def plan(
    model: nn.Module,
    mechanism: str,
    input_size: Any,
    *,
    layers: Selection = None,
    energy: Any = "fp32-45nm",
    measure: bool = True,
    **config: Any,
) -> Plan:
    """What `convert(model, mechanism, ...)` would gain, layer by layer, against the model as it is.

    Energy is that of everything computed, by the exact accounting. Times are medians of forward passes on the
    model's device: of both models in turns, and then of their layers one by one. The model is left as it was.

    Args:
        model: any module that `convert` takes.
        mechanism: one of `list_attentions()`.
        input_size: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.
        layers: which layers, as in `convert`.
        energy: an energy table, as in `cost`.
        measure: whether to run both models and time them.
        config: the mechanism's arguments.
    """
    model = unwrapped(model)
    after = copy.deepcopy(model)
    example = _example(model, input_size)
    report = convert(after, mechanism, layers=layers, example=example, **config)
    names = [layer.name for layer in report.replaced]
    models = (model, after)
    ledgers = [cost(each, input_size, accounting="exact", energy=energy) for each in models]
    energies = [_layer_energies(ledger, names) for ledger in ledgers]
    seconds = _measure(models, names, example) if measure else None
    kinds = [layer.was for layer in report.replaced]
    rows = []
    for name, was in zip([*names, ""], [*kinds, ""], strict=True):
        times = (None, None) if seconds is None else (seconds[0][name], seconds[1][name])
        rows.append(PlannedLayer(name or "the model", was, energies[0][name], energies[1][name], *times))
    return Plan(mechanism, dict(config), tuple(rows), tuple(layer.name for layer in report.left))


def _layer_energies(ledger: Ledger, names: Iterable[str]) -> dict[str, float]:
    """Picojoules of these layers with all that is inside them; "" is the entire model."""
    found = {"": ledger.energy_pj}
    for name in names:
        inside = (row for row in ledger.rows if row.name == name or row.name.startswith(f"{name}."))
        found[name] = sum(ledger.energy.energy_pj(row.counts) for row in inside)
    return found


def _example(model: nn.Module, input_size: Any) -> Any:
    """An input that the model can run on."""
    tensor = next(iter(model.parameters()), torch.empty(0))
    if isinstance(input_size, Sequence) and all(isinstance(size, int) for size in input_size):
        images = torch.randn(*input_size, generator=torch.Generator().manual_seed(0))
        return images.to(tensor.device, tensor.dtype)
    return move(input_size, tensor.device)


@torch.no_grad()
def _measure(models: Sequence[nn.Module], names: list[str], example: Any) -> list[dict[str, float]]:
    """Median seconds of the entire models (""), in turns, and then of each of their layers."""
    try:
        with eval_mode(*models):
            totals = _rounds([partial(_seconds_of, model, example) for model in models])
            with without_fast_path():  # which passes layers by
                layers = [_layer_seconds(model, names, example) for model in models]
    except NOT_TAKEN as error:
        raise not_taken(models[0], example, error) from error
    return [{"": total} | times for total, times in zip(totals, layers, strict=True)]


def _rounds(calls: Sequence[Callable[[], float]], seconds: float = 1.0, most: int = 20) -> list[float]:
    """Medians of calls made in turns, after one each to compile what they need."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while len(times[0]) < 3 or (len(times[0]) < most and time.perf_counter() - start < seconds):
        for call, found in zip(calls, times, strict=True):
            found.append(call())
    return [median(found) for found in times]


def _seconds_of(model: nn.Module, example: Any) -> float:
    start = _now(model)
    run(model, example)
    return _now(model) - start


def _now(module: nn.Module) -> float:
    """The time when the module's device has done all its work."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _layer_seconds(model: nn.Module, names: list[str], example: Any) -> dict[str, float]:
    """Median seconds of layers in a forward pass, taken by hooks; a pass may call a layer several times."""
    rounds: list[dict[str, float]] = []
    starts: dict[str, float] = {}

    def start(name: str, layer: nn.Module, *_: Any) -> None:
        starts[name] = _now(layer)

    def stop(name: str, layer: nn.Module, *_: Any) -> None:
        rounds[-1][name] += _now(layer) - starts[name]

    def once() -> float:
        rounds.append(dict.fromkeys(names, 0.0))
        return _seconds_of(model, example)

    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_pre_hook(partial(start, name)))
            hooks.enter_context(layer.register_forward_hook(partial(stop, name)))
        _rounds([once])
    return {name: median(times[name] for times in rounds[1:]) for name in names}  # the first compiles
