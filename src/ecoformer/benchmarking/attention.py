"""`bench attention`: mechanisms side by side, each checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ecoformer.attention import HashedAttention, attention_class
from ecoformer.benchmarking.checking import (
    Call,
    bound_of,
    median_error,
    relative_error,
    steady_tokens,
)
from ecoformer.benchmarking.energy import EnergyBench
from ecoformer.benchmarking.graphs import require_graphs
from ecoformer.benchmarking.measuring import Measures, measured, say_if_busy
from ecoformer.benchmarking.operators import (
    Operator,
    Setting,
    build_layer,
    flash_linear_attention,
    operators_of,
)
from ecoformer.benchmarking.results import Check, Row, Run, device_name, failed, with_check
from ecoformer.benchmarking.timing import synchronize
from ecoformer.hashing import Hasher

MECHANISMS = ("softmax", "eco", "performer", "linformer", "reformer")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_SLICE = 1024
"""Tokens at which the reference, quadratic and in fp64, still answers within a second."""
_ODD = 333


@dataclass(frozen=True)
class Inputs:
    """Heads, and what comes back in the backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def cut(self, batch: int, tokens: int) -> Inputs:
        """The first tokens of the first samples."""
        return Inputs(*(x[:batch, :, :tokens] for x in (self.q, self.k, self.v, self.grad)))


def bench_attention(
    settings: Sequence[Setting],
    mechanisms: Sequence[str] = MECHANISMS,
    *,
    seconds: float = 1.0,
    energy: bool = False,
    memory: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Time mechanisms from tokens to output, hashing included; softmax by SDPA is always among them.

    Args:
        settings: shapes and how to run them, all on one device.
        mechanisms: registered names, and "explicit" for softmax with its N x N matrix.
        seconds: how long each contestant is timed, about.
        energy: measure energy too, which takes seconds more for each contestant.
        memory: measure the peak memory too.
        progress: told what is being done.
    """
    for name in mechanisms:
        if name != "explicit":
            attention_class(name)
    device = settings[0].device
    if any(setting.graphs for setting in settings):
        require_graphs(device)
    run = Run(device_name(device), torch.get_num_threads())
    names = list(dict.fromkeys(("softmax", *mechanisms)))
    meter = EnergyBench(device) if energy else None
    every: list[Measures] = []
    try:
        for setting in settings:
            operators, hashers = _contestants(names, setting, run)
            every.append(Measures(device, seconds, setting.graphs, memory, meter, progress))
            run.rows += _bench_one(operators, hashers, setting, every[-1])
    finally:
        if meter is not None:
            run.notes.append(meter.note)
            meter.close()
    say_if_busy(run, every)
    run.notes = list(dict.fromkeys(run.notes))
    return run


def _contestants(names: list[str], setting: Setting, run: Run) -> tuple[list[Operator], list[Hasher]]:
    operators: list[Operator] = []
    hashers: list[Hasher] = []
    for name in names:
        if setting.is_causal and name != "explicit" and not attention_class(name).supports_causal:
            run.notes.append(f"{name} has no causal order, so that it is not among the peers")
            continue
        layer = build_layer(name, setting)
        operators += operators_of(layer, setting)
        if isinstance(layer, HashedAttention):
            hashers.append(layer.hasher)
    peer, note = flash_linear_attention(setting)
    if peer is not None or setting.device.type == "cuda":
        run.notes.append(note)
    return (operators if peer is None else [*operators, peer]), hashers


def _bench_one(
    operators: list[Operator], hashers: list[Hasher], setting: Setting, measures: Measures
) -> list[Row]:
    inputs = draw_inputs(setting, hashers)
    rows: list[Row] = []
    works: dict[int, Callable[[], object]] = {}
    for index, operator in enumerate(operators):
        measures.progress(f"{setting.shape}: checking {operator.mechanism} ({operator.backend})")
        row = checked(operator, inputs, setting)
        if row.failure is None:
            works[index] = work_of(operator, inputs, setting.backward)
        rows.append(row)
    return measured(rows, works, measures, str(setting.shape))


def draw_inputs(setting: Setting, hashers: Sequence[Hasher] = ()) -> Inputs:
    """Random heads; no token's code hangs on rounding, so that results can be compared."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)

    def draw() -> Tensor:
        return torch.randn(setting.shape, generator=generator, dtype=torch.float32, device=setting.device).to(
            setting.dtype
        )

    return Inputs(steady_tokens(draw, hashers, setting.backward), draw(), draw(), draw())


def work_of(operator: Operator, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """The call that is timed."""
    call, (q, k, v), grad = operator.call, _arguments(operator, inputs, backward), inputs.grad
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return call(q, k, v)

        return forward
    leaves = (q, v) if operator.shared_qk else (q, k, v)
    return lambda: torch.autograd.grad(call(q, k, v), leaves, grad)


def _arguments(operator: Operator, inputs: Inputs, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
    return q, (q if operator.shared_qk else k), v


def checked(operator: Operator, inputs: Inputs, setting: Setting) -> Row:
    """A row with its check, or with the reason why it gets no time."""
    about: dict[str, Any] = {"shape": list(setting.shape), "dtype": str(setting.dtype).removeprefix("torch.")}
    about |= {"backward": setting.backward, "causal": setting.is_causal, "graphs": setting.graphs}
    row = Row(operator.mechanism, operator.backend, about)
    try:
        check = _compare(operator, inputs, setting)
        # What cannot run at its own length must not be timed.
        work_of(operator, inputs, setting.backward)()
        synchronize(setting.device)
    except Exception as error:
        return failed(row, error)
    return with_check(replace(row, checked=check), check)


def _compare(operator: Operator, inputs: Inputs, setting: Setting) -> Check:
    batch, heads, tokens, _ = setting.shape
    longest = min(tokens, _SLICE if heads <= 16 else _SLICE // 4)
    bound = bound_of(setting.dtype, setting.backward)
    shares = []
    if operator.sliced:
        for length in sorted({longest, min(_ODD, longest)}):
            few = inputs.cut(max(1, min(batch, 8 // heads)), length)
            shares.append(_error(operator, operator.truth, few, setting) / bound)
    if operator.whole is not None and (not operator.sliced or (batch, tokens) != (1, longest)):
        wider = bound_of(setting.dtype, setting.backward, tokens)
        shares.append(_error(operator, operator.whole, inputs, setting) / wider)
    worst = float(torch.tensor(shares, dtype=torch.float64).max())
    return Check(worst * bound, bound, operator.against)


def _error(operator: Operator, truth: Call, inputs: Inputs, setting: Setting) -> float:
    measure = median_error if operator.sorts else relative_error
    ours = _outputs(operator, operator.call, inputs, setting.backward)
    return measure(ours, _outputs(operator, truth, inputs, setting.backward))


def _outputs(operator: Operator, call: Call, inputs: Inputs, backward: bool) -> list[Tensor]:
    """The output and, with `backward`, the gradients of what went in."""
    q, k, v = _arguments(operator, inputs, backward)
    if not backward:
        with torch.no_grad():
            return [call(q, k, v)]
    out = call(q, k, v)
    leaves = (q, v) if operator.shared_qk else (q, k, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad.to(out.dtype))]
