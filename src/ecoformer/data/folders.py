"""Pictures in a folder for each class, as ImageNet is unpacked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Images, Splits

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True, eq=False)
class FolderImages(Images):
    """Pictures by path."""

    paths: tuple[str, ...]
    labels: Tensor
    classes: tuple[str, ...]

    def encoded(self, i: int) -> bytes:
        """The file of a picture."""
        return Path(self.paths[i]).read_bytes()

    def where(self, i: int) -> str:
        """The picture's path."""
        return self.paths[i]

    def select(self, index: Tensor) -> FolderImages:
        """The pictures of an index."""
        return FolderImages(tuple(self.paths[i] for i in index.tolist()), self.labels[index], self.classes)


@register_dataset("imagefolder", layout="train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg)")
def imagefolder(root: Path) -> Splits:
    """Pictures of any size, decoded when asked for; classes are numbered by their names in order.

    Pictures may lie in further folders below that of their class. `val` goes before `test` where both exist.
    """
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")
    for folder in (root / "train", test):
        if not folder.is_dir():
            raise FileNotFoundError(f"imagefolder: there is no folder {folder}; put CLASS/*.jpg there")
    classes = _classes(root / "train")
    train, test_part = _images(root / "train", classes), _images(test, classes)
    return Splits(train, test_part, "images", len(classes))


def _classes(folder: Path) -> tuple[str, ...]:
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    classes = tuple(sorted(names))
    if not classes:
        raise FileNotFoundError(f"imagefolder: {folder} has no folders; put CLASS/*.jpg there")
    return classes


def _images(folder: Path, classes: tuple[str, ...]) -> FolderImages:
    unknown = sorted(set(_classes(folder)) - set(classes))
    if unknown:
        raise ValueError(f"imagefolder: {folder} has a class {unknown[0]!r} that train has not")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _pictures(folder / name)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise FileNotFoundError(f"imagefolder: {folder} holds no pictures ({', '.join(_ENDINGS)})")
    return FolderImages(tuple(paths), torch.tensor(labels), classes)


def _pictures(folder: Path) -> list[str]:
    return sorted(
        os.path.join(place, file)
        for place, _, files in os.walk(folder, followlinks=True)
        for file in files
        if file.lower().endswith(_ENDINGS) and not file.startswith(".")
    )
