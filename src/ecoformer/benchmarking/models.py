"""`bench model`: whole models with one mechanism or another, each checked before it is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.attention import Attention, HashedAttention, SoftmaxAttention, attention_class
from ecoformer.backends.choice import use_backend
from ecoformer.benchmarking.as_timed import Forward, check_inference, check_training, loss_of
from ecoformer.benchmarking.backends import hashed_backends
from ecoformer.benchmarking.checking import hashed_truth, relative_error
from ecoformer.benchmarking.compiling import compiled
from ecoformer.benchmarking.energy import EnergyBench
from ecoformer.benchmarking.explicit import ExplicitAttention, make_explicit
from ecoformer.benchmarking.graphs import require_graphs
from ecoformer.benchmarking.measuring import Measures, measured, say_if_busy
from ecoformer.benchmarking.operators import QUICK_FIT
from ecoformer.benchmarking.results import Check, Row, Run, device_name, failed, with_check
from ecoformer.benchmarking.timing import synchronize
from ecoformer.conversion import convert
from ecoformer.hashing import fit_hashers, hashers_of

_BOUND = 1e-3
"""Relative error of a model's fp32 outputs, besides what codes may change that hang on rounding."""
_DENSE_TOKENS = 4096
"""Tokens of a layer up to which the reference, quadratic, stands in for it."""


@dataclass(frozen=True)
class Load:
    """What models are given, and how they run.

    Attributes:
        make: a batch of so many samples on the CPU.
        counted: what a sample counts as: "images", or "tokens" with `per_sample` of them.
        about: what the rows say of it.
        per_sample: how many of them a sample has.
        train: a whole training step, with an optimiser that changes nothing.
        compiled: all models by `torch.compile`.
        channels_last: memory format of images and weights.
        amp: dtype of autocast.
        graphs: replays of CUDA graphs are timed, not calls.
    """

    make: Callable[[int], Tensor]
    counted: str
    about: dict[str, Any]
    per_sample: int = 1
    train: bool = False
    compiled: bool = False
    channels_last: bool = False
    amp: torch.dtype | None = None
    graphs: bool = False


@dataclass(frozen=True)
class Contestant:
    """A model and the backend that it is to run by; none where its mechanism has no choice."""

    mechanism: str
    backend: str
    model: nn.Module
    forced: str | None = None

    def in_backend(self) -> AbstractContextManager[None]:
        """While it is open, hashed attention runs by this backend."""
        return nullcontext() if self.forced is None else use_backend(self.forced)


