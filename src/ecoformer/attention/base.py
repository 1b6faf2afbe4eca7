"""The interface of all mechanisms, and what they share: projections, heads, checks, local branch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, is_autocast_enabled, nn
from typing_extensions import Self

from ecoformer.arguments import shape
from ecoformer.attention.local import LocalBranch
from ecoformer.attention.weights import (
    Projections,
    carry_over,
    carry_parts,
    projections_of,
    shared_parts,
    unread_parameters,
)
from ecoformer.operations import Described
from ecoformer.ops.exported import rows

_LEARNED = ("local", "affinity", "key_weights")
"""Parts of a mechanism that are never drawn at random."""


def head_dim_of(dim: int, num_heads: int) -> int:
    """Channels of a head."""
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}")
    return dim // num_heads


def unknown_setting(key: str, mechanisms: Iterable[type[Attention]]) -> str:
    """The message for a keyword argument that none of the mechanisms has."""
    classes = list(mechanisms)
    known = sorted(set().union(*(cls.settings() for cls in classes)))
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    names = " or ".join(getattr(cls, "name", cls.__name__) for cls in classes)
    return f"unknown setting {key!r} of {names}{hint}; choose from {', '.join(known)}"


class Attention(Described, nn.Module):
    """Self-attention over tokens (B, N, dim) by one mechanism.

    A mechanism defines how heads attend (`attend`), what that costs (`operations`), and what it supports (the
    class variables); a call that asks for more is refused. With `shared_qk`, queries and keys are one
    projection, as in the paper.

    Args:
        dim: channels of a token.
        num_heads: heads, each of dim / num_heads channels.
        qkv_bias: whether the input projections have a bias.
        attn_drop: dropout of attention weights, for mechanisms that have such weights.
        proj_drop: dropout after the output projection.
        local: k adds a depth-wise convolution of v over k neighbours in the sequence; (k, k) over a k x k
            neighbourhood of the image, which needs `grid` in every call. 0, as in the paper, adds none.
        out_proj: whether an output projection mixes the heads; False if the model has it outside the layer,
            as BERT does.
    """

    name: ClassVar[str]
    listed: ClassVar[bool] = True
    computed_by = "attend"
    shared_qk: ClassVar[bool] = False
    projects_to_codes: ClassVar[bool] = False
    """Whether the projection of queries and keys makes codes, so there are no queries and keys to copy."""
    supports_causal: ClassVar[bool] = True
    supports_padding: ClassVar[bool] = True
    has_weights: ClassVar[bool] = False
    sized_by_tokens: ClassVar[bool] = False
    """Whether the number of tokens is an argument, `seq_len`, of the constructor."""
    own: ClassVar[tuple[str, ...]] = ("local",)
    """Names of what this mechanism has besides the projections."""
    _settings: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the settings, for a conversion that changes only some of them."""
        new = super().__new__(cls)
        new.__dict__["_settings"] = kwargs
        return new

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        local: int | tuple[int, int] = 0,
        out_proj: bool = True,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            if name in self.settings():  # a subclass passes on what is its own
                raise TypeError(f"Attention.__init__() got an unexpected keyword argument {name!r}")
            raise TypeError(unknown_setting(name, [type(self)]))
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim_of(dim, num_heads)
        if attn_drop and not self.has_weights:
            raise ValueError(f"attn_drop must be 0, got {attn_drop}: {self.name} has no attention weights")
        self.attn_drop = attn_drop
        if self.shared_qk:
            self.qk = nn.Linear(dim, dim, bias=qkv_bias)
            self.v = nn.Linear(dim, dim, bias=qkv_bias)
        else:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj: nn.Linear | nn.Identity = nn.Linear(dim, dim) if out_proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)
        self.local = LocalBranch(dim, local) if local else None

    @classmethod
    def settings(cls) -> set[str]:
        """Names of the keyword arguments of the constructor, those of the base classes included."""
        return {
            parameter.name
            for base in cls.__mro__
            if issubclass(base, Attention) and "__init__" in vars(base)
            for parameter in signature(vars(base)["__init__"]).parameters.values()
            if parameter.kind is Parameter.KEYWORD_ONLY
        }

    @classmethod
    @torch.no_grad()
    def from_projections(cls, source: Projections, **kwargs: Any) -> Self:
        """A layer that starts from the weights of another; `kwargs` are those of the class.

        With `shared_qk`, queries and keys get the queries' weights. Device and dtype are kept.
        """
        biases = (source.q_bias, source.k_bias, source.v_bias)
        kwargs.setdefault("qkv_bias", any(bias is not None for bias in biases))
        kwargs.setdefault("proj_drop", source.proj_drop)
        if cls.has_weights:
            kwargs.setdefault("attn_drop", source.attn_drop)
        new = cls(source.dim, source.num_heads, out_proj=source.out is not None, **kwargs)
        new.to(device=source.v.device, dtype=source.v.dtype)
        carry_over(source, new, freeze=True)
        return new

    @classmethod
    @torch.no_grad()
    def from_softmax(cls, layer: nn.Module, **kwargs: Any) -> Self:
        """A layer that starts from the weights of another layer.

        `layer` is an `nn.MultiheadAttention`, one of our mechanisms, or a layer with `qkv`, `proj` and
        `num_heads` like timm's. A local branch and fitted hash functions are kept if both layers have them in
        the same shapes; `seed=` asks for new random draws instead. Device, dtype and mode are kept; tokens
        are (B, N, dim), whatever `batch_first` was.
        """
        source = projections_of(layer)
        more = unread_parameters(layer, source, layer.own if isinstance(layer, Attention) else ())
        if more:
            raise ValueError(
                f"{type(layer).__name__} also holds {', '.join(more)}, which cannot be carried over"
            )
        branch = layer.local if isinstance(layer, Attention) else None
        if branch is not None:
            kwargs.setdefault("local", branch.size)
        new = cls.from_projections(source, **kwargs).train(layer.training)
        if isinstance(layer, Attention):
            redrawn = kwargs.get("seed") is not None
            parts = shared_parts(layer, new)
            carry_parts(layer, new, [part for part in parts if part in _LEARNED or not redrawn])
        return new

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Heads (B, H, N, head_dim) in and out; the mask is (B, N), True where a key is padding.

        With `shared_qk`, `k` is `q`.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """Tokens (B, N, dim) to tokens (B, N, dim).

        `key_padding_mask` (B, N) is True where a token is padding. A two-dimensional local branch needs
        `grid`, the image's (height, width), and `prefix`, the number of tokens before it (class token,
        registers): N = prefix + height x width.
        """
        self._check(x, key_padding_mask, is_causal)
        q, k, v = self._project(x)
        out = self.attend(q, k, v, key_padding_mask, is_causal, **self._token_terms(x))
        out = out.squeeze(1) if self.num_heads == 1 else out.transpose(1, 2).flatten(2)
        if self.local is not None:
            out = out + self.local(v.transpose(1, 2).flatten(2), key_padding_mask, is_causal, grid, prefix)
        result: Tensor = self.proj_drop(self.proj(rows(out)).view(x.shape))
        return result

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.shared_qk:
            q = self._heads(self.qk(rows(x)), x)
            return q, q, self._heads(self.v(rows(x)), x)
        q, k, v = (self._heads(part, x) for part in self.qkv(rows(x)).chunk(3, dim=-1))
        return q, k, v

    def _token_terms(self, x: Tensor) -> dict[str, Tensor]:
        """What `attend` takes besides queries, keys and values, by name."""
        return {}

    def _heads(self, projected: Tensor, x: Tensor) -> Tensor:
        """Projections of the tokens `x` as (B, H, N, channels of a head)."""
        (batch, n), width = x.shape[:2], projected.shape[-1] // self.num_heads
        if self.num_heads == 1:
            return projected.view(batch, 1, n, width)
        return projected.view(batch, n, self.num_heads, width).transpose(1, 2)

    def _check(self, x: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> None:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (B, N, {self.dim}), got {shape(x)}")
        if not x.is_floating_point() or x.shape[1] < 1:
            raise ValueError(f"x must be floating point with N >= 1 tokens, got {x.dtype} {shape(x)}")
        projection = getattr(self, "qk" if self.shared_qk else "qkv", None)
        weight = getattr(projection, "weight", x)
        if x.dtype != weight.dtype and weight.is_floating_point() and not is_autocast_enabled(x.device.type):
            raise ValueError(
                f"x is {x.dtype}, but the weights of {self.name} are {weight.dtype}: pass "
                f"x.to({weight.dtype}), convert the model with model.to({x.dtype}), or use torch.autocast"
            )
        if is_causal and not self.supports_causal:
            raise ValueError(f"is_causal=True is not supported by {self.name}")
        if key_padding_mask is None:
            return
        if not self.supports_padding:
            raise ValueError(f"key_padding_mask is not supported by {self.name}: cut the padding off instead")
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != x.shape[:2]:
            raise ValueError(
                f"key_padding_mask must be bool (B, N) = {tuple(x.shape[:2])}, True where a token is "
                f"padding, got {key_padding_mask.dtype} {shape(key_padding_mask)}"
            )

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}: use torch.compile, torch.export, or "
            "torch.jit.trace(model, example) under torch.no_grad()"
        )

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"mechanism={self.name}, dim={self.dim}, num_heads={self.num_heads}"
