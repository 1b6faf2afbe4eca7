"""Integer inference: int8 weights and inputs, int32 sums, and attention by integer additions."""

from ecoformer.quantization.attention import IntegerAttention
from ecoformer.quantization.quantize import Quantization, QuantizedLayer, integer_layers, quantize

__all__ = ["IntegerAttention", "Quantization", "QuantizedLayer", "integer_layers", "quantize"]
