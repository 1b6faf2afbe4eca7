"""Attention as the code computes it that the paper's authors released; only `load_official` builds it.

It differs from the paper in three ways. The kernel's width is the mean squared distance of the tokens at hand
from the support samples, for each sample and head. sign(0) is 0. The constant part of a query's numerator is
b + 1 times its own value, that of its denominator b + 1 times the number of tokens.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ecoformer.attention import HashedAttention, register_attention
from ecoformer.attention.base import head_dim_of
from ecoformer.hashing import KernelHasher
from ecoformer.ops.eager import full_precision, squared_distances, unit_length, widened


class OfficialHasher(KernelHasher):
    """Codes of -1, 0 and 1; hash functions come from a released checkpoint, so `sigma` is not used."""

    learns = False
    operations = KernelHasher.operations

    def learn(self, *args: Any) -> NoReturn:
        """Refused."""
        raise ValueError("hash functions of a released checkpoint are not fitted: convert the model to eco")

    def project(self, tokens: Tensor) -> Tensor:
        """Real numbers whose signs are the codes."""
        support, mean, weight = (x.to(tokens.dtype) for x in (self.support_samples, self.mean, self.weight))
        distances = squared_distances(unit_length(tokens), support)
        width = distances.mean(dim=(-2, -1), keepdim=True)
        kernel = torch.exp(-distances / (2 * torch.where(width == 0, 1, width)))
        return (kernel - mean.unsqueeze(-2)) @ weight

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Codes (B, H, N, b) in fp32 or fp64; the gradient is that of hard tanh."""
        with full_precision(tokens.device):
            y = self.project(widened(tokens))
            smooth = y.clamp(-1, 1)
            return y.detach().sign() + (smooth - smooth.detach())


@register_attention("official_eco", listed=False)
class OfficialEcoAttention(HashedAttention):
    """The released code's attention, without padding or causal order.

    Args:
        dim: channels of a token.
        num_heads: heads.
        bits: b, length of a code.
        support: m, the number of support samples.
        qkv_bias: whether the input projections have a bias.
        proj_drop: dropout after the output projection.
    """

    supports_causal = False
    supports_padding = False
    operations = HashedAttention.operations

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bits: int = 16,
        support: int = 25,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        out_proj: bool = True,
    ) -> None:
        hasher = OfficialHasher(num_heads, head_dim_of(dim, num_heads), bits, support)
        super().__init__(dim, num_heads, hasher, qkv_bias=qkv_bias, proj_drop=proj_drop, out_proj=out_proj)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        """Two matrix products: codes with values, and codes with their sums."""
        codes: Tensor = self.hasher(q)
        with full_precision(v.device):
            values, bias = v.to(codes.dtype), self.hasher.bits + 1
            sums = torch.cat([codes.mT @ values, codes.sum(dim=-2).unsqueeze(-1)], dim=-1)
            own = torch.cat([values, torch.full_like(values[..., :1], v.shape[-2])], dim=-1)
            top = codes @ sums + bias * own
            return (top[..., :-1] / top[..., -1:]).to(v.dtype)
