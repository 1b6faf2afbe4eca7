"""`bench model` and `bench fit`: models with one mechanism or another, and learning hash functions."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.attention import Attention, SoftmaxAttention
from ecoformer.benchmarking.contestants import (
    Contestant,
    ExplicitAttention,
    check_inference,
    check_training,
    compiled,
    hashed_backends,
    loss_of,
)
from ecoformer.benchmarking.measuring import Bench, Work, synchronize
from ecoformer.benchmarking.results import Check, Row, Run, Timing, device_name
from ecoformer.conversion import convert
from ecoformer.hashing import FitOptions, KernelHasher, hashers_of


@dataclass(frozen=True)
class Load:
    """What models are given, and how they run.

    Attributes:
        make: makes a batch of so many samples on the CPU: images, or the tokens of texts (B, N).
        about: what the rows say about it.
        train: run training steps, with an optimiser that changes nothing.
        amp: dtype of autocast.
    """

    make: Callable[[int], Tensor]
    about: dict[str, Any]
    train: bool = False
    compiled: bool = False
    channels_last: bool = False
    amp: torch.dtype | None = None


def bench_models(
    model: nn.Module, mechanisms: Sequence[str], load: Load, batches: Sequence[int], bench: Bench
) -> Run:
    """Time copies of `model`, converted to each mechanism; softmax by SDPA is always among them.

    A model whose attention holds only codes cannot be converted, and is timed as it is.

    Args:
        model: any model that `ecoformer.convert` knows; it stays unchanged.
        mechanisms: registered names, "native" for the model as it is, and "explicit" for softmax with its
            N x N matrix.
        load: what goes in.
        batches: batch sizes, measured one after another.
        bench: how to measure.
    """
    contestants: list[Contestant] = []
    names = dict.fromkeys(("softmax", *mechanisms))
    if any(isinstance(module, Attention) and module.projects_to_codes for module in model.modules()):
        names = dict.fromkeys(["native"])
        bench.run.notes.append("its attention holds only codes, not queries and keys: timed as it is")
    for name in names:
        bench.progress(f"converting to {name}")
        contestants += _contestants(model, name, load, bench.device)
    for batch in batches:
        _bench_batch(contestants, load, batch, bench)
    return bench.run


def _contestants(model: nn.Module, name: str, load: Load, device: torch.device) -> list[Contestant]:
    made = copy.deepcopy(model)
    if name != "native":
        convert(made, "softmax" if name == "explicit" else name, example=load.make(1))
    if name == "explicit":
        make_explicit(made)
    made = made.to(device).train(load.train)
    if load.channels_last:
        made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if hashers := hashers_of(made):
        for hasher in hashers.values():
            hasher.fitted.fill_(True)  # no warning: random hash functions take the same time
        able = hashed_backends(hashers.values(), device, load.train)
        return [Contestant(name, backend, made, backend) for backend in able]
    return [Contestant(name, {"softmax": "sdpa", "explicit": "N x N matrix"}.get(name, "eager"), made)]


def make_explicit(model: nn.Module) -> nn.Module:
    """Replace SDPA by the explicit matrix in every softmax layer of `model`, in place."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is SoftmaxAttention:
                setattr(owner, name, ExplicitAttention.from_softmax(child))
    return model


def _bench_batch(contestants: list[Contestant], load: Load, batch: int, bench: Bench) -> None:
    inputs = load.make(batch).to(bench.device)
    if load.channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    counted, number = ("images", batch) if inputs.is_floating_point() else ("tokens", inputs.numel())
    rows: list[Row] = []
    works: list[Work | None] = []
    for contestant in contestants:
        backend = contestant.backend + (", compiled" if load.compiled else "")
        rows.append(Row(contestant.mechanism, backend, load.about | {"batch": batch}, counted=counted))
        bench.progress(f"batch {batch}: checking {rows[-1].label}")
        works.append(_warm_up(contestant, load, inputs, rows[-1]))
    bench.measure(rows, works, items=batch)
    for row in rows:
        if row.timing is not None:
            row.per_second = number / (row.timing.median_ms / 1e3)


def _warm_up(contestant: Contestant, load: Load, inputs: Tensor, row: Row) -> Work | None:
    """Check a contestant and run it once as it is timed; None, and a failure in the row, if it cannot run."""
    works: list[Work] = []

    def check() -> Check:
        timed = replace(contestant, call=_forward(contestant.module, load))
        found = _compare(timed, load, inputs)
        works.append(Work(_step(timed, load, inputs), contestant.use))
        works[0]()
        synchronize(inputs.device)
        return found

    row.checked = row.check(check)
    return works[0] if works else None


def _compare(timed: Contestant, load: Load, inputs: Tensor) -> Check:
    """Compare exactly what is timed with a plain run of the same model, hashed attention by eager.

    In training these are gradients. A model that draws random numbers, or whose plain run does not fit into
    memory, is compared by its output in eval mode only.
    """
    module, half, eager = timed.module, load.amp is not None, replace(load, compiled=False)
    plain = replace(timed, use=timed.use and "eager", call=_forward(module, eager))
    if not load.train:
        return check_inference(lambda: timed(inputs), lambda: plain(inputs[:1]), half)
    module.eval()
    check = check_inference(
        lambda: replace(plain, use=timed.use)(inputs[:1]), lambda: plain(inputs[:1]), half
    )
    module.train()
    if not check.passed:
        return check
    precise = (
        partial(replace(plain, call=_forward(module, replace(eager, amp=None))), inputs) if half else None
    )
    try:
        gradients = check_training(partial(timed, inputs), partial(plain, inputs), module, precise)
    except torch.OutOfMemoryError:
        module.zero_grad(set_to_none=True)
        gradients = None
    return gradients or check


def _forward(module: nn.Module, load: Load) -> Callable[[Tensor], Tensor]:
    """The model as it is timed: compiled, in the precision asked for; of several outputs the first."""
    call = compiled(module) if load.compiled else module

    def forward(inputs: Tensor) -> Tensor:
        with nullcontext() if load.amp is None else torch.autocast(inputs.device.type, load.amp):
            out: Any = call(inputs)
        first: Tensor = out if isinstance(out, Tensor) else out[0]
        return first

    return forward


def _step(timed: Contestant, load: Load, inputs: Tensor) -> Callable[[], object]:
    """One inference, or one training step."""
    call = timed.call or timed.module
    if not load.train:
        return torch.inference_mode()(lambda: call(inputs))
    # A rate of zero does all the work of a step and leaves the model as it is.
    optimiser = torch.optim.SGD(timed.module.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        loss_of(call(inputs)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def bench_fit(hasher: KernelHasher, tokens: Tensor, repeats: int = 3) -> Run:
    """Time how long `hasher` takes to learn from tokens (B, H, N, D).

    It must do better than random hash functions. There is no warm-up, because each fit takes seconds.
    """
    untaught = copy.deepcopy(hasher)
    untaught.fit(tokens, options=FitOptions(steps=0, start="random", support="random"))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        hasher.fit(tokens, seed=0)
        synchronize(tokens.device)
        times.append((time.perf_counter() - start) * 1e3)

    def check() -> Check:
        found, random = (each.quality(tokens[:4, :, :512]).objective for each in (hasher, untaught))
        return Check(found / random, 1.0, "the objective of random hash functions")

    row = Row("eco", "eager", {"shape": list(tokens.shape), "bits": hasher.bits, "support": hasher.support})
    row.checked = row.check(check)
    row.timing = None if row.failure else Timing.of(times)
    return Run(device_name(tokens.device), rows=[row])
