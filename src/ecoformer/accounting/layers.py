"""The layers of a model and their operations, as the paper counts them.

Linear layers are multiply-accumulates, their biases free; those of convolutions count. LayerNorm counts two
multiply-accumulates an element, attention what its mechanism states (`Attention.operations`). Activations,
softmax, residual sums, squares in the hash kernel and memory traffic are free. `docs/cost.md` compares this
with what is executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ecoformer.accounting.shapes import Call, Shape, trace
from ecoformer.attention import Attention
from ecoformer.attention.local import LocalBranch
from ecoformer.conversion.layers import Found, find_layers, kind_of
from ecoformer.operations import Convolution, Operations, Product, mac, softmax_attention
from ecoformer.quantization.layers import IntegerConv2d, IntegerLinear
from ecoformer.running import NOT_TAKEN, not_taken

Part = Literal["attention", "ffn", "other"]
PARTS: tuple[Part, ...] = ("attention", "ffn", "other")

_ATTENTION = {"attn", "attention", "self_attn", "self_attention"}
_FFN = {"mlp", "ffn", "feed_forward", "intermediate"}
_BESIDE = {"output": "intermediate", "linear1": "linear2", "linear2": "linear1"}
"""Names of feed-forward layers that stand beside another: Hugging Face's, and PyTorch's own layers'."""
_FUSED = {"qkv": 3, "kv": 2}
"""Projections that layers store as one matrix. They count as separate products, as in the paper."""
_QUERIES = ("q", "qkv", "query", "q_proj", "q_lin")
_KEYS = ("kv", "qkv", "key", "k_proj", "k_lin")


@dataclass(frozen=True)
class Layer:
    """One call of a layer; `operations` is None where they are unknown."""

    name: str
    kind: str
    part: Part
    module: nn.Module
    operations: Operations | None

    @property
    def label(self) -> str:
        """How a layer that is not counted is listed."""
        return f"{self.name or 'the model itself'} ({self.kind})"


class Parts:
    """The parts of a model: attention, the feed-forward part, and the rest, by the names of layers."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, _ in model.named_modules()}
        self._layers = tuple(f"{found.name}." if found.name else "" for found in find_layers(model))

    def of(self, name: str) -> Part:
        """The part of the layer of this name."""
        words = name.split(".")
        if f"{name}.".startswith(self._layers) or _ATTENTION & set(words):
            return "attention"
        beside = (
            ".".join([*words[:i], _BESIDE[word]]) in self._names
            for i, word in enumerate(words)
            if word in _BESIDE
        )
        return "ffn" if _FFN & set(words) or any(beside) else "other"


def layers_of(model: nn.Module, example: Any) -> list[Layer]:
    """Every call of a layer that computes something, in the order in which calls end.

    Nothing is computed: the model runs on meta tensors, and its weights stay where they are.

    Args:
        model: any module, converted or not; hash functions need not be fitted.
        example: the input's shape, such as (1, 3, 224, 224); or an input; or keyword arguments.
    """
    try:
        calls = trace(model, example)
        foreign = {found.layer: found for found in find_layers(model) if not found.ours}
        latest: dict[str, Call] = {}
        parts, layers = Parts(model), []
        for call in calls:
            found = foreign.get(call.module)
            operations = _operations(call, found, latest)
            if operations or (operations is None and (found is not None or _computes(call))):
                kind = kind_of(call.module)
                layers.append(Layer(call.name, kind, parts.of(call.name), call.module, operations))
            latest[call.name] = call
    except NOT_TAKEN as error:
        raise not_taken(model, example, error) from error
    return layers


def _operations(call: Call, found: Found | None, latest: Mapping[str, Call]) -> Operations | None:
    """The operations of a call, or None without a rule; submodules are called before their module ends."""
    module: Any = call.module
    if isinstance(module, Attention):
        return module.operations(call.inputs[0], call.inputs[-2])
    if isinstance(module, nn.Linear | IntegerLinear):
        rows, parts = math.prod(call.inputs[:-1]), _FUSED.get(call.name.rpartition(".")[2], 1)
        parts = 1 if module.out_features % parts else parts
        return [Product(rows, module.in_features, module.out_features // parts, parts, right="weight")]
    if isinstance(module, nn.Conv1d | nn.Conv2d | IntegerConv2d):
        return _convolution(call, module)
    if isinstance(module, nn.LayerNorm):
        return [mac(2 * math.prod(call.inputs))]
    if isinstance(module, LocalBranch):
        return _local_branch(call, module)
    if type(module) is nn.MultiheadAttention:
        return _multihead(call, module)
    if found is not None and (found.source is not None or _is_quantised(found)):
        return _foreign_attention(call, found, latest)
    return None


def _is_quantised(found: Found) -> bool:
    """Whether only the integer projections of another library's layer keep it from being converted."""
    refuse = None if found.rule is None else found.rule.refuse
    known = found.rule is not None and (refuse is None or refuse(found.layer) is None)
    return known and any(isinstance(module, IntegerLinear) for module in found.layer.children())


