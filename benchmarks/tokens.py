"""Real tokens (B, 1, N, D), one head, as a hasher takes them: patches of photographs, and English text."""

from __future__ import annotations

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F

TEXT_SPAN = 6
"""Bytes that a token looks back on."""


def image_tokens(
    crops: int, *, size: int = 112, patch: int = 4, seed: int = 0, part: int = 0, normalise: bool = True
) -> Tensor:
    """Patches (crops, 1, N, D) of random square crops, alternately from scikit-learn's two photographs.

    The photographs are cut into upright strips as wide as a crop; `part` 0 crops from the even strips, 1 from
    the odd ones, so two calls share no pixel. `normalise` does what the LayerNorm before an attention layer
    does.
    """
    images = [torch.from_numpy(image.copy()).float() / 255 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    for index in range(crops):
        image = images[index % len(images)]
        strips = range(part, image.shape[1] // size, 2)
        left = strips[index // len(images) % len(strips)] * size
        top = int(torch.randint(0, image.shape[0] - size + 1, (), generator=generator))
        tokens.append(_patches(image[top : top + size, left : left + size], patch))
    stacked = torch.stack(tokens).unsqueeze(1)
    return F.layer_norm(stacked, stacked.shape[-1:]) if normalise else stacked


def _patches(image: Tensor, patch: int) -> Tensor:
    """An image (height, width, 3) as patches (N, 3 patch^2), row by row, around mid-grey."""
    blocks = image.permute(2, 0, 1).unfold(1, patch, patch).unfold(2, patch, patch)
    return blocks.permute(1, 2, 0, 3, 4).reshape(-1, 3 * patch * patch) - 0.5


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
