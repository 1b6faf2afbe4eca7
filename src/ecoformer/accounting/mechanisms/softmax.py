"""Softmax attention: quadratic in tokens."""

from __future__ import annotations

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms.parts import Heads, around, fused_attention
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import Attention


@register_formula("softmax")
def softmax(layer: Attention, batch: int, tokens: int) -> Counts:
    """Four projections; scores, their scaling, softmax and weighted sum of all pairs of tokens."""
    h = Heads.of(layer, batch, tokens)
    return around(layer, h, None) + fused_attention(h, tokens)
