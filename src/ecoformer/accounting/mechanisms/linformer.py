"""Linformer: softmax attention to k mixtures of the tokens."""

from __future__ import annotations

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms.parts import Heads, around, copy, fused_attention, product
from ecoformer.accounting.mechanisms.registry import register_formula
from ecoformer.attention import LinformerAttention


@register_formula("linformer")
def linformer(layer: LinformerAttention, batch: int, tokens: int) -> Counts:
    """Keys and values are each mixed from N tokens to k rows; attention is to those."""
    h, k = Heads.of(layer, batch, tokens), layer.k
    mixed = h.groups * k * h.channels
    mix = product(h.numbers, tokens * k, mixed, tokens)
    if layer.proj_k.requires_grad:
        # For weights that can be trained, PyTorch mixes transposed tokens, which it can address in place in a
        # single sample only, and copies the transposed result back.
        mix += copy(h.numbers, batch > 1 and layer.dim > 1) + copy(mixed, k > 1 and h.channels > 1)
    else:
        mix += copy(h.numbers, h.repeats)
    return around(layer, h, None) + mix * 2 + fused_attention(h, k)