def _convolution(call: Call, module: Any) -> Operations:
    outputs, inputs, *kernel = module.size if isinstance(module, IntegerConv2d) else module.weight.shape
    axes = len(kernel)
    convolution = Convolution(
        math.prod(call.output) // outputs // math.prod(call.output[-axes:]),
        inputs * module.groups,
        outputs,
        _pair(call.inputs[-axes:]),
        _pair(call.output[-axes:]),
        _pair(tuple(kernel)),
        _pair(module.stride),
        _pair(module.dilation),
        module.groups,
    )
    return [convolution] if module.bias is None else [convolution, mac(math.prod(call.output))]


def _local_branch(call: Call, module: LocalBranch) -> Operations:
    """Depth-wise over the sequence or the image; tokens before an image have no neighbours."""
    batch, tokens, dim = call.output
    size = (1, tokens) if len(module.sizes) == 1 else tuple(call.argument("grid"))
    return [Convolution(batch, dim, dim, size, size, _pair(module.sizes), groups=dim)]


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    """(vertical, horizontal), where a sequence has one axis."""
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _multihead(call: Call, layer: nn.MultiheadAttention) -> Operations:
    """PyTorch's own, whose projections are parameters; keys may be of another sequence and width."""
    query, key, value = (_tokens(call.argument(name), layer) for name in ("query", "key", "value"))
    dim, heads, (groups, queries, _) = layer.embed_dim, layer.num_heads, query
    more = int(layer.bias_k is not None) + int(layer.add_zero_attn)  # keys that belong to the layer
    projected = ((groups, queries, dim), key, value, (groups, queries, dim))
    projections = [Product(x[0] * x[1], x[2], dim, right="weight") for x in projected]
    return [*projections, *softmax_attention(groups * heads, queries, key[1] + more, dim // heads)]


def _tokens(shape: Shape, layer: nn.MultiheadAttention) -> tuple[int, int, int]:
    """(samples, tokens, channels) of what the layer was given."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    first, second, channels = shape
    return (first, second, channels) if layer.batch_first else (second, first, channels)


def _foreign_attention(call: Call, found: Found, latest: Mapping[str, Call]) -> Operations:
    """Softmax attention of another library; its projections' inputs give the numbers of tokens."""
    source: Any = found.source or found.layer
    heads, channels = source.num_heads, call.output[-1] // source.num_heads
    prefix = f"{call.name}." if call.name else ""
    queries, keys = (
        next((latest[prefix + name].inputs for name in names if prefix + name in latest), call.inputs)
        for names in (_QUERIES, _KEYS)
    )
    window = getattr(found.layer, "ws", None)
    if isinstance(window, int):  # windows, padded where they do not fit the map
        size = window**2
        return softmax_attention(math.prod(keys[:-1]) // size * heads, size, size, channels)
    groups = math.prod(queries[:-2])
    return softmax_attention(groups * heads, queries[-2], math.prod(keys[:-1]) // groups, channels)


def _computes(call: Call) -> bool:
    """Whether a module without a rule should be counted: it multiplies, outside of its submodules.

    These are mechanisms, and modules that multiply matrices or their own parameters. Embeddings do not.
    """
    if isinstance(call.module, nn.Embedding):
        return False
    is_leaf = not any(True for _ in call.module.children())
    has_own = any(True for _ in call.module.parameters(recurse=False))
    return isinstance(call.module, Attention) or bool(call.works) or (is_leaf and has_own)
