"""Pictures in tar shards of the WebDataset layout, read at random by an index of each tar."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecoformer import storage
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Images, Splits

_PICTURES = ("jpg", "jpeg", "png", "webp")
_BLOCK = tarfile.BLOCKSIZE
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_SHARDS = 1_000_000


class _Index(NamedTuple):
    """Where a shard's pictures lie, in bytes, and their classes."""

    offsets: Tensor
    sizes: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ShardImages(Images):
    """Pictures by their place in a tar.

    A shard is opened for each picture and closed again, so that any number of workers and shards will do.
    """

    shards: tuple[str, ...]
    shard: Tensor
    offsets: Tensor
    sizes: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def encoded(self, i: int) -> bytes:
        """The file of a picture."""
        size = int(self.sizes[i])
        with open(self.shards[self.shard[i]], "rb") as file:
            file.seek(int(self.offsets[i]))
            data = file.read(size)
        if len(data) < size:
            raise ValueError(f"{self.where(i)} is cut short: the shard has changed since it was indexed")
        return data

    def where(self, i: int) -> str:
        """The shard and the name within it."""
        path, offset = self.shards[self.shard[i]], int(self.offsets[i])
        try:
            with tarfile.open(path, "r:") as tar:
                name = next((entry.name for entry in tar if entry.offset_data == offset), None)
        except (OSError, tarfile.TarError):
            name = None
        return f"{path}: {name or f'the picture at byte {offset}'}"

    def select(self, index: Tensor) -> ShardImages:
        """The pictures of an index."""
        places = (self.shard[index], self.offsets[index], self.sizes[index], self.labels[index])
        return ShardImages(self.shards, *places, self.classes)


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
        classes: how many there are; without it, as many as the greatest class says.
        cache: folder where the index of each shard is kept, until the shard's size or time changes.
    """
    places = [_scanned(_shards(root, pattern), cache) for pattern in (train, test)]
    greatest = max(int(index.labels.max()) for indices in places for index in indices.values())
    if classes is not None and greatest >= classes:
        raise ValueError(f"webdataset: a sample has class {greatest}, beyond classes={classes}")
    names = tuple(map(str, range(greatest + 1 if classes is None else classes)))
    parts = [_images(indices, names) for indices in places]
    return Splits(parts[0], parts[1], "images", len(names))


def expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` as a-08.tar, a-09.tar, a-10.tar; a pattern without such ranges is itself."""
    pieces = _RANGE.split(pattern)
    fixed, ranges = pieces[::3], list(zip(pieces[1::3], pieces[2::3], strict=True))
    total = 1
    for first, last in ranges:
        total *= int(last) - int(first) + 1
        if not 0 < total <= _MOST_SHARDS:
            raise ValueError(f"{{{first}..{last}}} in {pattern!r} must count upwards to a likely number")
    counts = [[f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] for first, last in ranges]
    return ["".join(_woven(fixed, numbers)) for numbers in product(*counts)]


def _woven(fixed: list[str], numbers: tuple[str, ...]) -> list[str]:
    return [fixed[0], *(piece for pair in zip(numbers, fixed[1:], strict=True) for piece in pair)]


def _shards(root: Path, pattern: str) -> list[str]:
    found: list[str] = []
    for name in expand_braces(pattern):
        paths = sorted(glob.glob(os.path.join(glob.escape(str(root)), name)))
        if not paths:
            raise FileNotFoundError(f"webdataset: there is no shard {root / name}; say train= and test=")
        found += paths
    return found


def _scanned(shards: list[str], cache: str | os.PathLike[str] | None) -> dict[str, _Index]:
    """The indices of those shards that hold samples."""
    kept = None if cache is None else Path(cache).expanduser()
    indices = {path: scan(path) if kept is None else _cached(path, kept) for path in shards}
    full = {path: index for path, index in indices.items() if len(index.labels)}
    if not full:
        raise ValueError(f"webdataset: {shards[0]} and the shards beside it hold no samples")
    return full


