"""Hashed attention as a module: the paper's, and the same with other hash functions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from ecoformer import affinity as affinities
from ecoformer.attention.base import Attention, head_dim_of
from ecoformer.attention.registry import register_attention
from ecoformer.attention.weights import Projections, owner_of
from ecoformer.hashing import Hasher, KernelHasher, KlshHasher, LshHasher, SignHasher
from ecoformer.operations import Counts, Operations, Product, mac
from ecoformer.ops.eager import widened
from ecoformer.ops.exported import exporting, power_of_two, rows
from ecoformer.ops.hash_attention import hash_attention
from ecoformer.randomness import seeded

LARGEST_EXPONENT = 12
KEY_WEIGHT_GAIN = 4
"""The exponent's linear map is scaled by this, so that it learns faster than the other layers.

With 1, ListOps did not start to learn in 2,500 steps; with 16, recall got worse.
"""
_SMALLEST = 2.0**-20
"""Of a learned beta or weight."""


class LearnedAffinity(nn.Module):
    """Groups of bits whose beta and weight are learned, one of each for every head and group.

    The parameters are unbounded: beta is the sigmoid of one, the weights of a head are the softmax of the
    other. They start at beta = 1/2 and equal weights.
    """

    def __init__(self, num_heads: int, groups: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(num_heads, groups))
        self.weight = nn.Parameter(torch.zeros(num_heads, groups))

    def forward(self, bits: int) -> Tensor:
        """The affinity as it is now: (H, G, s + 1)."""
        beta, weight = torch.sigmoid(widened(self.beta)), torch.softmax(widened(self.weight), dim=-1)
        beta, weight = beta.clamp_min(_SMALLEST), weight.clamp_min(_SMALLEST)
        return affinities.grouped(beta, weight, bits, bits // self.beta.shape[1])


class KeyWeights(nn.Module):
    """How much each key counts, a power of two for every head: a shift in hardware.

    Four times a linear map of the token gives the exponent, kept between -12 and 12 by a tanh, and rounded.
    It starts at 0: all keys count 1. Rounding is straight-through: the gradient ignores it.
    """

    def __init__(self, dim: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.exponent = nn.Linear(dim, num_heads, bias=bias)
        for parameter in self.exponent.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, dim) to weights (B, H, N) in the dtype of projections, where they are exact."""
        projected = self.exponent(rows(x)).view(*x.shape[:2], self.exponent.out_features).transpose(1, 2)
        scale = KEY_WEIGHT_GAIN / LARGEST_EXPONENT
        exponent = LARGEST_EXPONENT * torch.tanh(widened(projected) * scale)
        rounded = exponent + (exponent.round() - exponent).detach()
        return power_of_two(rounded).to(projected.dtype)


