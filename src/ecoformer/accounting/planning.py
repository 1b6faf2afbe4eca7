"""Before a conversion: what each layer would save, and which layers are worth it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.ledger import Ledger, aligned, cost, short
from ecoformer.conversion import Transfer, convert, transfer
from ecoformer.conversion.convert import unwrapped
from ecoformer.conversion.layers import Selection
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.hashing.fitting import Group, check_group, move, run
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

    Energy is that of everything executed, by the exact accounting of the CPU kernels. Times are medians of
    forward passes on the model's device: of both models in turns, and then of their layers one by one. The
    model is left as it was.

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
    ledgers = [_ledger(each, input_size, energy) for each in models]
    energies = [layer_energies(ledger, names) for ledger in ledgers]
    seconds = _measure(models, names, example) if measure else None
    kinds = [layer.was for layer in report.replaced]
    rows = []
    for name, was in zip([*names, ""], [*kinds, ""], strict=True):
        times = (None, None) if seconds is None else (seconds[0][name], seconds[1][name])
        rows.append(PlannedLayer(name or "the model", was, energies[0][name], energies[1][name], *times))
    return Plan(mechanism, dict(config), tuple(rows), tuple(layer.name for layer in report.left))


def _ledger(model: nn.Module, input_size: Any, energy: Any) -> Ledger:
    return cost(model, input_size, accounting="exact", energy=energy, backend="cpu")


def layer_energies(ledger: Ledger, names: Iterable[str]) -> dict[str, float]:
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


@dataclass(frozen=True)
class Choice:
    """What a layer becomes: a mechanism with its settings, or None to stay; its error and its energy."""

    mechanism: str | None
    config: dict[str, Any]
    loss: float
    energy_pj: float

    def __str__(self) -> str:
        if self.mechanism is None:
            return "stays"
        settings = ", ".join(f"{key}={value!r}" for key, value in self.config.items())
        return f"{self.mechanism} ({settings})" if settings else self.mechanism


@dataclass(frozen=True)
class Allocation:
    """The choice for every layer; `energy` is the model's, in shares of what it took before."""

    layers: dict[str, Choice]
    energy: float

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        lines = [
            f"  {name:<{width}}  {choice}, error {choice.loss:.3f}" for name, choice in self.layers.items()
        ]
        return "\n".join([f"{self.energy:.2f} times the energy of the model as it was", *lines])


CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = tuple(("sharp_eco", {"bits": b}) for b in (16, 32, 64))
"""What `allocate` tries by default."""


