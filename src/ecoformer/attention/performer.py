"""Performer: softmax attention through positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ecoformer.attention.base import Attention
from ecoformer.attention.registry import register_attention
from ecoformer.operations import Counts, Operations, Product
from ecoformer.ops.eager import accumulator, full_precision, unit_length, widened, without
from ecoformer.ops.exported import causal_product
from ecoformer.randomness import seeded

_FLOOR = 1e-4
"""Added to every feature, so that every visible key has some weight."""
_CEILING = 60.0
"""Largest exponent of a causal key's feature: sums of exp(60) still fit fp32."""


@register_attention("performer")
class PerformerAttention(Attention):
    """Choromanski et al., ICLR 2021: exp(q . k / sqrt(d)) as the product of random features, in linear time.

    With x = token / d^(1/4), feature w is exp(w . x - |x|²/2). Without causal order, features are stabilised
    and floored as in performer-pytorch: a query by its largest w . x, keys by the largest of the sequence.

    In causal order that maximum would look into the future. A key's exponent is at most |w|²/2 for any key,
    so causal keys are not stabilised; their exponents are clipped at 60, which only heads of more than about
    64 channels can reach. The floor is then added to features whose mean, not their maximum, is 1, so it
    flattens the weights less than without causal order.

    Features are computed in fp32 (fp64 for fp64), under autocast too.

    Args:
        dim: channels of a token.
        num_heads: heads.
        features: random features of a head.
        seed: of the projection; None follows `torch.manual_seed`. The projection is a buffer: it is saved,
            and only `redraw` changes it.
        kwargs: those of `Attention`.
    """

    own = ("local", "projection")
    projection: Tensor

    def __init__(
        self, dim: int, num_heads: int, *, features: int = 256, seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if features < 1:
            raise ValueError(f"features must be at least 1, got {features}")
        self.features = features
        self.register_buffer("projection", self._draw(seed).to(next(self.parameters())))

    def redraw(self, seed: int) -> None:
        """Replace the projection by that of another seed."""
        self.projection.copy_(self._draw(seed))

    def _draw(self, seed: int | None) -> Tensor:
        if next(self.parameters()).is_meta:  # draw nothing, however much is asked for
            return torch.empty(self.features, self.head_dim, device="meta")
        return orthogonal_gaussian(self.features, self.head_dim, seed)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The ratio of two linear sums over the keys' features."""
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        with full_precision(v.device):
            dtype = accumulator(v.dtype)
            weights = self.projection.to(dtype)
            of_q = _query_features(q.to(dtype), weights)
            of_k = _key_features(k.to(dtype), weights, mask, is_causal)
            # The column of ones gives the denominator. Padded keys are zero here, and so in both sums.
            values = torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], dim=-1)
            values = without(mask, values)
            top = causal_product(of_q, of_k, values) if is_causal else of_q @ (of_k.mT @ values)
            total = top[..., -1:]
            return (top[..., :-1] / torch.where(total == 0, 1, total)).to(v.dtype)

    def operations(self, batch: int, tokens: int) -> Operations:
        """Features of queries and keys, the sum over the keys, its read and the denominator.

        With 256 features the counts fit all printed figures of the paper, which states no formula. Besides
        the products they are: for queries and keys scaling and squares (4 D multiply-adds), half the square
        and the floor (4 F additions), the exponential and its factor (4 F multiplications); the sum of the
        keys' features (F additions) and the division (D multiplications).
        """
        groups, f, d = batch * self.num_heads, self.features, self.head_dim
        rows = groups * tokens
        return [
            Product(rows, d, f, 2, right="weight"),
            Product(f, tokens, d, groups),
            Product(tokens, f, d, groups),
            Product(tokens, f, 1, groups),
            Counts(mul=4 * f + 5 * d, add=5 * f + 4 * d) * rows,
        ]

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, features={self.features}"


@register_attention("fp_eco")
class FpEcoAttention(PerformerAttention):
    """EcoFormer without binarisation: shared queries and keys of unit length, full-precision features.

    Eqs. (3) and (4) of the paper, with the positive features of `PerformerAttention`, for the similarity
    exp(x . y / temperature).
    """

    shared_qk = True

    def __init__(self, dim: int, num_heads: int, *, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.temperature = temperature

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The Performer on unit tokens, scaled so that its 1 / sqrt(d) becomes 1 / temperature."""
        with full_precision(q.device):
            unit = unit_length(widened(q))
            unit = unit * math.sqrt(math.sqrt(self.head_dim) / self.temperature)
        return super().attend(unit, unit, v, key_padding_mask, is_causal)

    def operations(self, batch: int, tokens: int) -> Operations:
        """The Performer's: the paper prints its figures for both."""
        return super().operations(batch, tokens)


def orthogonal_gaussian(rows: int, columns: int, seed: int | None) -> Tensor:
    """Rows orthogonal within blocks of `columns`, with the lengths of independent Gaussian vectors."""
    generator = seeded(seed)

    def gaussian(n: int) -> Tensor:
        return torch.randn(n, columns, generator=generator, dtype=torch.float64, device="cpu")

    blocks = []
    for _ in range(math.ceil(rows / columns)):
        q, r = torch.linalg.qr(gaussian(columns))
        # QR is unique, and Q uniform over rotations, only once R's diagonal is positive.
        blocks.append((q * r.diagonal().sign()).mT)
    lengths = gaussian(rows).square().sum(dim=-1, keepdim=True).sqrt()
    return torch.cat(blocks)[:rows] * lengths


def _exponents(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """w . x (..., N, features) and |x|²/2 (..., N, 1) of scaled tokens."""
    x = x * math.pow(x.shape[-1], -0.25)
    return x @ weights.mT, x.square().sum(dim=-1, keepdim=True) / 2


def _query_features(q: Tensor, weights: Tensor) -> Tensor:
    products, half = _exponents(q, weights)
    highest = products.amax(dim=-1, keepdim=True).detach()
    return (products - half - highest).exp() + _FLOOR


def _key_features(k: Tensor, weights: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    products, half = _exponents(without(mask, k), weights)
    if mask is not None:
        products = products.masked_fill(mask.unsqueeze(-1), -math.inf)
    if is_causal:
        return (products - half).clamp(max=_CEILING).exp() + _FLOOR
    highest = products.amax(dim=(-2, -1), keepdim=True).detach()
    highest = highest.masked_fill(highest == -math.inf, 0)  # all keys are padding
    return (products - half - highest).exp() + _FLOOR
