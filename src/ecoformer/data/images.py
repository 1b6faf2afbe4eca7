"""Pictures in a folder for each class, as ImageNet is unpacked, or in tar shards of the WebDataset layout."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecoformer import storage
from ecoformer.arguments import one_line
from ecoformer.data.files import IMAGE_ENDINGS, find_files, open_file
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import MOST_CLASSES, Images, Splits

_SHARD_ENDINGS = ("jpg", "jpeg", "png", "webp")
_MOST_SHARDS = 1_000_000
_MOST_HEADER = 2**20
"""Most bytes of a tar's header or of a label."""


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
    return Images(paths, labels, classes=classes)


@register_dataset("webdataset", layout="tar shards, as train-{000..012}.tar and val-*.tar")
def webdataset(
    root: Path,
    *,
    train: str = "train-*.tar",
    test: str = "val-*.tar",
    classes: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Splits:
    """Pictures KEY.jpg, .png or .webp, each with its class in KEY.cls or as "label" in KEY.json.

    Args:
        root: folder of the shards.
        train: shards to learn from, below `root`: a glob, or with ranges in braces, `train-{000..012}.tar`.
        test: shards to test on.
        classes: number of classes; default: one more than the greatest label, which must then be below
            100,000.
        cache: folder that keeps the index of each shard until the shard's size or time changes.
    """
    kept = None if cache is None else Path(cache).expanduser()
    parts = [_shard_images(_shards(root, pattern), kept) for pattern in (train, test)]
    greatest = max(int(part.labels.max()) for part in parts)
    most = MOST_CLASSES if classes is None else classes
    if greatest >= most:
        part = next(part for part in parts if int(part.labels.max()) == greatest)
        raise ValueError(
            f"webdataset: {part.paths[int(part.labels.argmax())]} has a sample of class {greatest}, "
            f"not below {most}: correct it or pass classes="
        )
    return Splits(parts[0], parts[1], "images", greatest + 1 if classes is None else classes)


def expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` as a-08.tar, a-09.tar, a-10.tar; a pattern without such ranges is itself."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        return [pattern]
    rests = expand_braces(pattern[found.end() :])
    first, last = int(found[1]), int(found[2])
    if not 0 < (last - first + 1) * len(rests) <= _MOST_SHARDS:
        raise ValueError(f"{found[0]} in {pattern!r} must count up, to {_MOST_SHARDS:,} shards at most")
    numbers = [f"{n:0{len(found[1])}d}" for n in range(first, last + 1)]
    return [pattern[: found.start()] + number + rest for number in numbers for rest in rests]


def _shards(root: Path, pattern: str) -> list[str]:
    found: list[str] = []
    for name in expand_braces(pattern):
        paths = sorted(glob.glob(os.path.join(glob.escape(str(root)), name)))
        if not paths:
            raise FileNotFoundError(f"webdataset: there is no shard {root / name}; set train= and test=")
        found += paths
    return found


class _Index(NamedTuple):
    """First byte and size of a shard's pictures (N, 2), and their classes (N,)."""

    spans: Tensor
    labels: Tensor


def _shard_images(shards: list[str], cache: Path | None) -> Images:
    indices = [scan(path) if cache is None else _cached(path, cache) for path in shards]
    paths = tuple(path for path, index in zip(shards, indices, strict=True) for _ in index.labels)
    if not paths:
        raise ValueError(f"webdataset: {shards[0]} and the shards beside it hold no samples")
    return Images(
        paths, torch.cat([index.labels for index in indices]), torch.cat([i.spans for i in indices])
    )


class _Headers(io.BufferedReader):
    """A tar whose headers are read; `tarfile` itself reads as many bytes as a header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def scan(path: str) -> _Index:
    """The index of a shard, from its headers and labels."""
    try:
        with _Headers(open_file(path)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return _scan(file, tar)
    except (OSError, MemoryError):
        raise
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a plain tar, is damaged or compressed: {one_line(error)}") from error
    except Exception as error:  # hostile headers fail in more ways than tarfile has classes for
        raise ValueError(f"{path}: {one_line(error)}") from error


def _scan(file: _Headers, tar: tarfile.TarFile) -> _Index:
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
        elif ending in ("cls", "json"):
            label = _label(file, entry, ending)
            if label is not None and labels.setdefault(key, label) != label:
                raise ValueError(f"the sample {key!r} has two labels, {labels[key]} and {label}")
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(
        tarfile.BLOCKSIZE
    ):  # tarfile takes anything else for the end, too
        raise ValueError(
            f"it is cut short or damaged: byte {tar.offset} starts neither a file nor the end of a tar"
        )
    alone = sorted(pictures.keys() ^ labels.keys())
    if alone:
        lacks = "a label, KEY.cls or KEY.json" if alone[0] in pictures else "a picture"
        raise ValueError(f"the sample {alone[0]!r} lacks {lacks}")
    spans = torch.tensor(list(pictures.values()), dtype=torch.int64).view(-1, 2)
    return _Index(spans, torch.tensor([labels[key] for key in pictures], dtype=torch.int64))


def _label(file: _Headers, entry: tarfile.TarInfo, ending: str) -> int | None:
    """The class that a label file names; None for JSON without a label."""
    if entry.size > _MOST_HEADER:
        raise ValueError(f"the label {entry.name!r} has {entry.size:,} bytes, more than {_MOST_HEADER:,}")
    file.seek(entry.offset_data)
    data = file.read(entry.size)
    try:
        label: Any = int(data) if ending == "cls" else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{entry.name!r} holds no label: {one_line(error)}") from error
    if ending == "json":
        label = label.get("label") if isinstance(label, dict) else None
        if label is None:
            return None
    if type(label) is not int or not 0 <= label < 2**31:
        raise ValueError(f"{entry.name!r} holds the label {str(label)[:40]!r}, which is not a class number")
    return label


def _cached(path: str, cache: Path) -> _Index:
    """The index of a shard from the cache, where it is kept from now on."""
    state = os.stat(path)
    shard = os.path.abspath(path)
    facts = {"shard": shard, "size": state.st_size, "time": state.st_mtime_ns}
    digest = hashlib.sha256(os.fsencode(shard)).hexdigest()[:16]
    file = cache / f"{Path(path).stem}-{digest}.safetensors"
    try:
        tensors, config = storage.read(file)
        if config == facts and tensors.keys() == set(_Index._fields):
            return _Index(**tensors)
    except (OSError, storage.CheckpointError):
        pass  # it can always be made again
    index = scan(path)
    cache.mkdir(parents=True, exist_ok=True)
    storage.write(file, index._asdict(), facts)
    return index
