"""Softmax attention, the baseline: PyTorch's fused operator."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ecoformer.attention.base import Attention
from ecoformer.attention.registry import register_attention
from ecoformer.operations import Operations, softmax_attention


@register_attention("softmax")
class SoftmaxAttention(Attention):
    """Eq. (2) of the paper, by `F.scaled_dot_product_attention`."""

    has_weights = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Weighted mean of the values by softmax of scaled products."""
        dropout = self.attn_drop if self.training else 0.0
        if key_padding_mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)
        padding = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        seen = ~padding.mT
        if is_causal:
            n = q.shape[-2]
            seen = seen & seen.new_ones(n, n).tril()
        # A query that sees no key gets zero, not NaN, as in the other mechanisms.
        blind = ~seen.any(dim=-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | blind, dropout_p=dropout)
        return out.masked_fill(blind, 0)

    def operations(self, batch: int, tokens: int) -> Operations:
        """Every token attends to every token."""
        return softmax_attention(batch * self.num_heads, tokens, tokens, self.head_dim)
