"""Pictures: CIFAR's official files, or a folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ecoformer.data.files import IMAGE_ENDINGS, read_image
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.third_party import import_library

_CIFAR = "{}, unpacked from the official archive"


@register_dataset("imagefolder", layout="train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg)")
def imagefolder(root: Path) -> Splits:
    """Pictures of any size, read by torchvision; classes are numbered by their names in order.

    Pictures may lie in further folders below that of their class. `val` is preferred to `test`.
    """
    reader: Any = import_library("torchvision.datasets").ImageFolder
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")
    for folder in (root / "train", test):
        if not folder.is_dir():
            raise FileNotFoundError(f"imagefolder: there is no folder {folder}; put CLASS/*.jpg there")
    parts = [reader(folder, loader=read_image, is_valid_file=_is_image) for folder in (root / "train", test)]
    if parts[0].classes != parts[1].classes:
        differing = sorted({*parts[0].classes} ^ {*parts[1].classes})
        raise ValueError(f"imagefolder: only one of train and {test.name} has the class {differing[0]!r}")
    return Splits(parts[0], parts[1], "images", len(parts[0].classes))


def _is_image(path: str) -> bool:
    name = os.path.basename(path).lower()
    return name.endswith(IMAGE_ENDINGS) and not name.startswith(".")


@register_dataset(
    "cifar10", layout=_CIFAR.format("cifar-10-batches-py/ with data_batch_1 to 5 and test_batch")
)
def cifar10(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels; torchvision compares the files' checksums first."""
    return _cifar("cifar10", root, 10)


@register_dataset("cifar100", layout=_CIFAR.format("cifar-100-python/ with train, test and meta"))
def cifar100(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels in 100 classes."""
    return _cifar("cifar100", root, 100)


def _cifar(name: str, root: Path, classes: int) -> Splits:
    reader: Any = getattr(import_library("torchvision.datasets"), name.upper())
    folder = root / reader.base_folder
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {folder}; unpack {reader.filename} in {root}")
    try:
        sources = [reader(root=root, train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        raise ValueError(
            f"{name}: files of {folder} are missing or differ from the official ones, and are not opened: "
            f"unpack {reader.filename} again"
        ) from error
    train, test = (
        Arrays(torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(source.targets))
        for source in sources
    )
    return Splits(train, test, "images", classes)