def _images(indices: dict[str, _Index], classes: tuple[str, ...]) -> ShardImages:
    counts = torch.tensor([len(index.labels) for index in indices.values()])
    joined = _Index(*(torch.cat(parts) for parts in zip(*indices.values(), strict=True)))
    shard = torch.arange(len(indices)).repeat_interleave(counts)
    return ShardImages(tuple(indices), shard, joined.offsets, joined.sizes, joined.labels, classes)


def scan(path: str) -> _Index:
    """The index of a shard, from its headers and labels."""
    shard = _Shard(path, os.path.getsize(path), {}, {})
    try:
        with tarfile.open(path, "r:") as tar:
            for entry in tar:
                if entry.isfile():
                    shard.note(tar, entry)
            end = tar.offset
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no tar, or is damaged or compressed: {error}") from error
    _check_end(path, end)
    return shard.index()


@dataclass(frozen=True)
class _Shard:
    """What is found in a tar, by the samples' keys."""

    path: str
    size: int
    pictures: dict[str, tuple[int, int]]
    labels: dict[str, int]

    def note(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        folder, _, name = entry.name.rpartition("/")
        stem, _, ending = name.partition(".")
        key, ending = f"{folder}/{stem}".lstrip("/"), ending.lower()
        if entry.offset_data + entry.size > self.size:
            raise ValueError(f"{self.path} is cut short within {entry.name}: fetch it again")
        if ending in _PICTURES:
            if key in self.pictures:
                raise ValueError(f"{self.path}: the sample {key!r} has two pictures")
            self.pictures[key] = (entry.offset_data, entry.size)
        elif ending in _LABELS:
            label = self._label(tar, entry, _LABELS[ending])
            if label is not None and self.labels.setdefault(key, label) != label:
                raise ValueError(
                    f"{self.path}: the sample {key!r} has two labels, {self.labels[key]} and {label}"
                )

    def index(self) -> _Index:
        lonely = sorted(self.pictures.keys() ^ self.labels.keys())
        if lonely:
            lacks = "a label, KEY.cls or KEY.json" if lonely[0] in self.pictures else "a picture"
            raise ValueError(f"{self.path}: the sample {lonely[0]!r} lacks {lacks}")
        places = torch.tensor(list(self.pictures.values()), dtype=torch.int64).view(-1, 2)
        labels = torch.tensor([self.labels[key] for key in self.pictures], dtype=torch.int64)
        return _Index(places[:, 0].contiguous(), places[:, 1].contiguous(), labels)

    def _label(
        self, tar: tarfile.TarFile, entry: tarfile.TarInfo, read: Callable[[bytes], Any]
    ) -> int | None:
        file = tar.extractfile(entry)
        try:
            label = read(file.read() if file else b"")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: {entry.name} holds no label: {error}") from error
        if label is None:
            return None
        if type(label) is not int or not 0 <= label < 2**31:
            raise ValueError(f"{self.path}: {entry.name} holds the label {label!r}, which is no class number")
        return label


def _json_label(data: bytes) -> Any:
    found = json.loads(data)
    return found.get("label") if isinstance(found, dict) else None


_LABELS: dict[str, Callable[[bytes], Any]] = {"cls": int, "json": _json_label}


def _check_end(path: str, end: int) -> None:
    """A whole tar ends with a block of zeros; `tarfile` takes anything else for the end as well."""
    with open(path, "rb") as file:
        file.seek(end)
        tail = file.read(_BLOCK)
    if tail != bytes(_BLOCK):
        raise ValueError(
            f"{path} is cut short or damaged: at byte {end} is neither a file nor the end of a tar"
        )


def _cached(path: str, cache: Path) -> _Index:
    """The index that a folder keeps, or a new one that it keeps from now on."""
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
        pass  # an index can always be made anew
    index = scan(path)
    cache.mkdir(parents=True, exist_ok=True)
    storage.write(file, index._asdict(), facts)
    return index
