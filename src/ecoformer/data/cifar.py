"""CIFAR-10 and CIFAR-100 from the official files; torchvision compares their checksums first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.data.stored import is_stored, read_stored
from ecoformer.third_party import import_library

_LAYOUT = "{}, unpacked from the official archive (or the two files that ecoformer.data.store writes)"


@register_dataset(
    "cifar10", layout=_LAYOUT.format("cifar-10-batches-py/ with data_batch_1 to 5 and test_batch")
)
def cifar10(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels in 10 classes."""
    return _cifar("cifar10", root, 10)


@register_dataset("cifar100", layout=_LAYOUT.format("cifar-100-python/ with train, test and meta"))
def cifar100(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels in 100 classes."""
    return _cifar("cifar100", root, 100)


def _cifar(name: str, root: Path, classes: int) -> Splits:
    if is_stored(root):
        splits = read_stored(root)
        if splits.name != name:
            raise ValueError(f"{root} holds {splits.name!r}, not {name}: load it by that name")
        return splits
    try:
        datasets = import_library("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise ImportError("CIFAR is read by torchvision: pip install 'ecoformer[vision]'") from error
    reader: Any = getattr(datasets, name.upper())
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
