"""Linformer: softmax attention to k learned mixtures of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention.base import Attention
from ecoformer.attention.registry import register_attention
from ecoformer.operations import Operations, Product, mac


@register_attention("linformer")
class LinformerAttention(Attention):
    """Wang et al., 2020: keys and values are projected from N tokens to k rows before softmax attention.

    All heads share both projections. They depend on positions, so the mechanism has a longest sequence and no
    causal order. Padding enters the projections as zeros.

    Args:
        dim: channels of a token.
        num_heads: heads.
        seq_len: longest sequence; a shorter one uses the first rows of the projections.
        k: rows that keys and values are projected to.
        kwargs: those of `Attention`.
    """

    supports_causal = False
    has_weights = True
    sized_by_tokens = True
    own = ("local", "proj_k", "proj_v")

    def __init__(self, dim: int, num_heads: int, *, seq_len: int, k: int = 256, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.seq_len, self.k = seq_len, k
        self.proj_k = nn.Parameter(torch.empty(seq_len, k).uniform_(-(k**-0.5), k**-0.5))
        self.proj_v = nn.Parameter(torch.empty(seq_len, k).uniform_(-(k**-0.5), k**-0.5))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Softmax attention over the projected keys and values."""
        n = k.shape[-2]
        self._check_length(n)
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None, :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        keys, values = self.proj_k[:n].mT @ k, self.proj_v[:n].mT @ v
        dropout = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, keys, values, dropout_p=dropout)

    def operations(self, batch: int, tokens: int) -> Operations:
        """Keys and values are mixed to k rows; the paper's figures fit if scaling a score also adds."""
        self._check_length(tokens)
        groups = batch * self.num_heads
        return [
            Product(groups * self.head_dim, tokens, self.k, 2, right="weight"),
            Product(tokens, self.head_dim, self.k, groups),
            mac(groups * tokens * self.k),
            Product(tokens, self.k, self.head_dim, groups),
        ]

    def _check_length(self, tokens: int) -> None:
        if tokens > self.seq_len:
            raise ValueError(f"linformer was built for seq_len={self.seq_len}, got N={tokens} tokens")

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, seq_len={self.seq_len}, k={self.k}"
