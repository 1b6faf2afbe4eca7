"""Samples that scikit-learn ships, without a download: digits and English text."""

from __future__ import annotations

from importlib import resources

import torch
from torch.nn import functional as F

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.third_party import import_library


@register_dataset("digits")
def digits(*, size: int = 32) -> Splits:
    """1,347 handwritten digits to learn from and 450 to test on, in three equal channels.

    Every fourth digit of each class is for testing, always the same ones.

    Args:
        size: height and width; the original 8 pixels are interpolated bilinearly.
    """
    if size < 8:
        raise ValueError(f"size must be at least the digits' own 8, got {size}")
    source = import_library("sklearn.datasets").load_digits()
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
    folder = resources.files(import_library("sklearn.datasets")) / "descr"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".rst"))
    return b"".join((folder / name).read_bytes() for name in names)