def allocate(
    model: nn.Module,
    batches: Iterable[Any],
    input_size: Any,
    *,
    loss: float | None = None,
    energy: float | None = None,
    candidates: Sequence[tuple[str, Mapping[str, Any]]] = CANDIDATES,
    layers: Selection = None,
    table: Any = "fp32-45nm",
    **transfer_arguments: Any,
) -> Allocation:
    """Convert `model` in place, with a mechanism and a number of bits chosen for each layer.

    Every candidate is tried on a copy: converted, and taught by `transfer`, whose final losses tell how well
    each layer does. A layer takes one of the candidates or stays as it is, which has no error. Chosen layers
    keep what they learned in the transfer. Call `distill` afterwards.

    Args:
        model: any module that `convert` takes.
        batches: as in `transfer`; a list or a data loader, because it is read for every candidate.
        input_size: as in `cost`.
        loss: the largest error of a layer; each takes its cheapest choice within it.
        energy: the largest energy of the converted model, as a share of what it takes now. Layers start with
            their cheapest choices; what is left is spent where an error falls most per picojoule. Pass either
            `loss` or `energy`.
        candidates: mechanisms with their arguments.
        layers: which layers may change, as in `convert`.
        table: an energy table, as in `cost`.
        transfer_arguments: as in `transfer`, such as `steps`.
    """
    if (loss is None) == (energy is None):
        raise ValueError("pass either loss= or energy=")
    for name, value in (("loss", loss), ("energy", energy)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if not candidates:
        raise ValueError("candidates is empty: name at least one mechanism")
    if isinstance(batches, Iterator):
        raise ValueError(
            "batches can be read only once, but each candidate needs them: pass a list or a data loader"
        )
    tried: list[tuple[str, dict[str, Any]]] = []
    for mechanism, settings in candidates:
        if (mechanism, dict(settings)) not in tried:
            tried.append((mechanism, dict(settings)))
    model = unwrapped(model)
    before, example = _ledger(model, input_size, table), _example(model, input_size)
    options: dict[str, list[tuple[Choice, nn.Module | None]]] = {}
    for mechanism, config in tried:
        trial = copy.deepcopy(model)
        report = convert(trial, mechanism, layers=layers, example=example, **config)
        names = [layer.name for layer in report.replaced]
        native, after = (layer_energies(each, names) for each in (before, _ledger(trial, input_size, table)))
        for name in names:
            options.setdefault(name, [(Choice(None, {}, 0.0, native[name]), None)])
            options[name].append((Choice(mechanism, config, 0.0, after[name]), None))
    if energy is not None:
        _within_energy(options, energy, before.energy_pj)  # refuses what cannot be, before any training
    for mechanism, config in tried:
        trial = copy.deepcopy(model)
        convert(trial, mechanism, layers=layers, example=example, **config)
        if any(hasher.learns for hasher in hashers_of(trial).values()):
            ranks: Group = check_group(transfer_arguments.get("group"), default_all=True) or "alone"
            fit_hashers(
                trial, batches, group=ranks, forward=transfer_arguments.get("forward"), progress=False
            )
        found: Transfer = transfer(trial, model, batches, **transfer_arguments)
        for name, choices in options.items():
            for index, (choice, _) in enumerate(choices):
                if (choice.mechanism, choice.config) == (mechanism, config):
                    taught = replace(choice, loss=found.final[name])
                    choices[index] = (taught, trial.get_submodule(name))
    if loss is not None:
        chosen = _within_loss(options, loss)
    else:
        chosen = _within_energy(options, energy or 0.0, before.energy_pj)
    made = {name: options[name][index][0] for name, index in chosen.items()}
    for mechanism, config in tried:
        wanted = {name for name, c in made.items() if (c.mechanism, c.config) == (mechanism, config)}
        if wanted:
            convert(model, mechanism, layers=_named(wanted), example=example, **config)
    saved = 0.0
    for name, index in chosen.items():
        saved += options[name][0][0].energy_pj - made[name].energy_pj
        trained = options[name][index][1]
        if trained is not None:
            model.get_submodule(name).load_state_dict(trained.state_dict())
    return Allocation(made, 1 - saved / before.energy_pj)


def _named(names: set[str]) -> Selection:
    return lambda name, layer: name in names


def _within_loss(options: dict[str, list[tuple[Choice, Any]]], loss: float) -> dict[str, int]:
    chosen = {}
    for name, found in options.items():
        good = [index for index, (choice, _) in enumerate(found) if choice.loss <= loss]
        chosen[name] = min(good, key=lambda index: found[index][0].energy_pj)
    return chosen


def _within_energy(
    options: dict[str, list[tuple[Choice, Any]]], energy: float, before: float
) -> dict[str, int]:
    """Start with the cheapest choices; spend what is left where an error falls most per picojoule."""
    chosen = {
        name: min(range(len(found)), key=lambda index: found[index][0].energy_pj)
        for name, found in options.items()
    }
    saved = sum(found[0][0].energy_pj - found[chosen[name]][0].energy_pj for name, found in options.items())
    left = energy * before - (before - saved)
    if left < 0:
        least = 1 - saved / before
        raise ValueError(f"energy={energy}: the cheapest choice takes {least:.2f} times the model's energy")
    while True:
        steps = []
        for name, found in options.items():
            now = found[chosen[name]][0]
            for index, (choice, _) in enumerate(found):
                more, gain = choice.energy_pj - now.energy_pj, now.loss - choice.loss
                if gain > 0 and more <= left:
                    steps.append((gain / max(more, 1e-9), name, index, more))
        if not steps:
            return chosen
        _, name, index, more = max(steps)
        chosen[name] = index
        left -= more
