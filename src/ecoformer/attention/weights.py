"""Projections of an existing attention layer, whatever its class calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ecoformer.attention.base import Attention


class Projections(NamedTuple):
    """What an attention layer holds that another mechanism can take over.

    Weights are (out, in) as in `nn.Linear`. `out` is None where the model projects outside of the layer, as
    BERT does. Dropouts are those of the attention weights and of the projected output.
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
        """From four linear layers (three where the model projects outside)."""
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
        """From one linear layer that gives queries, keys and values side by side, and the output's."""
        q, k, v = qkv.weight.chunk(3)
        q_bias, k_bias, v_bias = (None, None, None) if qkv.bias is None else qkv.bias.chunk(3)
        weight, bias = (None, None) if out is None else (out.weight, out.bias)
        return cls(num_heads, q, k, v, weight, q_bias, k_bias, v_bias, bias, attn_drop, proj_drop)

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.v.shape[1]

    def check(self, owner: str) -> None:
        """Refuse projections that no mechanism here can hold."""
        dim = self.dim
        square = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        odd = {name: tuple(w.shape) for name, w in square.items() if w is not None and w.shape != (dim, dim)}
        if odd:
            raise ValueError(
                f"{owner} projects {dim} channels by {odd}; only square projections, whose heads make up all "
                "channels, can be carried over"
            )
        if dim % self.num_heads:
            raise ValueError(f"{owner} has {self.num_heads} heads for {dim} channels")


def projections_of(layer: nn.Module) -> Projections:
    """What `layer` holds: `nn.MultiheadAttention`, or a layer with fused `qkv` (or `qk` and `v`) and `proj`.

    The second is what timm's attention and our own mechanisms look like.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return _of_multihead(layer)
    heads, proj = getattr(layer, "num_heads", None), getattr(layer, "proj", None)
    out = proj if isinstance(proj, nn.Linear) else None
    if not isinstance(heads, int) or not isinstance(proj, (nn.Linear, nn.Identity)):
        raise _unreadable(layer)
    dropouts = {"attn_drop": dropout_of(layer, "attn_drop"), "proj_drop": dropout_of(layer, "proj_drop")}
    qkv, qk, v = (getattr(layer, name, None) for name in ("qkv", "qk", "v"))
    if isinstance(qkv, nn.Linear):
        if qkv.out_features != 3 * qkv.in_features:
            raise ValueError(
                f"{type(layer).__name__} projects {qkv.in_features} to {qkv.out_features} channels; heads of "
                "another total width than dim cannot be carried over"
            )
        source = Projections.of_fused(heads, qkv, out, **dropouts)
    elif isinstance(qk, nn.Linear) and isinstance(v, nn.Linear):
        source = Projections.of_linears(heads, qk, qk, v, out, **dropouts)
    else:
        raise _unreadable(layer)
    source.check(type(layer).__name__)
    return source


def unread_parameters(layer: nn.Module, source: Projections, known: tuple[str, ...] = ()) -> list[str]:
    """Parameters of `layer` that `source` does not hold, but for those under the `known` names."""
    tensors = (part for part in source if isinstance(part, Tensor))
    read = {id(tensor if tensor._base is None else tensor._base) for tensor in tensors}
    return [
        name
        for name, parameter in layer.named_parameters()
        if id(parameter) not in read and not any(name == k or name.startswith(f"{k}.") for k in known)
    ]


def dropout_of(layer: nn.Module, name: str) -> float:
    """A layer's dropout rate, kept as a number or as a module."""
    value = getattr(layer, name, 0.0)
    return float(value.p if isinstance(value, nn.Dropout) else value if isinstance(value, float) else 0.0)


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
    if source.out is not None and isinstance(target.proj, nn.Linear):
        _copy(target.proj, source.out, source.out_bias)


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


def carry_trainability(source: Projections, target: Attention) -> None:
    """Freeze what was frozen; a projection that unites several is frozen if all of them were."""
    parts: dict[nn.Module, tuple[str, ...]] = {target.proj: ("out",)}
    if target.shared_qk:
        parts |= {target.qk: ("q",), target.v: ("v",)}
    else:
        parts[target.qkv] = ("q", "k", "v")
    for linear, names in parts.items():
        if isinstance(linear, nn.Linear):
            _freeze(linear.weight, [getattr(source, name) for name in names])
            _freeze(linear.bias, [getattr(source, f"{name}_bias") for name in names])


def _freeze(parameter: Tensor | None, sources: list[Tensor | None]) -> None:
    given = [tensor if tensor._base is None else tensor._base for tensor in sources if tensor is not None]
    if parameter is not None and given and not any(tensor.requires_grad for tensor in given):
        parameter.requires_grad_(False)


def _copy(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.data.copy_(weight)
    if linear.bias is not None:
        linear.bias.data.zero_() if bias is None else linear.bias.data.copy_(bias)


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


def _unreadable(layer: nn.Module) -> TypeError:
    return TypeError(
        f"cannot read the projections of {type(layer).__name__}: it is neither nn.MultiheadAttention nor "
        "a layer with qkv (or qk and v), proj and num_heads"
    )
