"""Projections of an existing attention layer, whatever its class calls them, and copying them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ecoformer.attention.base import Attention


class Projections(NamedTuple):
    """The weights of an attention layer that another mechanism can use.

    Weights are (out, in) as in `nn.Linear`. `out` is None if the model projects outside the layer, as BERT
    does. Dropouts are those of the attention weights and of the projected output.
    """

    num_heads: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    out_bias: Tensor | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0

    @classmethod
    def of_linears(
        cls,
        num_heads: int,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        out: nn.Linear | None,
        *,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> Projections:
        """From four linear layers (three if the model projects outside the layer)."""
        weight, bias = (None, None) if out is None else (out.weight, out.bias)
        biases = (q.bias, k.bias, v.bias, bias)
        return cls(num_heads, q.weight, k.weight, v.weight, weight, *biases, attn_drop, proj_drop)

    @classmethod
    def of_fused(
        cls,
        num_heads: int,
        qkv: nn.Linear,
        out: nn.Linear | None,
        *,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> Projections:
        """From one linear layer for queries, keys and values, and the output's."""
        q, k, v = qkv.weight.chunk(3)
        q_bias, k_bias, v_bias = (None, None, None) if qkv.bias is None else qkv.bias.chunk(3)
        weight, bias = (None, None) if out is None else (out.weight, out.bias)
        return cls(num_heads, q, k, v, weight, q_bias, k_bias, v_bias, bias, attn_drop, proj_drop)

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.v.shape[1]

    def check(self, owner: str) -> None:
        """Refuse projections that our mechanisms do not have."""
        dim = self.dim
        square = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        odd = {name: tuple(w.shape) for name, w in square.items() if w is not None and w.shape != (dim, dim)}
        if odd:
            raise ValueError(
                f"{owner} projects {dim} channels by {odd}; only square projections can be carried over"
            )
        if self.num_heads < 1 or dim % self.num_heads:
            raise ValueError(f"{owner} has {self.num_heads} heads for {dim} channels")


def projections_of(layer: nn.Module) -> Projections:
    """Read `nn.MultiheadAttention`, or a layer with fused `qkv` (or `qk` and `v`) and `proj`.

    timm's attention and our own mechanisms look like the second.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return _of_multihead(layer)
    if getattr(layer, "projects_to_codes", False):
        kind = type(layer).__name__
        raise ValueError(f"{kind} holds no queries and keys, only codes: convert the original model")
    heads, proj = getattr(layer, "num_heads", None), getattr(layer, "proj", None)
    out = proj if isinstance(proj, nn.Linear) else None
    dropouts = {name: dropout_of(layer, name) for name in ("attn_drop", "proj_drop")}
    qkv, qk, v = (getattr(layer, name, None) for name in ("qkv", "qk", "v"))
    if isinstance(heads, int) and isinstance(proj, (nn.Linear, nn.Identity)):
        if isinstance(qkv, nn.Linear):
            if qkv.out_features != 3 * qkv.in_features:
                raise ValueError(
                    f"{type(layer).__name__} projects {qkv.in_features} to {qkv.out_features} channels; only "
                    "heads whose total width is dim can be carried over"
                )
            source = Projections.of_fused(heads, qkv, out, **dropouts)
            source.check(type(layer).__name__)
            return source
        if isinstance(qk, nn.Linear) and isinstance(v, nn.Linear):
            source = Projections.of_linears(heads, qk, qk, v, out, **dropouts)
            if getattr(layer, "separate", False):
                q, k = qk.weight.chunk(2)
                q_bias, k_bias = (None, None) if qk.bias is None else qk.bias.chunk(2)
                source = source._replace(q=q, k=k, q_bias=q_bias, k_bias=k_bias)
            source.check(type(layer).__name__)
            return source
    raise TypeError(
        f"cannot read the projections of {type(layer).__name__}: it is neither nn.MultiheadAttention nor a "
        "layer with qkv (or qk and v), proj and num_heads"
    )


def _of_multihead(layer: nn.MultiheadAttention) -> Projections:
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn cannot be carried over"
        )
    q, k, v = layer.in_proj_weight.chunk(3)
    fused, out = layer.in_proj_bias, layer.out_proj
    q_bias, k_bias, v_bias = (None, None, None) if fused is None else fused.chunk(3)
    biases = (q_bias, k_bias, v_bias, out.bias)
    return Projections(layer.num_heads, q, k, v, out.weight, *biases, attn_drop=float(layer.dropout))


def dropout_of(layer: nn.Module, name: str) -> float:
    """A layer's dropout rate, stored as a number or as a module."""
    value = getattr(layer, name, 0.0)
    return float(value.p if isinstance(value, nn.Dropout) else value if isinstance(value, float) else 0.0)