def bench_models(
    model: nn.Module,
    mechanisms: Sequence[str],
    load: Load,
    batches: Sequence[int],
    device: torch.device,
    *,
    seconds: float = 2.0,
    energy: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Time copies of `model`, converted to each mechanism; softmax by SDPA is always among them.

    Args:
        model: any model that `ecoformer.convert` knows; it is left as it was.
        mechanisms: registered names, and "explicit" for softmax with its N x N matrix.
        load: what goes in.
        batches: samples of a batch, one run each.
        device: where to run.
        seconds: how long each contestant is timed at each batch, about.
        energy: measure energy too.
        progress: told what is being done.
    """
    for name in mechanisms:
        if name != "explicit":
            attention_class(name)
    if load.graphs:
        require_graphs(device)
    run = Run(device_name(device), torch.get_num_threads())
    contestants = []
    for name in dict.fromkeys(("softmax", *mechanisms)):
        progress(f"converting to {name}")
        contestants += _contestants(model, name, load, device)
    meter = EnergyBench(device) if energy else None
    try:
        checks = {id(c): _checked(c, load, device, progress) for c in contestants}
        measures = Measures(device, seconds, load.graphs, meter=meter, progress=progress)
        for batch in batches:
            run.rows += _bench_batch(contestants, checks, load, batch, measures)
        say_if_busy(run, [measures])
    finally:
        if meter is not None:
            run.notes.append(meter.note)
            meter.close()
    return run


def _contestants(model: nn.Module, name: str, load: Load, device: torch.device) -> list[Contestant]:
    made = copy.deepcopy(model)
    convert(made, "softmax" if name == "explicit" else name, example=load.make(1))
    if name == "explicit":
        make_explicit(made)
    made = made.to(device).train(load.train)
    if load.channels_last:
        made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if hashers := hashers_of(made):
        # Small images have too few tokens for the support samples, large ones take long to pair.
        samples = 2 if load.make(1).numel() > 20_000 else 16
        fit_hashers(made, [load.make(samples).to(device)], samples=samples, options=QUICK_FIT, progress=False)
        able = hashed_backends(hashers.values(), device, load.train)
        return [Contestant(name, backend, made, backend) for backend in able]
    return [Contestant(name, {"softmax": "sdpa", "explicit": "N x N matrix"}.get(name, "eager"), made)]


def _checked(
    contestant: Contestant, load: Load, device: torch.device, progress: Callable[[str], None]
) -> Row:
    """A row without a time: the check on one sample in fp32, or why there is none."""
    progress(f"checking {contestant.mechanism} ({contestant.backend})")
    name = f"{contestant.backend}, compiled" if load.compiled else contestant.backend
    row = Row(contestant.mechanism, name, {})
    try:
        check = _compare(contestant, load.make(1).to(device))
    except Exception as error:
        return failed(row, error)
    return with_check(replace(row, checked=check), check)


@torch.no_grad()
def _compare(contestant: Contestant, sample: Tensor) -> Check:
    training = contestant.model.training
    model = contestant.model.eval()
    try:
        with contestant.in_backend():
            out = model(sample)
        kinds = {"softmax": (_by_matrix, "the explicit matrix"), "explicit": (_by_sdpa, "SDPA")}
        hashed = (_by_reference, "the reference")
        stand_in, name = kinds.get(contestant.mechanism, hashed if contestant.forced else (None, ""))
        if stand_in is None:
            broken = float((~out.isfinite()).float().mean())
            return Check(broken, 0.0, "finite numbers")
        with _attending(model, stand_in) as long:
            truth = model(sample)
        against = f"{name}, long layers by eager" if long else name
        bound = _BOUND
        if stand_in is _by_reference:
            with _attending(model, _by_doubted_codes):
                bound += 4 * relative_error([model(sample)], [truth])
        return Check(relative_error([out], [truth]), bound, against)
    finally:
        model.train(training)


StandIn = Callable[[Attention, Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


@contextmanager
def _attending(model: nn.Module, stand_in: StandIn) -> Iterator[list[int]]:
    """Attention by another way while it is open; yields the lengths that were too long for that."""
    long: list[int] = []

    def other(layer: Attention) -> Callable[..., Tensor]:
        own = layer.attend

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
            if q.shape[-2] <= _DENSE_TOKENS:
                return stand_in(layer, q, k, v, mask, is_causal)
            long.append(q.shape[-2])
            with use_backend("eager"):
                return own(q, k, v, mask, is_causal)

        return attend

    layers = [m for m in model.modules() if isinstance(m, (HashedAttention, SoftmaxAttention))]
    for layer in layers:
        layer.attend = other(layer)  # type: ignore[method-assign]
    try:
        yield long
    finally:
        for layer in layers:
            del layer.attend


def _by_reference(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    return hashed_truth(layer, is_causal, mask)(q, k, v).to(v.dtype)


def _by_doubted_codes(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    return hashed_truth(layer, is_causal, mask, doubted=True)(q, k, v).to(v.dtype)


def _by_matrix(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return ExplicitAttention.attend(layer, q, k, v, mask, is_causal)


def _by_sdpa(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return SoftmaxAttention.attend(layer, q, k, v, mask, is_causal)


def _bench_batch(
    contestants: list[Contestant], checks: dict[int, Row], load: Load, batch: int, measures: Measures
) -> list[Row]:
    device = measures.device
    inputs = load.make(batch).to(device)
    if load.channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    about = load.about | {"batch": batch, "counted": load.counted}
    rows: list[Row] = []
    works: dict[int, Callable[[], object]] = {}
    for index, contestant in enumerate(contestants):
        row = replace(checks[id(contestant)], setting=about)
        if row.failure is None:
            measures.progress(f"batch {batch}: warming up {row.label}")
            try:
                forward = _forward(contestant, load, inputs, device)
                row = _checked_as_timed(row, contestant, load, inputs, forward)
                work = _work(contestant, load, forward)
                work()
                synchronize(device)
            except Exception as error:
                row = failed(row, error)
            if row.failure is None:
                works[index] = work
        rows.append(row)
    rows = measured(rows, works, measures, f"batch {batch}", items=batch)
    return [replace(row, per_second=_per_second(row, batch * load.per_sample)) for row in rows]


def _per_second(row: Row, count: int) -> float | None:
    return None if row.timing is None else count / (row.timing.median_ms / 1e3)


def _forward(contestant: Contestant, load: Load, inputs: Tensor, device: torch.device) -> Forward:
    model: Callable[[Tensor], Tensor] = contestant.model
    if load.compiled:
        model = compiled(contestant.model)

    def forward() -> Tensor:
        with contestant.in_backend(), _autocast(device, load.amp):
            return model(inputs)

    return forward


def _work(contestant: Contestant, load: Load, forward: Forward) -> Callable[[], object]:
    """One inference, or one training step."""
    if not load.train:

        def infer() -> object:
            with torch.inference_mode():
                return forward()

        return infer
    # A rate of zero does all the work of a step and leaves the model as it is.
    optimiser = torch.optim.SGD(contestant.model.parameters(), lr=0.0, momentum=0.9)

    def step() -> object:
        with contestant.in_backend():
            loss_of(forward()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return None

    return step


def _checked_as_timed(row: Row, contestant: Contestant, load: Load, inputs: Tensor, forward: Forward) -> Row:
    """The row with a second check, of what is about to be timed, where a plain run finds the room."""

    def plain(samples: Tensor, dtype: torch.dtype | None = load.amp) -> Tensor:
        backend = nullcontext() if contestant.forced is None else use_backend("eager")
        with backend, _autocast(samples.device, dtype):
            out: Tensor = contestant.model(samples)
            return out

    if load.train:
        precise = None if load.amp is None else lambda: plain(inputs, None)
        try:
            check = check_training(forward, lambda: plain(inputs), contestant.model, precise)
        except torch.OutOfMemoryError:
            contestant.model.zero_grad(set_to_none=True)
            check = None
    else:
        check = check_inference(forward, lambda: plain(inputs[:1]), load.amp is not None)
    return row if check is None else with_check(replace(row, as_timed=check), check)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
