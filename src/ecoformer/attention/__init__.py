"""Attention mechanisms: one interface, one registry, one file per mechanism."""

from ecoformer.attention.base import Attention
from ecoformer.attention.combiner import CombinerAttention
from ecoformer.attention.eco import (
    BiEcoAttention,
    EcoAttention,
    HashedAttention,
    KlshEcoAttention,
    LshEcoAttention,
    SharpEcoAttention,
)
from ecoformer.attention.linformer import LinformerAttention
from ecoformer.attention.performer import FpEcoAttention, PerformerAttention
from ecoformer.attention.reformer import ReformerAttention
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
    "CombinerAttention",
    "EcoAttention",
    "FpEcoAttention",
    "HashedAttention",
    "KlshEcoAttention",
    "LinformerAttention",
    "LshEcoAttention",
    "PerformerAttention",
    "ReformerAttention",
    "SharpEcoAttention",
    "SoftmaxAttention",
    "attention_class",
    "create_attention",
    "list_attentions",
    "register_attention",
]
