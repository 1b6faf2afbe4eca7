"""Hashed attention as a module: the paper's, and the same with other hash functions."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ecoformer.affinity import Affinity, Bias
from ecoformer.attention.base import Attention, head_dim_of
from ecoformer.attention.registry import register_attention
from ecoformer.backends.hashing import Surrogate
from ecoformer.functional import eco_attention
from ecoformer.hashing import Hasher, KernelHasher, KlshHasher, LshHasher, SignHasher
from ecoformer.operations import Counts, Operations, Product, mac


class HashedAttention(Attention):
    """Queries and keys share one projection; a hasher turns it into codes; codes attend to values.

    Args:
        dim: channels of a token.
        num_heads: heads, each with hash functions of its own.
        hasher: tokens to codes, for `num_heads` heads of dim / num_heads channels.
        bias: "paper", "tight" or "official", see `hash_attention`.
        kwargs: `qkv_bias`, `proj_drop`, `local`, as every mechanism takes them.
    """

    shared_qk = True
    own = ("local", "hasher")

    def __init__(
        self, dim: int, num_heads: int, hasher: Hasher, *, bias: Bias = "paper", **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        Affinity.of(bias, hasher.bits)
        if (hasher.num_heads, hasher.head_dim) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"hasher is for {hasher.num_heads} heads of {hasher.head_dim} channels, "
                f"but dim={dim} and num_heads={num_heads} make {self.num_heads} of {self.head_dim}"
            )
        self.bias: Bias = bias
        self.hasher = hasher

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Hash the shared queries and keys once and attend, in one operator where that can be."""
        return eco_attention(
            q,
            v,
            self.hasher,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            bias=self.bias,
            group=self.token_group,
        )

    def operations(self, batch: int, tokens: int) -> Operations | None:
        """Hash functions, sums over keys, their read, and the division, as the paper counts them.

        Codes only add. The denominator, the bias and the division multiply.
        """
        hashing = self.hasher.operations(batch, tokens)
        if hashing is None:
            return None
        groups, bits, channels = batch * self.num_heads, self.hasher.bits, self.head_dim
        sums: Operations = [
            Product(bits, tokens, channels, groups, left="code"),
            Counts(add=bits + channels) * (groups * tokens),
        ]
        read: Operations = [
            Product(tokens, bits, channels, groups, left="code"),
            Product(tokens, bits, 1, groups, left="code", term=mac()),
            Counts(mul=1 + channels) * (groups * tokens),
        ]
        return [*hashing, *sums, *read]

    def split_problem(self) -> str | None:
        """Why tokens cannot be split over ranks: only `sigma="input"` needs all of them."""
        return None if self.hasher.token_wise else 'sigma="input" needs all tokens, use sigma="stored"'


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
        sigma: Literal["stored", "input"] = "stored",
        trainable: bool = False,
        surrogate: Surrogate = "hardtanh",
        sign_of_zero: int = 1,
        bias: Bias = "paper",
        **kwargs: Any,
    ) -> None:
        hasher = self.hasher_class(
            num_heads,
            head_dim_of(dim, num_heads),
            bits,
            support,
            sigma=sigma,
            trainable=trainable,
            surrogate=surrogate,
            sign_of_zero=sign_of_zero,
        )
        super().__init__(dim, num_heads, hasher, bias=bias, **kwargs)


@register_attention("eco")
class EcoAttention(_KernelAttention):
    """The paper's attention: learned kernelised hash functions, 16 bits from 25 support samples.

    Keyword arguments `bits`, `support`, `sigma`, `trainable`, `surrogate` and `sign_of_zero` are those of
    `KernelHasher`, `bias` is that of `hash_attention`, the rest are those of every mechanism.
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
        surrogate: Surrogate = "hardtanh",
        bias: Bias = "paper",
        **kwargs: Any,
    ) -> None:
        hasher = LshHasher(num_heads, head_dim_of(dim, num_heads), bits, seed=seed, surrogate=surrogate)
        super().__init__(dim, num_heads, hasher, bias=bias, **kwargs)


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
        surrogate: Surrogate = "hardtanh",
        bias: Bias = "paper",
        **kwargs: Any,
    ) -> None:
        if bits is None and features == "fourier":
            bits = 256
        hasher = SignHasher(
            num_heads, head_dim_of(dim, num_heads), bits, features=features, seed=seed, surrogate=surrogate
        )
        super().__init__(dim, num_heads, hasher, bias=bias, **kwargs)
