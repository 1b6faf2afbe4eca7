"""`bench attention` and `info --check`: operators, compared with the reference before they are timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecoformer.attention import Attention, HashedAttention, ReformerAttention
from ecoformer.attention.registry import attention_class, create_attention
from ecoformer.benchmarking.contestants import (
    QUICK_FIT,
    Contestant,
    ExplicitAttention,
    Heads,
    bound_of,
    compiled,
    hashed_backends,
    median_error,
    reference_attention,
    relative_error,
    steady_tokens,
)
from ecoformer.benchmarking.measuring import Bench, Progress, Work, no_progress, synchronize
from ecoformer.benchmarking.results import Check, Row, Run
from ecoformer.hashing import Hasher

MECHANISMS = ("softmax", "eco", "performer", "linformer", "reformer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SLICE, _ODD = 1024, 333
"""Lengths at which the quadratic reference in fp64 takes less than a second."""
SELF_CHECKS = (
    ((4, 5, 196, 64), 16, 25, False),
    ((4, 1, 3136, 32), 16, 25, False),
    ((4, 2, 1024, 32), 32, 48, False),
    ((2, 2, 300, 96), 8, 10, False),
    ((2, 2, 700, 64), 16, 25, True),
)
"""Shape, bits, support samples and causal order: short heads and long ones, common codes and large ones."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a shape, and how."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = False
    backward: bool = False
    compiled: bool = False
    seed: int = 0


def bench_attention(settings: Sequence[Setting], mechanisms: Sequence[str], bench: Bench) -> Run:
    """Time mechanisms from tokens to output, hashing included; softmax by SDPA is always among them.

    Args:
        settings: shapes and how to run them.
        mechanisms: registered names, and "explicit" for softmax with its N x N matrix.
        bench: how to measure.
    """
    for setting in settings:
        contestants, hashers = _contestants(dict.fromkeys(("softmax", *mechanisms)), setting, bench.run)
        inputs = draw_inputs(setting, hashers)
        rows = []
        for contestant in contestants:
            bench.progress(f"{setting.shape}: checking {contestant.mechanism} ({contestant.backend})")
            rows.append(checked(contestant, inputs, setting))
            rows[-1].setting["graphs"] = bench.graphs
        bench.measure(rows, [work_of(contestant, inputs, setting.backward) for contestant in contestants])
    bench.run.notes = list(dict.fromkeys(bench.run.notes))
    return bench.run


def _contestants(names: Iterable[str], setting: Setting, run: Run) -> tuple[list[Contestant], list[Hasher]]:
    contestants: list[Contestant] = []
    hashers: list[Hasher] = []
    for name in names:
        if setting.is_causal and name != "explicit" and not attention_class(name).supports_causal:
            run.notes.append(f"{name} has no causal order and is left out")
            continue
        layer = build_layer(name, setting)
        contestants += contestants_of(layer, setting)
        if isinstance(layer, HashedAttention):
            hashers.append(layer.hasher)
    return contestants, hashers


def build_layer(mechanism: str, setting: Setting, **options: Any) -> Attention:
    """A layer with default settings except `options`; its hash functions are fitted to random tokens."""
    _, heads, tokens, dim = setting.shape
    if mechanism == "explicit":
        layer: Attention = ExplicitAttention(heads * dim, heads)
    else:
        if attention_class(mechanism).sized_by_tokens:
            options["seq_len"] = tokens
        layer = create_attention(mechanism, heads * dim, heads, **options)
    layer = layer.to(setting.device, setting.dtype).eval().requires_grad_(False)
    if isinstance(layer, HashedAttention):
        generator = torch.Generator().manual_seed(setting.seed)
        samples = torch.randn(2, heads, 128, dim, generator=generator).to(setting.device)
        layer.hasher.fit(samples, options=QUICK_FIT)
    return layer


def contestants_of(layer: Attention, setting: Setting) -> list[Contestant]:
    """The contestants of one layer; hashed attention has one for each backend."""
    module = Heads(layer, setting.is_causal)
    if not isinstance(layer, HashedAttention):
        backend = {"softmax": "sdpa", "explicit": "N x N matrix"}.get(layer.name, "eager")
        return [Contestant(layer.name, backend, module)]
    able = hashed_backends([layer.hasher], setting.device, setting.backward, setting.dtype)
    found = [Contestant(layer.name, name, module, name) for name in able]
    if setting.compiled:
        found.append(Contestant(layer.name, "eager, compiled", module, "eager", compiled(module)))
    return found


