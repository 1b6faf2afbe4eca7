"""Conversion: gives the attention layers of an existing transformer another mechanism."""

from ecoformer.attention.weights import Projections
from ecoformer.conversion import foreign as _foreign  # noqa: F401  (registers the rules)
from ecoformer.conversion.convert import Conversion, convert
from ecoformer.conversion.distillation import Distillation, distill
from ecoformer.conversion.huggingface import register_with_transformers
from ecoformer.conversion.rules import Adapter, ImageGrid, Rule, register_conversion
from ecoformer.conversion.transfer import Transfer, transfer

__all__ = [
    "Adapter",
    "Conversion",
    "Distillation",
    "ImageGrid",
    "Projections",
    "Rule",
    "Transfer",
    "convert",
    "distill",
    "register_conversion",
    "register_with_transformers",
    "transfer",
]