def owner_of(tensor: Tensor) -> Tensor:
    """The parameter that a tensor is a part of."""
    return tensor if tensor._base is None else tensor._base


def unread_parameters(layer: nn.Module, source: Projections, known: tuple[str, ...] = ()) -> list[str]:
    """Parameters of `layer` that are neither in `source` nor under one of the `known` names."""
    read = {id(owner_of(part)) for part in source if isinstance(part, Tensor)}
    return [
        name
        for name, parameter in layer.named_parameters()
        if id(parameter) not in read and not any(name == k or name.startswith(f"{k}.") for k in known)
    ]


def carry_over(source: Projections, target: Attention, *, freeze: bool = False) -> None:
    """Copy projections into `target`; shared queries and keys get the queries' projection.

    `freeze` freezes what was frozen; a projection made of several is frozen if all of them were.
    """
    parts: dict[nn.Module, tuple[str, ...]] = {}
    if source.out is not None:
        parts[target.proj] = ("out",)
    if target.shared_qk:
        parts[target.v] = ("v",)
        if not target.projects_to_codes:
            parts[target.qk] = ("q", "k") if target.qk.out_features == 2 * target.dim else ("q",)
    else:
        parts[target.qkv] = ("q", "k", "v")
    for linear, names in parts.items():
        if isinstance(linear, nn.Linear):
            _fill(linear.weight, [getattr(source, name) for name in names], freeze)
            _fill(linear.bias, [getattr(source, f"{name}_bias") for name in names], freeze)


def _fill(parameter: Tensor | None, sources: list[Tensor | None], freeze: bool) -> None:
    if parameter is None:
        return
    for part, value in zip(parameter.data.chunk(len(sources)), sources, strict=True):
        part.zero_() if value is None else part.copy_(value)
    given = [owner_of(value) for value in sources if value is not None]
    if freeze and given and not any(value.requires_grad for value in given):
        parameter.requires_grad_(False)


def shared_parts(source: Attention, target: Attention) -> list[str]:
    """What both mechanisms have besides the projections, in the same shapes, such as hash functions."""
    names = []
    for name in source.own:
        old, new = getattr(source, name, None), getattr(target, name, None)
        if isinstance(old, nn.Module) and isinstance(new, nn.Module):
            fits = type(old) is type(new) and _shapes(old) == _shapes(new)
        elif isinstance(old, Tensor) and isinstance(new, Tensor):
            fits = type(source) is type(target) and old.shape == new.shape
        else:
            fits = False
        names += [name] if fits else []
    return names


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def carry_parts(source: Attention, target: Attention, names: Iterable[str]) -> None:
    """Copy the named parts of one mechanism into another."""
    for name in names:
        old, new = getattr(source, name), getattr(target, name)
        if isinstance(old, nn.Module):
            new.load_state_dict(old.state_dict())
            trainable = {key: parameter.requires_grad for key, parameter in old.named_parameters()}
            for key, parameter in new.named_parameters():
                parameter.requires_grad_(trainable.get(key, True))
        else:
            new.data.copy_(old)
            new.requires_grad_(old.requires_grad)
