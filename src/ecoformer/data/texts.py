"""Texts as token ids, byte by byte, and the film reviews of aclImdb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ecoformer.data.files import find_files, read_files
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits, balanced

PAD = 0
"""Token id of padding."""

BYTE_IDS = 257
"""Token ids of padding and bytes."""


def byte_tokens(
    texts: Sequence[str | bytes],
    length: int,
    *,
    cut: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Texts as token ids (B, length): byte b is b + 1, the rest is `PAD`.

    The Long Range Arena's own preparation is `byte_tokens(texts, 4096, cut=4000)`.

    Args:
        texts: strings, encoded as UTF-8, or bytes.
        length: tokens of a row.
        cut: bytes kept of each text; default: `length`.
        dtype: of the ids. Models take int64 and int32; int16 is for storage.
    """
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts must be a list of texts, got one {type(texts).__name__}: put it in a list")
    if dtype not in (torch.int16, torch.int32, torch.int64):
        raise ValueError(f"dtype must be int16, int32 or int64, which hold {BYTE_IDS} ids, got {dtype}")
    kept = check_cut(length, length if cut is None else cut)
    rows = [first_bytes(text, kept) for text in texts]
    if not rows:
        return torch.zeros(0, length, dtype=dtype)
    raw = bytearray().join(row.ljust(length, b"\0") for row in rows)
    values = torch.frombuffer(raw, dtype=torch.uint8).view(len(rows), length).to(dtype)
    ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    return values.add_(1).masked_fill_(torch.arange(length) >= ends, PAD)


def check_cut(length: int, cut: int | None) -> int:
    """Bytes to keep of each text: `cut`, or the Long Range Arena's 4,000 as far as `length` allows."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    kept = min(4000, length) if cut is None else cut
    if not 1 <= kept <= length:
        raise ValueError(f"cut must be from 1 to length={length}, got {cut}")
    return kept


def first_bytes(text: str | bytes, count: int) -> bytes:
    """The first bytes of a text; what was decoded with "surrogateescape" is as it was."""
    if isinstance(text, str):
        text = text[:count].encode(errors="surrogateescape")  # a character has at least one byte
    return text[:count]


@register_dataset(
    "imdb", layout="train/pos/*.txt, train/neg/*.txt, test/pos/*.txt and test/neg/*.txt of aclImdb"
)
def imdb(root: Path, *, length: int = 4096, cut: int | None = None, limit: int | None = None) -> Splits:
    """Reviews as bytes; class 1 is positive. The unrated reviews in `unsup` are left out.

    Args:
        root: the folder aclImdb, or the one that holds it.
        length: tokens of a row.
        cut: bytes kept of each review; default: 4,000, or `length` if that is less.
        limit: most reviews of each split, half of them positive.
    """
    kept = check_cut(length, cut)
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    train, test = (_reviews(root / part, length, kept, limit) for part in ("train", "test"))
    return Splits(train, test, "text", 2, BYTE_IDS, length)


def _reviews(folder: Path, length: int, kept: int, limit: int | None) -> Arrays:
    paths: list[str] = []
    counts: list[int] = []
    for name in ("neg", "pos"):
        found = find_files(folder / name, ".txt")
        if not found:
            raise FileNotFoundError(f"imdb: there is no {folder / name}/*.txt; unpack aclImdb there")
        paths += found
        counts.append(len(found))
    labels = torch.arange(2).repeat_interleave(torch.tensor(counts))
    if limit is not None:
        chosen = balanced(labels, limit)
        labels, paths = labels[chosen], [paths[i] for i in chosen.tolist()]
    return Arrays(byte_tokens(read_files(paths, kept), length, cut=kept, dtype=torch.int16), labels)
