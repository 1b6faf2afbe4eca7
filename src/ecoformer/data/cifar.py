"""CIFAR-10 and CIFAR-100 from the official files, whose checksums torchvision compares first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.data.stored import is_stored, read_stored

_LAYOUT = "{}, unpacked from the official archive (or the two files that ecoformer.data.store writes)"


@register_dataset(
    "cifar10", layout=_LAYOUT.format("cifar-10-batches-py/ with data_batch_1 to 5 and test_batch")
)
def cifar10(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels in 10 classes."""
    return _cifar("cifar10", root, "CIFAR10", 10)


@register_dataset("cifar100", layout=_LAYOUT.format("cifar-100-python/ with train, test and meta"))
def cifar100(root: Path) -> Splits:
    """50,000 and 10,000 pictures of 32 x 32 pixels in 100 classes."""
    return _cifar("cifar100", root, "CIFAR100", 100)


def _cifar(name: str, root: Path, cls: str, classes: int) -> Splits:
    if is_stored(root):
        splits = read_stored(root)
        if splits.name != name:
            raise ValueError(f"{root} holds {splits.name!r}, not {name}: load it by that name")
        return splits
    train, test = (_read(name, root, cls, train) for train in (True, False))
    return Splits(train, test, "images", classes)


def _read(name: str, root: Path, cls: str, train: bool) -> Arrays:
    reader: Any = getattr(_torchvision_datasets(), cls)
    folder = root / reader.base_folder
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {folder}; unpack {reader.filename} in {root}")
    try:
        source = reader(root=root, train=train, download=False)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: files of {folder} are missing or differ from the official ones, and are not opened: "
            f"unpack {reader.filename} anew"
        ) from error
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
    return Arrays(images, torch.tensor(source.targets, dtype=torch.int64))


def _torchvision_datasets() -> Any:
    try:
        import torchvision.datasets
    except ImportError as error:
        raise ImportError("CIFAR is read by torchvision: pip install 'ecoformer[vision]'") from error
    return torchvision.datasets
