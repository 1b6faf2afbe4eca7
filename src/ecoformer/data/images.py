"""Pictures: CIFAR's official files, or a folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ecoformer.data.files import IMAGE_ENDINGS, find_files
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Images, Splits
from ecoformer.third_party import import_library

_CIFAR = "{}, unpacked from the official archive"


@register_dataset("imagefolder", layout="train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg)")
def imagefolder(root: Path) -> Splits:
    """Pictures of any size; classes are numbered by their names in order.

    Pictures may lie in further folders below that of their class. `val` is preferred to `test`.
    """
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")
    for folder in (root / "train", test):
        if not folder.is_dir():
            raise FileNotFoundError(f"imagefolder: there is no folder {folder}; put CLASS/*.jpg there")
    classes = _classes(root / "train")
    train, test_part = _folder_images(root / "train", classes), _folder_images(test, classes)
    return Splits(train, test_part, "images", len(classes))


def _classes(folder: Path) -> tuple[str, ...]:
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    classes = tuple(sorted(names))
    if not classes:
        raise FileNotFoundError(f"imagefolder: {folder} has no folders; put CLASS/*.jpg there")
    return classes


def _folder_images(folder: Path, classes: tuple[str, ...]) -> Images:
    unknown = sorted(set(_classes(folder)) - set(classes))
    if unknown:
        raise ValueError(f"imagefolder: {folder} has a class {unknown[0]!r} that train lacks")
    found = [find_files(folder / name, IMAGE_ENDINGS, deep=True) for name in classes]
    paths = tuple(path for part in found for path in part)
    if not paths:
        raise FileNotFoundError(f"imagefolder: {folder} holds no pictures ({', '.join(IMAGE_ENDINGS)})")
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(part) for part in found]))
    return Images(paths, labels)


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
