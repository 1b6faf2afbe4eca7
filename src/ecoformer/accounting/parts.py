"""Which part of a model a layer belongs to, by its name."""

from __future__ import annotations

from torch import nn

from ecoformer.conversion.layers import find_layers

_ATTENTION = {"attn", "attention", "self_attn", "self_attention"}
_FFN = {"mlp", "ffn", "feed_forward", "intermediate"}
_BESIDE = {"output": "intermediate", "linear1": "linear2", "linear2": "linear1"}
"""Names that mean the feed-forward part beside another: Hugging Face's, and PyTorch's own layers'."""


class Parts:
    """The parts of a model: attention, the feed-forward part, and the rest."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, _ in model.named_modules()}
        self._layers = tuple(f"{found.name}." if found.name else "" for found in find_layers(model))

    def of(self, name: str) -> str:
        """ "attention", "ffn" or "other"."""
        words = name.split(".")
        if f"{name}.".startswith(self._layers) or _ATTENTION & set(words):
            return "attention"
        beside = (
            ".".join([*words[:i], _BESIDE[word]]) in self._names
            for i, word in enumerate(words)
            if word in _BESIDE
        )
        return "ffn" if _FFN & set(words) or any(beside) else "other"