class HashedAttention(Attention):
    """Queries and keys become codes, by one projection and one hasher; codes attend to values.

    Args:
        dim: channels of a token.
        num_heads: heads, each with hash functions of its own.
        hasher: codes of the projected tokens, for `num_heads` heads.
        bias: the affinity: "paper" or "tight", see `ecoformer.affinity`.
        groups: cut codes into groups of bits with a learned affinity, see `LearnedAffinity`.
        separate: project queries and keys separately, so they have different codes. Hash functions that are
            fitted learn from the keys.
        key_weights: learn how much each key counts, see `KeyWeights`.
        kwargs: `qkv_bias`, `proj_drop`, `local`, as every mechanism takes them.
    """

    shared_qk = True
    own = ("local", "hasher", "affinity", "key_weights")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hasher: Hasher,
        *,
        bias: Literal["paper", "tight"] = "paper",
        groups: int | None = None,
        separate: bool = False,
        key_weights: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        width = num_heads * hasher.head_dim * (2 if separate else 1)
        has_bias = self.qk.bias is not None
        if width != dim:
            self.qk = nn.Linear(dim, width, bias=has_bias)
        if bias not in ("paper", "tight"):
            raise ValueError(f'bias must be "paper" or "tight", got {bias!r}')
        if hasher.num_heads != num_heads:
            raise ValueError(f"hasher is for {hasher.num_heads} heads, but num_heads={num_heads}")
        if groups is not None:
            if bias != "paper":
                raise ValueError(f"bias={bias!r} and groups={groups} exclude each other: leave one out")
            if groups < 1 or hasher.bits % groups or hasher.bits // groups > affinities.LARGEST:
                raise ValueError(
                    f"groups={groups} must divide codes of {hasher.bits} bits into groups of 1 to "
                    f"{affinities.LARGEST} bits"
                )
        self.bias = bias
        self.groups, self.separate = groups, separate
        self.hasher = hasher
        self.affinity = None if groups is None else LearnedAffinity(num_heads, groups)
        self.key_weights = KeyWeights(dim, num_heads, has_bias) if key_weights else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        key_weight: Tensor | None = None,
    ) -> Tensor:
        """Hash queries and keys and attend."""
        keys: Tensor = self.hasher(k, key_padding_mask)
        queries = keys if q is k else self.hasher(q)
        bits, f = self.hasher.bits, None
        if self.affinity is not None:
            f = self.affinity(bits)
        elif self.bias == "tight":
            f = affinities.tight(bits, device=v.device)
        out: Tensor = hash_attention(
            queries,
            keys,
            v,
            f,
            key_weight=key_weight,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            bits=bits,
        )
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.separate:
            return super()._project(x)
        tokens = rows(x)
        if exporting() and type(self.qk) is nn.Linear:  # two products instead of one that is then cut
            weight, bias, half = self.qk.weight, self.qk.bias, self.qk.out_features // 2
            parts = (slice(None, half), slice(half, None))
            projected = [F.linear(tokens, weight[p], None if bias is None else bias[p]) for p in parts]
        else:
            projected = list(self.qk(tokens).chunk(2, dim=-1))
        q, k, v = (self._heads(part, x) for part in (*projected, self.v(tokens)))
        return q, k, v

    def _token_terms(self, x: Tensor) -> dict[str, Tensor]:
        return {} if self.key_weights is None else {"key_weight": self.key_weights(x)}

    def operations(self, batch: int, tokens: int) -> Operations | None:
        """Hash functions, sums over keys, their read, and the division.

        Codes only add. The denominator, the bias and the division multiply.
        """
        hashing = self.hasher.operations(batch, tokens)
        if hashing is None:
            return None
        hashing = hashing * (2 if self.separate else 1)
        heads, channels = batch * self.num_heads, self.head_dim
        weighting: Operations = []
        if self.key_weights is not None:
            weighting = [Counts(shift=channels) * (heads * tokens)]
        if self.groups is not None:
            return [*hashing, *weighting, *self._grouped_operations(heads, tokens)]
        bits = self.hasher.bits
        sums: Operations = [
            Product(bits, tokens, channels, heads, left="code"),
            Counts(add=bits + channels) * (heads * tokens),
        ]
        read: Operations = [
            Product(tokens, bits, channels, heads, left="code"),
            Product(tokens, bits, 1, heads, left="code", term=mac()),
            Counts(mul=1 + channels) * (heads * tokens),
        ]
        return [*hashing, *weighting, *sums, *read]

    def _grouped_operations(self, heads: int, tokens: int) -> Operations:
        """A token adds itself and its value to one bucket of every group, and reads one row of every table.

        An array without tables multiplies by all features instead, most of which are zero: these products
        carry no counts of their own. Mixing the buckets takes s steps over the 2^s values of a group.
        """
        groups = self.groups or 1
        size, columns = self.hasher.bits // groups, self.head_dim + 1
        values = 1 << size
        token = Counts(add=groups * columns)
        mixing = (mac(size) + Counts(mul=1)) * (groups * values * columns * heads)
        return [
            Product(groups * values, tokens, columns, heads, left="code", term=Counts()),
            token * (heads * tokens),
            Product(values, values, columns, heads * groups, term=Counts()),
            mixing,
            Product(tokens, groups * values, columns, heads, left="code", term=Counts()),
            (token + Counts(mul=columns)) * (heads * tokens),
        ]


class _KernelAttention(HashedAttention):
    """Hashed attention with kernelised hash functions of one class."""

    hasher_class: type[KernelHasher] = KernelHasher

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bits: int = 16,
        support: int = 25,
        trainable: bool = False,
        **kwargs: Any,
    ) -> None:
        head_dim = head_dim_of(dim, num_heads)
        hasher = self.hasher_class(num_heads, head_dim, bits, support, trainable=trainable)
        super().__init__(dim, num_heads, hasher, **kwargs)


