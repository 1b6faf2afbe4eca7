"""Softmax attention of other libraries: how many queries meet how many keys, by the shapes that flow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ecoformer.accounting.shapes import Call, Shape
from ecoformer.conversion.layers import Found

_QUERIES = ("q", "qkv", "query", "q_proj", "q_lin")
_KEYS = ("kv", "qkv", "key", "k_proj", "k_lin")


@dataclass(frozen=True)
class Attending:
    """A call of softmax attention.

    Attributes:
        groups: samples, or windows of all samples, whose tokens attend to each other.
        queries: of one group.
        keys: of one group.
        dim: channels of all heads together.
        heads: how many.
        projections: (rows, inputs, outputs) of projections that no submodule stands for.
    """

    groups: int
    queries: int
    keys: int
    dim: int
    heads: int
    projections: tuple[tuple[int, int, int], ...] = ()


def with_parts(calls: Iterable[Call]) -> Iterable[tuple[Call, dict[str, Call]]]:
    """Each call, and the latest calls by name: a module's submodules have been called just before it ends."""
    latest: dict[str, Call] = {}
    for call in calls:
        yield call, latest
        latest[call.name] = call


def attending(call: Call, found: Found | None, latest: Mapping[str, Call]) -> Attending | None:
    """What attends in this call, or None where the layer's class is not known.

    Args:
        call: of an attention layer.
        found: what `find_layers` knows about it.
        latest: calls of submodules by name; what projections are given tells the numbers of tokens.
    """
    if type(call.module) is nn.MultiheadAttention:
        return _multihead(call, call.module)
    if found is None or found.source is None:
        return None
    dim, heads = found.source.dim, found.source.num_heads
    prefix = f"{call.name}." if call.name else ""
    queries, keys = (
        next((latest[prefix + name].inputs for name in names if prefix + name in latest), call.inputs)
        for names in (_QUERIES, _KEYS)
    )
    window = getattr(found.layer, "ws", None)
    if isinstance(window, int):  # windows, padded where they do not fit the map
        size = window**2
        return Attending(math.prod(keys[:-1]) // size, size, size, dim, heads)
    groups = math.prod(queries[:-2])
    return Attending(groups, queries[-2], math.prod(keys[:-1]) // groups, dim, heads)


def _multihead(call: Call, layer: nn.MultiheadAttention) -> Attending:
    """PyTorch's own, whose projections are parameters; keys may be of another sequence and width."""
    query, key, value = (_tokens(call.argument(name), layer) for name in ("query", "key", "value"))
    dim, (groups, queries, _) = layer.embed_dim, query
    rows = groups * queries
    more = int(layer.bias_k is not None) + int(layer.add_zero_attn)  # keys that belong to the layer
    projections = (
        (rows, dim, dim),
        *((x[0] * x[1], x[2], dim) for x in (key, value)),
        (rows, dim, dim),
    )
    return Attending(groups, queries, key[1] + more, dim, layer.num_heads, projections)


def _tokens(shape: Shape, layer: Any) -> tuple[int, int, int]:
    """(samples, tokens, channels) of what the layer was given."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    first, second, channels = shape
    return (first, second, channels) if layer.batch_first else (second, first, channels)
