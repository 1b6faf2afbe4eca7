"""Tokens of real pictures: patches of the two photographs that scikit-learn ships."""

from __future__ import annotations

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn import functional as F


def sample_images() -> list[Tensor]:
    """The two photographs `china.jpg` and `flower.jpg`, each (height, width, 3) in 0..1."""
    images = load_sample_images().images
    return [torch.from_numpy(image.copy()).float() / 255 for image in images]


def image_tokens(
    crops: int, *, size: int = 112, patch: int = 4, seed: int = 0, part: int = 0, normalise: bool = True
) -> Tensor:
    """Patches (crops, 1, N, D) of random square crops, alternately from both photographs.

    The photographs are cut into upright strips as wide as a crop; `part` 0 crops from the even strips, 1 from
    the odd ones, so two calls share no pixel. `normalise` does what the LayerNorm before an attention layer
    does.
    """
    images = sample_images()
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    for index in range(crops):
        image = images[index % len(images)]
        strips = range(part, image.shape[1] // size, 2)
        left = strips[index // len(images) % len(strips)] * size
        top = int(torch.randint(0, image.shape[0] - size + 1, (), generator=generator))
        tokens.append(patches(image[top : top + size, left : left + size], patch))
    stacked = torch.stack(tokens).unsqueeze(1)
    return F.layer_norm(stacked, stacked.shape[-1:]) if normalise else stacked


def patches(image: Tensor, patch: int) -> Tensor:
    """An image (height, width, 3) as patches (N, 3 patch^2), row by row, around mid-grey."""
    blocks = image.permute(2, 0, 1).unfold(1, patch, patch).unfold(2, patch, patch)
    return blocks.permute(1, 2, 0, 3, 4).reshape(-1, 3 * patch * patch) - 0.5
