"""Attention mechanisms: one interface, one registry, one file each."""

from ecoformer.attention.base import Attention
from ecoformer.attention.eco import (
    BiEcoAttention,
    EcoAttention,
    HashedAttention,
    KlshEcoAttention,
    LshEcoAttention,
)
from ecoformer.attention.registry import (
    attention_class,
    create_attention,
    list_attentions,
    register_attention,
)
from ecoformer.attention.softmax import SoftmaxAttention

__all__ = [
    "Attention",
    "BiEcoAttention",
    "EcoAttention",
    "HashedAttention",
    "KlshEcoAttention",
    "LshEcoAttention",
    "SoftmaxAttention",
    "attention_class",
    "create_attention",
    "list_attentions",
    "register_attention",
]
