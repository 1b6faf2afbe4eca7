"""Complete models on the array: the products of every layer, by the shapes that flow through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ecoformer.accounting.layers import PARTS, Part, layers_of
from ecoformer.operations import Counts

from .array import BitFusion
from .simulation import PAPER_ARRAY, Total, Work, simulate_all
from .tiling import Bits

NOT_SIMULATED = "normalisation, activations, softmax, signs, residual sums, pooling, embeddings"
"""What the array does not compute, so that no figure includes it."""

_ELSEWHERE = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.Embedding, nn.PReLU)


@dataclass(frozen=True)
class LayerResult:
    """A layer: its name, its class or mechanism, its part of the model, its products and their cost."""

    name: str
    kind: str
    part: Part
    work: Work
    total: Total


@dataclass(frozen=True)
class ModelResult:
    """What a model costs on the array; `uncounted` are layers whose products are not known."""

    model: str
    array: BitFusion
    layers: tuple[LayerResult, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> Total:
        """The entire model."""
        return sum((layer.total for layer in self.layers), Total.zero(self.array))

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return sum(op.macs for layer in self.layers for op, _ in layer.work)

    def of(self, part: Part) -> Total:
        """All layers of "attention", "ffn" or "other"."""
        return sum((layer.total for layer in self.layers if layer.part == part), Total.zero(self.array))

    def to_dict(self) -> dict[str, Any]:
        """Totals, parts and layers, for JSON."""
        return self.total.to_dict() | {
            "model": self.model,
            "macs": self.macs,
            "parts": {part: _brief(self.of(part)) for part in PARTS},
            "layers": [
                {"name": layer.name, "kind": layer.kind, "part": layer.part} | _brief(layer.total)
                for layer in self.layers
            ],
            "uncounted": list(self.uncounted),
            "not_simulated": NOT_SIMULATED,
        }


def simulate_model(
    model: nn.Module,
    input_size: Any,
    *,
    bits: Bits = (8, 8),
    code_bits: int | None = None,
    array: BitFusion = PAPER_ARRAY,
) -> ModelResult:
    """Cycles and energy of the matrix products and convolutions of one forward pass, layer by layer.

    Nothing is computed: the model runs on meta tensors, its weights stay where they are. Every layer reads
    its input from DRAM and writes 32-bit sums back, as in the paper's table; layers are not fused. The
    projections of queries, keys and values are separate products, also where a module has one matrix.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        input_size: the input's shape with its batch, such as (1, 3, 224, 224); or an input; or keyword
            arguments.
        bits: of activations and weights. Keys, values and sums over them are activations, whichever side of
            the array they are on.
        code_bits: of one bit of a code in hashed attention. Default: as activations, which is the paper's
            reading (its printed rows sum 8-bit operands over the keys); 1 moves codes as what they are.
        array: the accelerator.
    """
    widths = {"value": bits[0], "weight": bits[1], "code": bits[0] if code_bits is None else code_bits}
    layers, uncounted = [], []
    for layer in layers_of(model, input_size):
        if layer.operations is None:
            if not isinstance(layer.module, _ELSEWHERE):
                uncounted.append(layer.label)
            continue
        products = [op for op in layer.operations if not isinstance(op, Counts)]
        work: Work = [(op, (widths[op.left], widths[op.right])) for op in products]
        if work:
            total = simulate_all(work, array)
            layers.append(LayerResult(layer.name, layer.kind, layer.part, work, total))
    name = type(model).__name__
    if not layers:
        raise ValueError(f"BitFusion simulates no layer of {name}: it has no linear layer or convolution")
    return ModelResult(name, array, tuple(layers), tuple(dict.fromkeys(uncounted)))


def _brief(total: Total) -> dict[str, Any]:
    facts = total.to_dict()
    return {key: facts[key] for key in ("cycles", "compute_cycles", "stall_cycles", "energy_nj")}
