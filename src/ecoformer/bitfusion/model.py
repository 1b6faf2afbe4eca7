"""Whole models on the array: the products of every layer, by the shapes that flow through it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.foreign import attending, with_parts
from ecoformer.accounting.parts import Parts
from ecoformer.accounting.shapes import Call, trace
from ecoformer.attention import Attention, attention_class, create_attention
from ecoformer.attention.local import LocalBranch
from ecoformer.conversion.layers import Found, find_layers
from ecoformer.running import NOT_TAKEN, not_taken

from .array import BitFusion
from .checks import pair, whole
from .mechanisms import Sizes, attend_work, softmax_work
from .ops import Convolution, FullyConnected
from .simulation import PAPER_ARRAY, Total, simulate_all
from .workloads import Work

__all__ = [
    "NOT_SIMULATED",
    "LayerWork",
    "ModelResult",
    "ModelWork",
    "attention_layer",
    "model_work",
    "simulate_model",
]

NOT_SIMULATED = "normalisation, activations, softmax, signs, residual sums, pooling, embeddings"
"""What the array does not compute, so that no figure includes it."""

_ELSEWHERE = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.Embedding, nn.PReLU)
_FUSED = {"qkv": 3, "kv": 2}
"""Projections that layers store as one matrix, by the usual names."""
Bits = int | tuple[int, int]


@dataclass(frozen=True)
class LayerWork:
    """A layer: its name, its class or mechanism, the part of the model it belongs to, and its products."""

    name: str
    kind: str
    part: str
    work: Work


@dataclass(frozen=True)
class ModelWork:
    """The products of a model; `uncounted` are layers whose products are not known."""

    model: str
    layers: tuple[LayerWork, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def work(self) -> Work:
        """All products, as `simulate_all` takes them."""
        return [item for layer in self.layers for item in layer.work]

    @property
    def macs(self) -> int:
        """Multiplications with an addition each."""
        return sum(op.macs * times for op, times in self.work)


@dataclass(frozen=True)
class ModelResult:
    """What a model costs on the array, layer by layer."""

    work: ModelWork
    array: BitFusion

    @cached_property
    def totals(self) -> tuple[Total, ...]:
        """One for each layer of `work.layers`."""
        return tuple(simulate_all(layer.work, self.array) for layer in self.work.layers)

    @cached_property
    def total(self) -> Total:
        """The whole model."""
        return simulate_all(self.work.work, self.array)

    def of(self, part: str) -> Total:
        """All layers of "attention", "ffn" or "other"."""
        work = [item for layer in self.work.layers if layer.part == part for item in layer.work]
        return simulate_all(work, self.array)

    def to_dict(self) -> dict[str, Any]:
        """The whole, its parts and the layers, as JSON can hold them."""
        parts = {part: _brief(self.of(part)) for part in ("attention", "ffn", "other")}
        layers = [
            {"name": layer.name, "kind": layer.kind, "part": layer.part} | _brief(total)
            for layer, total in zip(self.work.layers, self.totals, strict=True)
        ]
        more = {"model": self.work.model, "macs": self.work.macs, "parts": parts, "layers": layers}
        left_out = {"uncounted": list(self.work.uncounted), "not_simulated": NOT_SIMULATED}
        return self.total.to_dict() | more | left_out


def simulate_model(
    model: nn.Module,
    input_size: Any,
    *,
    bits: Bits = 8,
    code_bits: int | None = None,
    array: BitFusion = PAPER_ARRAY,
) -> ModelResult:
    """Cycles and energy of one forward pass of `model`; the arguments are those of `model_work`."""
    return ModelResult(model_work(model, input_size, bits=bits, code_bits=code_bits), array)


def model_work(
    model: nn.Module, input_size: Any, *, bits: Bits = 8, code_bits: int | None = None
) -> ModelWork:
    """The matrix products and convolutions of one forward pass, layer by layer.

    Nothing is computed: the model runs on meta tensors, its weights stay where they are. Every layer reads
    its input from DRAM and writes 32-bit sums back, as in the paper's table; layers are not fused.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        input_size: the input's shape with its batch, such as (1, 3, 224, 224); or an input; or keyword
            arguments.
        bits: of activations and weights, one number or (activations, weights). Keys, values and sums over
            them are activations, whichever side of the array they stand on.
        code_bits: of one bit of a code in hashed attention. Default: as activations, which is the paper's
            reading (its printed rows sum 8-bit operands over the keys); 1 moves codes as what they are.

    Projections of queries, keys and values are separate products, as in the paper, also where a module
    stores them as one matrix (`qkv` or `kv`).
    """
    of_activations, of_weights = pair("bits", bits)
    of_codes = of_activations if code_bits is None else whole("code_bits", code_bits)
    widths = (of_activations, of_weights, of_codes)
    try:
        calls = trace(model, input_size)
    except NOT_TAKEN as error:
        raise not_taken(model, input_size, error) from error
    foreign = {f.layer: f for f in find_layers(model) if not f.ours}
    parts, layers, uncounted = Parts(model), [], []
    for call, latest in with_parts(calls):
        kind = call.module.name if isinstance(call.module, Attention) else type(call.module).__name__
        work = _work_of(call, foreign.get(call.module), latest, widths)
        if work is None:
            uncounted.append(f"{call.name or 'the model itself'} ({kind})")
        elif work:
            layers.append(LayerWork(call.name, kind, parts.of(call.name), work))
    return ModelWork(type(model).__name__, tuple(layers), tuple(dict.fromkeys(uncounted)))


def attention_layer(
    mechanism: str,
    *,
    batch: int = 16,
    tokens: int = 3136,
    dim: int = 32,
    code_bits: int | None = None,
    **settings: Any,
) -> Work:
    """The products of one attention layer with one head; by default of the paper's hardware table.

    The work is what `model_work` finds in a model of this one layer. Other keyword arguments are settings of
    the mechanism, such as `bits` and `support` of "eco".
    """
    batch, tokens, dim = whole("batch", batch), whole("tokens", tokens), whole("dim", dim)
    if attention_class(mechanism).sized_by_tokens:
        settings.setdefault("seq_len", tokens)
    with torch.device("meta"):
        layer = create_attention(mechanism, dim, 1, **settings)
    return model_work(layer, (batch, tokens, dim), code_bits=code_bits).work


def _brief(total: Total) -> dict[str, Any]:
    facts = total.to_dict()
    return {key: facts[key] for key in ("cycles", "compute_cycles", "stall_cycles", "energy_nj")}


Widths = tuple[int, int, int]


def _work_of(call: Call, found: Found | None, latest: Mapping[str, Call], widths: Widths) -> Work | None:
    """The products of one call: none where the layer has none, None where they are not known."""
    module: Any = call.module
    if isinstance(module, Attention):
        batch, tokens = call.inputs[0], call.inputs[-2]
        return attend_work(module, Sizes(batch, module.num_heads, tokens, module.head_dim, *widths))
    if isinstance(module, nn.Linear):
        rows, parts = math.prod(call.inputs[:-1]), _FUSED.get(call.name.rpartition(".")[2], 1)
        parts = 1 if module.out_features % parts else parts
        return [(FullyConnected(rows, module.in_features, module.out_features // parts, *widths[:2]), parts)]
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _convolution(call, module, widths)
    if isinstance(module, LocalBranch):
        return _local(call, module, widths)
    if isinstance(module, _ELSEWHERE):
        return []
    work = _softmax(call, found, latest, widths)
    is_leaf = not any(True for _ in module.children())
    has_own = any(True for _ in module.parameters(recurse=False))
    unknown = found is not None or call.works or (is_leaf and has_own)
    return [] if work is None and not unknown else work


def _convolution(call: Call, module: Any, widths: Widths) -> Work | None:
    """A convolution of an image, or of a sequence as an image of one line."""
    axes = len(module.kernel_size)
    padding = (0,) * axes if module.padding == "valid" else module.padding
    if isinstance(padding, str) or len(call.inputs) != axes + 2:
        return None
    height, width = _both(call.inputs[2:], 1)
    op = Convolution(
        call.inputs[0],
        module.in_channels,
        module.out_channels,
        height,
        width,
        kernel=_both(module.kernel_size, 1),
        stride=_both(module.stride, 1),
        padding=_both(padding, 0),
        dilation=_both(module.dilation, 1),
        groups=module.groups,
        activation_bits=widths[0],
        weight_bits=widths[1],
    )
    as_called = (op.out_height, op.out_width) == _both(call.output[2:], 1)
    return [(op, 1)] if as_called else None  # subclasses may pad their input themselves


def _local(call: Call, module: LocalBranch, widths: Widths) -> Work:
    batch, tokens, dim = call.inputs
    height, width = (1, tokens) if len(module.sizes) == 1 else call.argument("grid")
    kernel = _both(module.sizes, 1)
    padding = (kernel[0] // 2, kernel[1] // 2)
    bits = {"activation_bits": widths[0], "weight_bits": widths[1]}
    return [(Convolution(batch, dim, dim, height, width, kernel, 1, padding, 1, dim, **bits), 1)]


def _both(sizes: tuple[int, ...], vertical: int) -> tuple[int, int]:
    """Two axes, where a sequence has one."""
    return (vertical, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _softmax(call: Call, found: Found | None, latest: Mapping[str, Call], widths: Widths) -> Work | None:
    """Softmax attention of another library."""
    seen = attending(call, found, latest)
    if seen is None:
        return None
    projections = Counter(FullyConnected(*sizes, *widths[:2]) for sizes in seen.projections)
    sizes = Sizes(seen.groups, seen.heads, seen.queries, seen.dim // seen.heads, *widths)
    return [*projections.items(), *softmax_work(sizes, seen.keys)]
