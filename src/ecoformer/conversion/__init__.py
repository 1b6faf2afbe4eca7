"""Conversion: any softmax transformer in, the same model with another mechanism out."""

from ecoformer.attention.weights import Projections
from ecoformer.conversion import foreign as _foreign  # noqa: F401  (registers the rules)
from ecoformer.conversion.convert import convert
from ecoformer.conversion.distillation import Distillation, distill
from ecoformer.conversion.huggingface import register_with_transformers
from ecoformer.conversion.report import Conversion
from ecoformer.conversion.rules import Adapter, Image, Rule, register_conversion

__all__ = [
    "Adapter",
    "Conversion",
    "Distillation",
    "Image",
    "Projections",
    "Rule",
    "convert",
    "distill",
    "register_conversion",
    "register_with_transformers",
]
