"""English text as tokens (B, 1, N, D), one head, as a hasher takes them."""

from __future__ import annotations

import torch
from torch import Tensor

TEXT_SPAN = 6
"""Bytes that a token looks back on."""


def text_tokens(text: bytes, count: int, *, length: int = 784, dim: int = 32, seed: int = 0) -> Tensor:
    """Stretches of `text` as byte tokens: fixed random embeddings of a byte and, fading, those before it."""
    table = torch.randn(TEXT_SPAN, 256, dim, generator=torch.Generator().manual_seed(2022))
    table = table * (0.7 ** torch.arange(TEXT_SPAN))[:, None, None]
    generator = torch.Generator().manual_seed(seed)
    if len(text) < length + TEXT_SPAN:
        raise ValueError(
            f"text has {len(text)} bytes, fewer than length + {TEXT_SPAN} = {length + TEXT_SPAN}"
        )
    tokens = []
    for _ in range(count):
        start = int(torch.randint(TEXT_SPAN, len(text) - length + 1, (), generator=generator))
        ids = torch.tensor(list(text[start - TEXT_SPAN : start + length]))
        looks = [table[back][ids[TEXT_SPAN - back : TEXT_SPAN - back + length]] for back in range(TEXT_SPAN)]
        tokens.append(torch.stack(looks).sum(dim=0))
    return torch.stack(tokens).unsqueeze(1)