def draw_inputs(setting: Setting, hashers: Sequence[Hasher] = ()) -> list[Tensor]:
    """Random q, k, v and gradient of the output. No code of q depends on rounding."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)

    def draw() -> Tensor:
        return torch.randn(setting.shape, generator=generator, device=setting.device).to(setting.dtype)

    projections = [partial(hasher.project, valid=None) for hasher in hashers]
    return [steady_tokens(draw, projections, setting.backward), draw(), draw(), draw()]


def work_of(contestant: Contestant, inputs: Sequence[Tensor], backward: bool) -> Work:
    """What is timed: the output and, with `backward`, the gradients of the inputs."""
    call = contestant.call or contestant.module
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
    shared = isinstance(contestant.module, Heads) and contestant.module.layer.shared_qk
    leaves = (q, v) if shared else (q, k, v)

    def work() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            out = call(q, k, v)
        return [out, *torch.autograd.grad(out, leaves, inputs[3])] if backward else [out]

    return Work(work, contestant.use)


def checked(contestant: Contestant, inputs: Sequence[Tensor], setting: Setting) -> Row:
    """A row with its check, or with the reason why it gets no time."""
    about: dict[str, Any] = {"shape": list(setting.shape), "dtype": str(setting.dtype).removeprefix("torch.")}
    about |= {"backward": setting.backward, "causal": setting.is_causal}
    row = Row(contestant.mechanism, contestant.backend, about)
    row.checked = row.check(lambda: _compare(contestant, inputs, setting))
    return row


def _compare(contestant: Contestant, inputs: Sequence[Tensor], setting: Setting) -> Check:
    """Compare with the dense truth on the first tokens, and hashed attention also on the whole shape."""
    batch, heads, tokens, _ = setting.shape
    longest = min(tokens, _SLICE if heads <= 16 else _SLICE // 4)
    cuts = {(max(1, min(batch, 8 // heads)), length) for length in (longest, min(_ODD, longest))}
    if contestant.call is not None:  # every other length would be compiled again
        cuts.clear()
    if contestant.use is not None:
        cuts.add((batch, tokens))
    layer = contestant.module.layer if isinstance(contestant.module, Heads) else None
    measure = median_error if isinstance(layer, ReformerAttention) else relative_error
    # For many tokens fp64 would take too much memory.
    many = contestant.use is not None and math.prod(setting.shape) > 1 << 26
    dtype = torch.float32 if many else torch.float64
    truth = Contestant("", "", copy.deepcopy(contestant.module).to(dtype))
    bound, shares = bound_of(setting.dtype, setting.backward), []
    with reference_attention(truth.module) as long:
        for samples, length in cuts:
            part = [x[:samples, :, :length] for x in inputs]
            found = work_of(contestant, part, setting.backward)()
            expected = work_of(truth, [x.to(dtype) for x in part], setting.backward)()
            shares.append(measure(found, expected) / bound_of(setting.dtype, setting.backward, length))
    work_of(contestant, inputs, setting.backward)()  # see that it runs at its own length
    synchronize(setting.device)
    worst = float(torch.tensor(shares, dtype=torch.float64).max())  # NaN if any is
    names = {"softmax": "dense softmax in fp64", "explicit": "SDPA in fp64"}
    against = "the reference in fp64" if contestant.use else names.get(contestant.mechanism, "itself in fp64")
    return Check(
        worst * bound, bound, against + (", eager at full length" if long and contestant.use else "")
    )


def check_backends(device: torch.device, progress: Progress = no_progress) -> Iterator[Row]:
    """Compare the fused backends with the reference: compiler, driver and device may all break them."""
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    for shape, bits, support, causal in SELF_CHECKS:
        for dtype in (torch.float32, *half):
            setting = Setting(shape, dtype, device, causal)
            layer = build_layer("eco", setting, bits=bits, support=support)
            if not isinstance(layer, HashedAttention):
                raise TypeError("another mechanism, without hashing, is registered as 'eco'")
            for backward in (False, True):
                how = replace(setting, backward=backward)
                inputs: list[Tensor] = []
                for contestant in contestants_of(layer, how):
                    if contestant.use == "eager":
                        continue
                    progress(f"{contestant.backend}: {shape} in {dtype}, {bits} bits")
                    inputs = inputs or draw_inputs(how, [layer.hasher])
                    row = checked(contestant, inputs, how)
                    row.setting |= {"bits": bits, "support": support}
                    yield row
