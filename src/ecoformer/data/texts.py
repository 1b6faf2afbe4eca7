"""The film reviews of aclImdb."""

from __future__ import annotations

from pathlib import Path

import torch

from ecoformer.data.bytes import BYTE_IDS, byte_tokens, kept_bytes
from ecoformer.data.files import find_files, read_files
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits, balanced

_CLASSES = ("neg", "pos")


@register_dataset(
    "imdb", layout="train/pos/*.txt, train/neg/*.txt, test/pos/*.txt and test/neg/*.txt of aclImdb"
)
def imdb(root: Path, *, length: int = 4096, cut: int | None = None, limit: int | None = None) -> Splits:
    """Reviews as bytes; class 1 is a good one. The reviews without a rating in `unsup` are left out.

    Args:
        root: the folder aclImdb, or the one that holds it.
        length: tokens of a row.
        cut: bytes of a review that are kept: at most `length`; without it 4,000, or `length` if that is less.
        limit: most reviews of each split, half of them good.
    """
    kept = kept_bytes(length, min(4000, length) if cut is None else cut)
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    train, test = (_reviews(root / part, length, kept, limit) for part in ("train", "test"))
    return Splits(train, test, "text", 2, BYTE_IDS, length)


def _reviews(folder: Path, length: int, kept: int, limit: int | None) -> Arrays:
    files = [find_files(folder / name, ".txt") for name in _CLASSES]
    for name, found in zip(_CLASSES, files, strict=True):
        if not found:
            raise FileNotFoundError(f"imdb: there is no {folder / name}/*.txt; unpack aclImdb there")
    labels = torch.tensor([0] * len(files[0]) + [1] * len(files[1]))
    paths = files[0] + files[1]
    if limit is not None:
        chosen = balanced(labels, limit)
        labels, paths = labels[chosen], [paths[i] for i in chosen.tolist()]
    return Arrays(byte_tokens(read_files(paths, kept), length, cut=kept, dtype=torch.int16), labels)
