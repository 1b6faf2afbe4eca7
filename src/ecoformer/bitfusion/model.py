"""Complete models on the array: the products of every layer, by the shapes that flow through it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ecoformer import operations
from ecoformer.accounting.layers import PARTS, layers_of
from ecoformer.attention import attention_class, create_attention

from .array import BitFusion, pair, whole
from .ops import Convolution, FullyConnected, Op, Work
from .simulation import PAPER_ARRAY, Total, simulate_all

NOT_SIMULATED = "normalisation, activations, softmax, signs, residual sums, pooling, embeddings"
"""What the array does not compute, so that no figure includes it."""

_ELSEWHERE = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.Embedding, nn.PReLU)
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
        """Multiply-accumulates."""
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
        """The entire model."""
        return simulate_all(self.work.work, self.array)

    def of(self, part: str) -> Total:
        """All layers of "attention", "ffn" or "other"."""
        work = [item for layer in self.work.layers if layer.part == part for item in layer.work]
        return simulate_all(work, self.array)

    def to_dict(self) -> dict[str, Any]:
        """Totals, parts and layers, for JSON."""
        parts = {part: _brief(self.of(part)) for part in PARTS}
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
    its input from DRAM and writes 32-bit sums back, as in the paper's table; layers are not fused. The
    projections of queries, keys and values are separate products, also where a module has one matrix.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        input_size: the input's shape with its batch, such as (1, 3, 224, 224); or an input; or keyword
            arguments.
        bits: of activations and weights, one number or (activations, weights). Keys, values and sums over
            them are activations, whichever side of the array they are on.
        code_bits: of one bit of a code in hashed attention. Default: as activations, which is the paper's
            reading (its printed rows sum 8-bit operands over the keys); 1 moves codes as what they are.
    """
    of_values, of_weights = pair("bits", bits)
    of_codes = of_values if code_bits is None else whole("code_bits", code_bits)
    widths = {"value": of_values, "weight": of_weights, "code": of_codes}
    layers, uncounted = [], []
    for layer in layers_of(model, input_size):
        work = None if layer.operations is None else _work(layer.operations, widths)
        if work:
            layers.append(LayerWork(layer.name, layer.kind, layer.part, work))
        elif work is None and not isinstance(layer.module, _ELSEWHERE):
            uncounted.append(layer.label)
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
    found = model_work(layer, (batch, tokens, dim), code_bits=code_bits)
    if found.uncounted:
        raise ValueError(f"{mechanism} has no known products: define {type(layer).__name__}.operations")
    return found.work


def _brief(total: Total) -> dict[str, Any]:
    facts = total.to_dict()
    return {key: facts[key] for key in ("cycles", "compute_cycles", "stall_cycles", "energy_nj")}


def _work(found: operations.Operations, bits: dict[str, int]) -> Work | None:
    """Products and convolutions as the array runs them; None if the shape of one is unknown."""
    work: Counter[Op] = Counter()
    for op in found:
        if isinstance(op, operations.Product):
            product = FullyConnected(op.rows, op.inner, op.columns, bits[op.left], bits[op.right])
            work[product] += op.times
        elif isinstance(op, operations.Convolution):
            if op.padding is None:
                return None
            sizes = (*op.size, op.kernel, op.stride, op.padding, op.dilation, op.groups)
            widths = (bits["value"], bits["weight"])
            convolution = Convolution(op.batch, op.in_channels, op.out_channels, *sizes, *widths)
            if (convolution.out_height, convolution.out_width) != op.output:
                return None  # a subclass that pads its input itself
            work[convolution] += 1
    return list(work.items())
