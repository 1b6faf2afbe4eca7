"""Pictures: CIFAR's official files, a folder for each class, or tar shards of the WebDataset layout."""

from __future__ import annotations

import glob
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.data.files import IMAGE_ENDINGS, find_files, open_file
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import MOST_CLASSES, Arrays, Images, Splits
from ecoformer.data.stored import is_stored, read_stored
from ecoformer.third_party import import_library

_CIFAR = "{}, unpacked from the official archive (or the two files that ecoformer.data.store writes)"
_SHARD_ENDINGS = ("jpg", "jpeg", "png", "webp")
_MOST_HEADER = 2**20
"""Most bytes of a tar's header."""


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


@register_dataset("webdataset", layout="tar shards, as train-*.tar and val-*.tar")
def webdataset(root: Path, *, train: str = "train-*.tar", test: str = "val-*.tar") -> Splits:
    """Pictures KEY.jpg, .png or .webp, each with its class number in KEY.cls; other files are skipped.

    Args:
        root: folder of the shards.
        train: glob of the shards to learn from, below `root`.
        test: glob of the shards to test on.
    """
    parts = [_shard_images(root, pattern) for pattern in (train, test)]
    return Splits(parts[0], parts[1], "images", 1 + max(int(part.labels.max()) for part in parts))


def _shard_images(root: Path, pattern: str) -> Images:
    shards = sorted(glob.glob(os.path.join(glob.escape(str(root)), pattern)))
    if not shards:
        raise FileNotFoundError(f"webdataset: there is no shard {root / pattern}; set train= and test=")
    indices = [_index(path) for path in shards]
    paths = tuple(path for path, (_, labels) in zip(shards, indices, strict=True) for _ in labels)
    if not paths:
        raise ValueError(f"webdataset: {shards[0]} and the shards beside it hold no samples")
    spans, labels = (torch.cat(parts) for parts in zip(*indices, strict=True))
    return Images(paths, labels, spans)


class _Headers(io.BufferedReader):
    """A tar whose headers are read; `tarfile` itself reads as many bytes as a header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def _index(path: str) -> tuple[Tensor, Tensor]:
    """First byte and size of a shard's pictures (N, 2), and their classes (N,)."""
    try:
        with _Headers(open_file(path)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return _scan(file, tar)
    except (OSError, MemoryError):
        raise
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a plain tar, is damaged or compressed: {one_line(error)}") from error
    except Exception as error:  # hostile headers fail in more ways than tarfile has classes for
        raise ValueError(f"{path}: {one_line(error)}") from error


def _scan(file: _Headers, tar: tarfile.TarFile) -> tuple[Tensor, Tensor]:
    length, last = os.fstat(file.fileno()).st_size, 0
    pictures: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    for entry in tar:
        if entry.offset_data <= last or entry.size < 0:  # would go round in circles
            raise ValueError(f"the header of {entry.name!r} is damaged")
        last = entry.offset_data
        if not entry.isfile() or entry.issparse():
            continue
        if entry.offset_data + entry.size > length:
            raise ValueError(f"it is cut short within {entry.name!r}: download it again")
        _, dot, ending = entry.name.rpartition("/")[2].partition(".")
        key, ending = entry.name.removesuffix(dot + ending), ending.lower()
        if ending in _SHARD_ENDINGS:
            if key in pictures:
                raise ValueError(f"the sample {key!r} has two pictures")
            pictures[key] = (entry.offset_data, entry.size)
        elif ending == "cls":
            labels[key] = _label(file, entry)
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile ends quietly at anything else
        raise ValueError(f"it is cut short or damaged at byte {tar.offset}")
    alone = sorted(pictures.keys() ^ labels.keys())
    if alone:
        lacks = "a label, KEY.cls" if alone[0] in pictures else "a picture"
        raise ValueError(f"the sample {alone[0]!r} lacks {lacks}")
    spans = torch.tensor(list(pictures.values()), dtype=torch.int64).view(-1, 2)
    return spans, torch.tensor([labels[key] for key in pictures], dtype=torch.int64)


def _label(file: _Headers, entry: tarfile.TarInfo) -> int:
    file.seek(entry.offset_data)
    text = file.read(min(entry.size, 20)).strip()
    if entry.size > 20 or not text.isdigit() or int(text) >= MOST_CLASSES:
        raise ValueError(f"{entry.name!r} must hold a class number below {MOST_CLASSES:,}, got {text!r}")
    return int(text)


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
    if is_stored(root):
        splits = read_stored(root)
        if splits.name != name:
            raise ValueError(f"{root} holds {splits.name!r}, not {name}: load it by that name")
        return splits
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
