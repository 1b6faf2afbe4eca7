"""Formulas of the usual modules that are made of no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from ecoformer.accounting.conventions import normalisation_counts
from ecoformer.accounting.counts import Counts, mac
from ecoformer.accounting.mechanisms.parts import copy, floats, linear, softmax

Shape = tuple[int, ...]


def leaf_formula(module: nn.Module, shape: Shape) -> Counts | None:
    """What `module` executes for a dense fp32 input of this shape in eval mode, or None if it is unknown."""
    rule = _RULES.get(type(module))
    return None if rule is None else rule(module, shape)


def _linear(module: Any, shape: Shape) -> Counts:
    rows = math.prod(shape[:-1])
    return linear(rows, module.in_features, module.out_features, module.bias is not None)


def _convolution(module: Any, shape: Shape) -> Counts:
    axes = zip(shape[2:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True)
    places = math.prod((s + 2 * p - d * (k - 1) - 1) // step + 1 for s, k, step, p, d in axes)
    out = shape[0] * module.out_channels * places
    taps = math.prod(module.kernel_size) * module.in_channels // module.groups
    bias = module.out_channels if module.bias is not None else 0
    counts = mac(out * taps) + Counts(bytes=floats(math.prod(shape), taps * module.out_channels, bias, out))
    return counts + Counts(add=out if bias else 0)


def _layer_norm(module: Any, shape: Shape) -> Counts:
    n, width = math.prod(shape), math.prod(module.normalized_shape)
    weight, bias = module.weight is not None, module.bias is not None
    return normalisation_counts(n, n // width, weight, bias) + Counts(
        bytes=floats(n, (weight + bias) * width, n)
    )


def _batch_norm(module: Any, shape: Shape) -> Counts:
    n, channels = math.prod(shape), shape[1]
    operands = 4 if module.affine else 2
    return Counts(mul=2 * n, add=2 * n + channels, exp=channels, bytes=floats(n, operands * channels, n))


def _gelu(module: Any, shape: Shape) -> Counts:
    n = math.prod(shape)
    one = Counts(mul=6, add=2, exp=1) if module.approximate == "tanh" else Counts(mul=3, add=1, exp=1)
    return one * n + copy(n)


def _relu(module: Any, shape: Shape) -> Counts:
    return Counts(compare=math.prod(shape)) + copy(math.prod(shape))


def _softmax(module: Any, shape: Shape) -> Counts:
    return softmax(math.prod(shape))


def _embedding(module: Any, shape: Shape) -> Counts:
    """Indices are int64."""
    tokens = math.prod(shape)
    n = tokens * module.embedding_dim
    return Counts(lookup=n, bytes=8 * tokens) + copy(n)


def _free(module: Any, shape: Shape) -> Counts:
    return Counts()


_RULES: dict[type[nn.Module], Callable[[Any, Shape], Counts]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GELU: _gelu,
    nn.ReLU: _relu,
    nn.Softmax: _softmax,
    nn.Embedding: _embedding,
    nn.Dropout: _free,
    nn.Identity: _free,
}
