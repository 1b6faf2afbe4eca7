"""Hashers that learn nothing: random hyperplanes, and plain binarisation of features."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ecoformer.hashing.base import Hasher, wide_dtype
from ecoformer.operations import Operations, Product
from ecoformer.ops.eager import unit_length
from ecoformer.randomness import seeded


class _DrawnHasher(Hasher):
    """A hasher whose state is drawn from `seed` when it is made, and again by `fit`, whatever the tokens.

    `fit_hashers` leaves it alone: a network has adapted to what was drawn.
    """

    learns = False

    def learn(self, tokens: Tensor, valid: Tensor | None, generator: torch.Generator, *unused: Any) -> None:
        """Draw again; the tokens do not matter."""
        self.draw(generator)


class LshHasher(_DrawnHasher):
    """Locality-sensitive hashing: on which side of b random hyperplanes a token lies.

    Args:
        num_heads: heads.
        head_dim: D, channels of a head.
        bits: b, the number of hyperplanes.
        seed: of the hyperplanes; None follows `torch.manual_seed`.
    """

    planes: Tensor

    def __init__(self, num_heads: int, head_dim: int, bits: int = 16, *, seed: int | None = None) -> None:
        super().__init__(num_heads, head_dim, bits)
        self.register_buffer("planes", torch.zeros(num_heads, head_dim, bits, dtype=wide_dtype()))
        self.reset_parameters(seeded(seed))

    def draw(self, generator: torch.Generator) -> None:
        """Draw new hyperplanes."""
        self.planes.copy_(torch.randn(self.planes.shape, generator=generator, device="cpu"))

    def operations(self, batch: int, tokens: int) -> Operations:
        """One product with each hyperplane."""
        return [Product(batch * tokens, self.head_dim, self.bits, self.num_heads, right="weight")]

    def project(self, tokens: Tensor) -> Tensor:
        """Products of the unit tokens with the hyperplanes' normals."""
        return unit_length(tokens) @ self.planes.to(tokens.dtype)


class SignHasher(_DrawnHasher):
    """Plain binarisation of features, which deliberately preserves no similarity.

    Args:
        num_heads: heads.
        head_dim: D, channels of a head.
        bits: b; default: one for every channel.
        features: "channels" takes the sign of the first b channels. "fourier" takes the sign of b random
            Fourier features of the unit tokens, cos(w x + p): the paper's transformation of queries and
            keys, binarised.
        seed: of the random features; None follows `torch.manual_seed`.
        reach: gradients pass where a feature is at most this times the root mean square of the token's
            features; None passes them where it is at most 1.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        bits: int | None = None,
        *,
        features: Literal["channels", "fourier"] = "channels",
        seed: int | None = None,
        reach: float | None = None,
    ) -> None:
        bits = head_dim if bits is None else bits
        super().__init__(num_heads, head_dim, bits)
        if reach is not None and not reach > 0:
            raise ValueError(f"reach must be positive or None, got {reach}")
        self.reach = reach
        if features not in ("channels", "fourier"):
            raise ValueError(f'features must be "channels" or "fourier", got {features!r}')
        if features == "channels" and bits > head_dim:
            raise ValueError(
                f'bits must be at most head_dim={head_dim} with features="channels", got {bits}; '
                'features="fourier" takes any number'
            )
        self.features = features
        if features == "fourier":
            dtype = wide_dtype()
            self.register_buffer("frequencies", torch.zeros(num_heads, head_dim, bits, dtype=dtype))
            self.register_buffer("phases", torch.zeros(num_heads, 1, bits, dtype=dtype))
        self.reset_parameters(seeded(seed))

    def draw(self, generator: torch.Generator) -> None:
        """Draw new random features, if there are any."""
        if self.features == "fourier":
            self.frequencies.copy_(torch.randn(self.frequencies.shape, generator=generator, device="cpu"))
            self.phases.copy_(2 * math.pi * torch.rand(self.phases.shape, generator=generator, device="cpu"))

    def operations(self, batch: int, tokens: int) -> Operations:
        """One product for each random feature; the signs of channels cost none."""
        rows = batch * tokens
        product = Product(rows, self.head_dim, self.bits, self.num_heads, right="weight")
        return [product] if self.features == "fourier" else []

    def project(self, tokens: Tensor) -> Tensor:
        """The features themselves."""
        if self.features == "channels":
            return _scaled(tokens[..., : self.bits], self.reach)
        angles = unit_length(tokens) @ self.frequencies.to(tokens.dtype) + self.phases.to(tokens.dtype)
        return _scaled(math.sqrt(2) * torch.cos(angles), self.reach)


def _scaled(y: Tensor, reach: float | None) -> Tensor:
    """y over `reach` times its root mean square, which counts as a constant."""
    if reach is None or not y.requires_grad:
        return y
    square = y.detach().square().mean(dim=-1, keepdim=True)
    return torch.where(square.isinf(), 0, y) * (torch.where(square == 0, 1, square).rsqrt() / reach)
