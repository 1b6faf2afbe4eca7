"""Samples that scikit-learn ships, without a download: digits, two photographs and English text."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits


@register_dataset("digits")
def digits(*, size: int = 32) -> Splits:
    """1,347 handwritten digits to learn from and 450 to test on, in three equal channels.

    Every fourth digit of each class is for testing, always the same ones.

    Args:
        size: height and width; the original 8 pixels are interpolated bilinearly.
    """
    if size < 8:
        raise ValueError(f"size must be at least the digits' own 8, got {size}")
    source = _sklearn_datasets().load_digits()
    targets = torch.from_numpy(source.target).long()
    grey = torch.from_numpy(source.images).float().unsqueeze(1)
    large = F.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False)
    images = (large * (255 / 16)).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    in_test = torch.zeros(len(targets), dtype=torch.bool)
    in_test[targets.argsort(stable=True)[::4]] = True
    train, test = (Arrays(images[part], targets[part]) for part in (~in_test, in_test))
    return Splits(train, test, "images", classes=10)


def sample_text() -> bytes:
    """The data-set descriptions of scikit-learn, about 70 kB of English."""
    folder = resources.files(_sklearn_datasets()) / "descr"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".rst"))
    return b"".join((folder / name).read_bytes() for name in names)


def sample_images() -> list[Tensor]:
    """The two photographs `china.jpg` and `flower.jpg`, each (height, width, 3) in 0..1."""
    images = _sklearn_datasets().load_sample_images().images
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


def _sklearn_datasets() -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise ImportError("these samples come with scikit-learn: pip install scikit-learn pillow") from error
    return sklearn.datasets
