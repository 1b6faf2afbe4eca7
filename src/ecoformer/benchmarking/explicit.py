"""Softmax attention with its N x N matrix in memory: what the paper compares with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention import SoftmaxAttention


class ExplicitAttention(SoftmaxAttention):
    """Softmax attention step by step, as models were written before fused operators.

    It is not registered: it is a yardstick, and nobody should build a model with it.
    """

    name = "explicit"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Scores, their softmax, and the weighted mean."""
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], -math.inf)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)
        if key_padding_mask is not None:
            weights = weights.nan_to_num(0.0)  # a row of padding alone reads zero
        return F.dropout(weights, self.attn_drop, self.training) @ v


def make_explicit(model: nn.Module) -> nn.Module:
    """Replace SDPA by the explicit matrix in every softmax layer of `model`, in place."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is SoftmaxAttention:
                setattr(owner, name, ExplicitAttention.from_softmax(child))
    return model
