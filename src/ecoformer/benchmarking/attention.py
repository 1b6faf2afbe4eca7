"""`bench attention` and `info --check`: operators, compared with fp64 before they are timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecoformer import reference
from ecoformer.attention import Attention, HashedAttention, ReformerAttention, SoftmaxAttention
from ecoformer.attention.registry import attention_class, create_attention
from ecoformer.backends.hashing import scaled
from ecoformer.benchmarking.contestants import (
    Contestant,
    ExplicitAttention,
    Heads,
    bound_of,
    compiled,
    hashed_backends,
    median_error,
    relative_error,
)
from ecoformer.benchmarking.measuring import Bench, Progress, Work, no_progress, synchronize
from ecoformer.benchmarking.results import Check, Row, Run
from ecoformer.hashing import Hasher

MECHANISMS = ("softmax", "eco", "sharp_eco", "performer", "linformer", "reformer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SLICE = 1024
"""Tokens at which quadratic attention in fp64 takes less than a second."""
_DENSE = 1 << 26
"""Largest number of affinities that the dense reference computes."""
_PAPER = ("eco", "sharp_eco", "klsh_eco", "lsh_eco", "bi_eco")
"""Mechanisms that the reference computes."""
_MARGIN = 1e-4
"""Tokens whose projections are closer than this to a threshold are drawn again: rounding decides there."""
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
        if (
            layer.projects_to_codes
            and isinstance(layer, HashedAttention)
            and layer.hasher.bits > layer.head_dim
        ):
            run.notes.append(f"{name} needs D >= {layer.hasher.head_dim} here and is left out")
            continue
        contestants += contestants_of(layer, setting)
        if isinstance(layer, HashedAttention):
            hashers.append(layer.hasher)
    return contestants, hashers


def build_layer(mechanism: str, setting: Setting, **options: Any) -> Attention:
    """A layer with default settings except `options`; its hash functions are random."""
    _, heads, tokens, dim = setting.shape
    if mechanism == "explicit":
        layer: Attention = ExplicitAttention(heads * dim, heads)
    else:
        if attention_class(mechanism).sized_by_tokens:
            options["seq_len"] = tokens
        layer = create_attention(mechanism, heads * dim, heads, **options)
    layer = layer.to(setting.device, setting.dtype).eval().requires_grad_(False)
    if isinstance(layer, HashedAttention):
        layer.hasher.fitted.fill_(True)
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


@torch.no_grad()
def draw_inputs(setting: Setting, hashers: Sequence[Hasher] = ()) -> list[Tensor]:
    """Random q, k, v and gradient of the output.

    No code of q or k depends on rounding: tokens whose projections are close to zero are drawn again and, for
    the backward, those close to ±1, where the straight-through gradient stops.
    """
    generator = torch.Generator(setting.device).manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(setting.shape, generator=generator, device=setting.device).to(setting.dtype)

    def project(tokens: Tensor, hasher: Hasher) -> Tensor:
        y = hasher.project(tokens[..., : hasher.head_dim].float())
        return y if hasher.reach is None else scaled(y)

    def steady() -> Tensor:
        tokens = draw()
        for _ in range(100):
            unsteady = torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
            for hasher in hashers:
                size = project(tokens, hasher).abs()
                close = size < _MARGIN
                if setting.backward:
                    close |= (size - 1).abs() < _MARGIN
                unsteady |= close.any(dim=-1)
            if not unsteady.any():
                break
            tokens[unsteady] = draw()[unsteady]
        return tokens

    return [steady(), steady(), draw(), draw()]


def work_of(contestant: Contestant, inputs: Sequence[Tensor], backward: bool) -> Work:
    """What is timed: the output and, with `backward`, the gradients of the inputs."""
    call = contestant.call or contestant.module
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
    heads: Any = contestant.module
    leaves = (q, v) if heads.shared else (q, k, v)

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
    """Compare with fp64: hashed attention with the reference, or with eager where that takes too much memory.

    Softmax by SDPA and by its explicit matrix are compared with each other, other mechanisms with themselves,
    on the first tokens.
    """
    heads: Any = copy.deepcopy(contestant.module)
    (samples, _, length, _), dtype, against = setting.shape, torch.float64, "itself in fp64"
    if contestant.use is not None:
        if math.prod(setting.shape) > 1 << 26:  # fp64 would take too much memory
            dtype = torch.float32
        against = f"eager in {dtype}"
        if heads.layer.name in _PAPER and math.prod(setting.shape[:3]) * length <= _DENSE:
            against, heads.layer.attend = "the reference in fp64", partial(_dense, heads.layer)
    else:
        samples, length = max(1, min(samples, 8 // setting.shape[1])), min(length, _SLICE)
    if isinstance(heads.layer, SoftmaxAttention):
        by_matrix = isinstance(heads.layer, ExplicitAttention)
        against = "SDPA in fp64" if by_matrix else "the N x N matrix in fp64"
        heads.layer = (SoftmaxAttention if by_matrix else ExplicitAttention)(
            heads.layer.dim, heads.layer.num_heads
        )
    part = [x[:samples, :, :length] for x in inputs]
    truth = Contestant("", "", heads.to(dtype), contestant.use and "eager")
    expected = work_of(truth, [x.to(dtype) for x in part], setting.backward)()
    measure = median_error if isinstance(heads.layer, ReformerAttention) else relative_error
    error = measure(work_of(contestant, part, setting.backward)(), expected)
    work_of(contestant, inputs, setting.backward)()  # see that it runs on all tokens
    synchronize(setting.device)
    return Check(error, bound_of(setting.dtype, setting.backward, length), against)


def _dense(
    layer: HashedAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    key_weight: Tensor | None = None,
) -> Tensor:
    codes_q = layer.hasher(q)
    codes_k = layer.hasher(k) if layer.separate else codes_q
    if layer.affinity is None:
        return reference.hash_attention(codes_q, codes_k, v, mask, is_causal, layer.bias)
    affinity = layer.affinity()
    weights = None if key_weight is None else key_weight.to(v.dtype)
    shared = (affinity.groups, affinity.beta, affinity.weight)
    return reference.grouped_attention(codes_q, codes_k, v, *shared, mask, is_causal, weights)


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
