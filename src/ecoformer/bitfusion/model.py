"""Whole models on the array: the products of every layer, by the shapes that flow through it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ecoformer.accounting.paper import part_of
from ecoformer.accounting.shapes import Call, trace
from ecoformer.attention import Attention
from ecoformer.attention.local import LocalBranch
from ecoformer.conversion.layers import Found, find_layers
from ecoformer.running import without_fast_path

from .array import BitFusion
from .checks import pair, whole
from .mechanisms import Sizes, attend_work, softmax_work
from .ops import Convolution, FullyConnected
from .simulation import PAPER_ARRAY, Total, simulate_all
from .workloads import Work

__all__ = ["NOT_SIMULATED", "LayerWork", "ModelResult", "ModelWork", "model_work", "simulate_model"]

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
    code_bits: int = 1,
    array: BitFusion = PAPER_ARRAY,
) -> ModelResult:
    """Cycles and energy of one forward pass of `model`; the arguments are those of `model_work`."""
    return ModelResult(model_work(model, input_size, bits=bits, code_bits=code_bits), array)


def model_work(model: nn.Module, input_size: Any, *, bits: Bits = 8, code_bits: int = 1) -> ModelWork:
    """The matrix products and convolutions of one forward pass, layer by layer.

    Nothing is computed: the model runs on meta tensors, its weights stay where they are. Every layer reads
    its input from DRAM and writes 32-bit sums back, as in the paper's table; layers are not fused.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        input_size: the input's shape with its batch, such as (1, 3, 224, 224); or an input; or keyword
            arguments.
        bits: of activations and weights, one number or (activations, weights). Keys, values and sums over
            them are activations, whichever side of the array they stand on.
        code_bits: of the codes of hashed attention.
    """
    of_activations, of_weights = pair("bits", bits)
    widths = (of_activations, of_weights, whole("code_bits", code_bits))
    with _grids(model) as grids, without_fast_path():
        try:
            calls = trace(model, input_size)
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
            given = tuple(input_size.shape) if isinstance(input_size, Tensor) else input_size
            line = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{type(model).__name__} cannot take an input of {given}: {line}") from error
    found = find_layers(model)
    foreign = {f.layer: f for f in found if not f.ours}
    inside = [f"{f.name}." if f.name else "" for f in found]
    layers, uncounted = [], []
    for call in calls:
        kind = call.module.name if isinstance(call.module, Attention) else type(call.module).__name__
        work = _work_of(call, calls, foreign, grids, widths)
        if work is None:
            uncounted.append(f"{call.name} ({kind})")
        elif work:
            attends = isinstance(call.module, Attention) or call.module in foreign
            part = "attention" if attends else part_of(call.name, inside)
            layers.append(LayerWork(call.name, kind, part, work))
    return ModelWork(type(model).__name__, tuple(layers), tuple(uncounted))


def _brief(total: Total) -> dict[str, Any]:
    facts = total.to_dict()
    return {key: facts[key] for key in ("cycles", "compute_cycles", "stall_cycles", "energy_nj")}


Grids = dict[nn.Module, tuple[int, int]]
Widths = tuple[int, int, int]


@contextmanager
def _grids(model: nn.Module) -> Iterator[Grids]:
    """The images that two-dimensional local branches are told of while the model runs."""
    grids: Grids = {}

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) > 3 and args[3] is not None:
            grids[module] = (int(args[3][0]), int(args[3][1]))

    branches = [module for module in model.modules() if isinstance(module, LocalBranch)]
    hooks = [branch.register_forward_pre_hook(hook) for branch in branches]
    try:
        yield grids
    finally:
        for handle in hooks:
            handle.remove()


def _work_of(
    call: Call, calls: list[Call], foreign: dict[nn.Module, Found], grids: Grids, widths: Widths
) -> Work | None:
    """The products of one call: none where the layer has none, None where they are not known."""
    module: Any = call.module
    if isinstance(module, Attention):
        batch, tokens = call.inputs[0], call.inputs[-2]
        return attend_work(module, Sizes(batch, module.num_heads, tokens, module.head_dim, *widths))
    if module in foreign:
        return _foreign(call, foreign[module], calls, widths)
    if isinstance(module, nn.Linear):
        rows = math.prod(call.inputs[:-1])
        return [(FullyConnected(rows, module.in_features, module.out_features, *widths[:2]), 1)]
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _convolution(call, module, widths)
    if isinstance(module, LocalBranch):
        return _local(call, module, grids.get(module), widths)
    has_own = any(True for _ in module.parameters(recurse=False)) and not list(module.children())
    return None if has_own and not isinstance(module, _ELSEWHERE) else []


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


def _local(call: Call, module: LocalBranch, grid: tuple[int, int] | None, widths: Widths) -> Work | None:
    batch, tokens, dim = call.inputs
    height, width = (1, tokens) if len(module.sizes) == 1 else grid or (0, 0)
    if not height:
        return None
    kernel = _both(module.sizes, 1)
    padding = (kernel[0] // 2, kernel[1] // 2)
    bits = {"activation_bits": widths[0], "weight_bits": widths[1]}
    return [(Convolution(batch, dim, dim, height, width, kernel, 1, padding, 1, dim, **bits), 1)]


def _both(sizes: tuple[int, ...], vertical: int) -> tuple[int, int]:
    """Two axes, where a sequence has one."""
    return (vertical, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _foreign(call: Call, found: Found, calls: list[Call], widths: Widths) -> Work | None:
    """Softmax attention of another library; what the keys' projection is given tells their number."""
    if found.source is None:
        return None
    dim, heads = found.source.dim, found.source.num_heads
    prefix = f"{call.name}." if call.name else ""
    parts = {
        c.name.removeprefix(prefix): c for c in calls if c.name != call.name and c.name.startswith(prefix)
    }
    rows = math.prod(call.inputs[:-1])
    batch = call.inputs[0]
    projections: Work = []
    if isinstance(found.layer, nn.MultiheadAttention):  # whose projections are no modules that are called
        batch = call.inputs[0 if found.layer.batch_first else 1] if len(call.inputs) == 3 else 1
        projections = [(FullyConnected(rows, dim, dim, *widths[:2]), 4)]
    keys = next((parts[name] for name in ("kv", "qkv", "key", "k_proj", "k_lin") if name in parts), call)
    seen = math.prod(keys.inputs[:-1])
    window = getattr(found.layer, "ws", None)
    if isinstance(window, int):  # windows, padded where they do not fit the map
        size = window**2
        sizes = Sizes(seen // size, heads, size, dim // heads, *widths)
        return softmax_work(sizes, size)
    sizes = Sizes(batch, heads, rows // batch, dim // heads, *widths)
    return [*projections, *softmax_work(sizes, seen // batch)]