@register_attention("eco")
class EcoAttention(_KernelAttention):
    """The paper's attention: learned kernelised hash functions, 16 bits from 25 support samples.

    Keyword arguments `bits`, `support` and `trainable` are those of `KernelHasher`, the rest are those of
    `HashedAttention`.
    """


@register_attention("klsh_eco")
class KlshEcoAttention(_KernelAttention):
    """EcoFormer with kernelised locality-sensitive hashing: drawn, not learned, weights."""

    hasher_class = KlshHasher


@register_attention("lsh_eco")
class LshEcoAttention(HashedAttention):
    """EcoFormer with locality-sensitive hashing by random hyperplanes."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bits: int = 16,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        hasher = LshHasher(num_heads, head_dim_of(dim, num_heads), bits, seed=seed)
        super().__init__(dim, num_heads, hasher, **kwargs)


@register_attention("bi_eco")
class BiEcoAttention(HashedAttention):
    """EcoFormer with plain binarisation of features in the place of hash functions.

    The paper's cost figures for it fit 256 features, which is the default; `features="channels"` binarises
    queries and keys themselves, with one bit a channel.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bits: int | None = None,
        features: Literal["channels", "fourier"] = "fourier",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        if bits is None and features == "fourier":
            bits = 256
        hasher = SignHasher(num_heads, head_dim_of(dim, num_heads), bits, features=features, seed=seed)
        super().__init__(dim, num_heads, hasher, **kwargs)


@register_attention("sharp_eco")
class SharpEcoAttention(HashedAttention):
    """Hashed attention that can single out a token: groups of bits, and codes straight from the input.

    One linear map makes the projections whose signs are the codes of queries and keys. There are no support
    samples and nothing is fitted: everything is learned by the gradient. Bits of a group count together, by a
    learned affinity, and every key has a learned weight, a power of two.

    Args:
        dim: channels of a token.
        num_heads: heads.
        bits: bits of a code; more bits are sharper.
        groups: groups that a code is cut into, of at most 8 bits each; default: groups of 4 bits.
        separate: whether queries and keys have different codes.
        key_weights: whether keys have weights.
        kwargs: `qkv_bias`, `proj_drop`, `local`, as every mechanism takes them.
    """

    projects_to_codes = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bits: int = 16,
        groups: int | None = None,
        separate: bool = True,
        key_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        head_dim_of(dim, num_heads)
        if not isinstance(bits, int) or bits < 1:
            raise ValueError(f"bits must be a whole number of at least 1, got {bits!r}")
        if groups is None:
            if bits % 4:
                raise ValueError(f"bits={bits} cannot be cut into groups of 4 bits: set groups")
            groups = bits // 4
        super().__init__(
            dim,
            num_heads,
            SignHasher(num_heads, bits, reach=1.0),
            groups=groups,
            separate=separate,
            key_weights=key_weights,
            **kwargs,
        )

    @classmethod
    @torch.no_grad()
    def from_projections(cls, source: Projections, *, seed: int | None = None, **kwargs: Any) -> Self:
        """A layer whose codes say on which side of random hyperplanes the source's queries and keys lie."""
        new = super().from_projections(source, **kwargs)
        new._settings["seed"] = seed
        heads, bits, dim = new.num_heads, new.hasher.bits, source.dim
        planes = torch.randn(heads, bits, new.head_dim, generator=seeded(seed)).to(source.v)
        parts = [(source.q, source.q_bias), (source.k, source.k_bias)][: 2 if new.separate else 1]
        weights = [planes @ weight.view(heads, new.head_dim, dim) for weight, _ in parts]
        new.qk.weight.copy_(torch.cat(weights).view(-1, dim))
        if new.qk.bias is not None:
            zero = source.v.new_zeros(heads * new.head_dim)
            biases = [zero if bias is None else bias for _, bias in parts]
            rows = [planes @ bias.view(heads, new.head_dim, 1) for bias in biases]
            new.qk.bias.copy_(torch.cat(rows).flatten())
        if not any(owner_of(weight).requires_grad for weight, _ in parts):
            new.qk.requires_grad_(False)
        return new
