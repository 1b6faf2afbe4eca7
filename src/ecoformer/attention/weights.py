"""Projections of an existing softmax layer, whatever its class calls them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ecoformer.attention.base import Attention


class Projections(NamedTuple):
    """Weights and biases of the four projections, and the number of heads."""

    num_heads: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    out_bias: Tensor | None


def projections_of(layer: nn.Module) -> Projections:
    """What `layer` holds: `nn.MultiheadAttention`, or a layer with a fused `qkv`, `proj` and `num_heads`.

    The second is what timm's attention and our `SoftmaxAttention` look like.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return _of_multihead(layer)
    qkv, proj = getattr(layer, "qkv", None), getattr(layer, "proj", None)
    heads = getattr(layer, "num_heads", None)
    if not isinstance(qkv, nn.Linear) or not isinstance(proj, nn.Linear) or not isinstance(heads, int):
        raise TypeError(
            f"cannot read the projections of {type(layer).__name__}: it is neither nn.MultiheadAttention nor "
            "a layer with qkv, proj and num_heads"
        )
    if qkv.out_features != 3 * qkv.in_features or proj.out_features != qkv.in_features:
        raise ValueError(
            f"{type(layer).__name__} projects {qkv.in_features} to {qkv.out_features} and back to "
            f"{proj.out_features} channels; heads of another total width than dim cannot be carried over"
        )
    read = ("qkv.", "proj.") + (("local.",) if isinstance(layer, Attention) else ())
    more = [name for name, _ in layer.named_parameters() if not name.startswith(read)]
    if more:
        raise ValueError(f"{type(layer).__name__} also holds {', '.join(more)}, which cannot be carried over")
    q, k, v = qkv.weight.chunk(3)
    q_bias, k_bias, v_bias = (None, None, None) if qkv.bias is None else qkv.bias.chunk(3)
    return Projections(heads, q, k, v, proj.weight, q_bias, k_bias, v_bias, proj.bias)


def _of_multihead(layer: nn.MultiheadAttention) -> Projections:
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn cannot be carried over"
        )
    q, k, v = layer.in_proj_weight.chunk(3)
    fused, out = layer.in_proj_bias, layer.out_proj
    q_bias, k_bias, v_bias = (None, None, None) if fused is None else fused.chunk(3)
    return Projections(layer.num_heads, q, k, v, out.weight, q_bias, k_bias, v_bias, out.bias)


def carry_over(source: Projections, target: Attention) -> None:
    """Copy projections into `target`; with shared queries and keys, the queries' projection serves both."""
    if target.shared_qk:
        _copy(target.qk, source.q, source.q_bias)
        _copy(target.v, source.v, source.v_bias)
    else:
        names = ("q", "k", "v")
        for part, name in zip(target.qkv.weight.data.chunk(3), names, strict=True):
            part.copy_(getattr(source, name))
        if target.qkv.bias is not None:
            for part, name in zip(target.qkv.bias.data.chunk(3), names, strict=True):
                bias = getattr(source, f"{name}_bias")
                part.zero_() if bias is None else part.copy_(bias)
    _copy(target.proj, source.out, source.out_bias)


def _copy(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.data.copy_(weight)
    if linear.bias is not None:
        linear.bias.data.zero_() if bias is None else linear.bias.data.copy_(bias)
