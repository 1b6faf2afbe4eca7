"""Handwritten digits that scikit-learn ships: 1,797 pictures of 8 x 8 pixels, no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.data.registry import register_dataset
from ecoformer.data.samples import sklearn_datasets
from ecoformer.data.splits import Arrays, Splits

_LEVELS = 16  # the brightest pixel of the original


@register_dataset("digits")
def digits(*, size: int = 32) -> Splits:
    """1,347 digits to learn from and 450 to test on, in three equal channels.

    Every fourth digit of each class is for testing, always the same ones.

    Args:
        size: height and width; the original 8 pixels are interpolated bilinearly.
    """
    if size < 8:
        raise ValueError(f"size must be at least the digits' own 8, got {size}")
    source = sklearn_datasets().load_digits()
    targets = torch.from_numpy(source.target).long()
    images = _enlarged(torch.from_numpy(source.images).float(), size)
    by_class = targets.argsort(stable=True)
    in_test = torch.zeros(len(targets), dtype=torch.bool)
    in_test[by_class[::4]] = True
    train, test = (Arrays(images[part], targets[part]) for part in (~in_test, in_test))
    return Splits(train, test, "images", classes=10)


def _enlarged(grey: Tensor, size: int) -> Tensor:
    """Grey levels (N, 8, 8) as bytes (N, 3, size, size)."""
    large = F.interpolate(grey.unsqueeze(1), size=(size, size), mode="bilinear", align_corners=False)
    return (large * (255 / _LEVELS)).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
