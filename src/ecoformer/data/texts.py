"""Texts as token ids, byte by byte: reviews of aclImdb, and pairs of papers from the ACL Anthology."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from ecoformer.data.files import find_files, read_files
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits

PAD = 0
"""Token id of padding."""

BYTE_IDS = 257
"""Token ids of padding and bytes."""

_FILE = "new_aan_pairs.{}.tsv"
_CHUNK = 1024
_LONGEST = 2**25  # characters of a line; papers have up to about a million


def byte_tokens(
    texts: Sequence[str | bytes], length: int, *, cut: int | None = None, dtype: torch.dtype = torch.int64
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
def imdb(root: Path, *, length: int = 4096, cut: int | None = None) -> Splits:
    """Reviews as bytes; class 1 is positive. The unrated reviews in `unsup` are left out.

    Args:
        root: the folder aclImdb, or the one that holds it.
        length: tokens of a row.
        cut: bytes kept of each review; default: 4,000, or `length` if that is less.
    """
    kept = check_cut(length, cut)
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    train, test = (_reviews(root / part, length, kept) for part in ("train", "test"))
    return Splits(train, test, "text", 2, BYTE_IDS, length)


def _reviews(folder: Path, length: int, kept: int) -> Arrays:
    negative, positive = (find_files(folder / name, ".txt") for name in ("neg", "pos"))
    if not negative or not positive:
        raise FileNotFoundError(f"imdb: {folder} lacks neg/*.txt or pos/*.txt; unpack aclImdb there")
    labels = torch.tensor([0] * len(negative) + [1] * len(positive))
    texts = read_files(negative + positive, kept)
    return Arrays(byte_tokens(texts, length, cut=kept, dtype=torch.int16), labels)


@register_dataset("aan", layout=f"{_FILE.format('train')} and .test.tsv of the Long Range Arena")
def aan(root: Path, *, length: int = 4096, cut: int | None = None) -> Splits:
    """Pairs of texts as bytes; class 1 means that one paper cites the other.

    A row of a file has five columns between tabs: class, two ids, two texts. The texts are written as Python
    writes bytes, b'...', with escapes.

    Args:
        root: the folder of the files, `tsv_data` of the release.
        length: tokens of a row.
        cut: bytes kept of each text; default: 4,000, or `length` if that is less.
    """
    kept = check_cut(length, cut)
    files = [root / _FILE.format(name) for name in ("train", "test")]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"aan: there is no file {file}; it is part of the release's tsv_data")
    train, test = (_pairs(file, length, kept) for file in files)
    return Splits(train, test, "pairs", 2, BYTE_IDS, length)


def decode_literal(text: str, most: int) -> bytes:
    """The first `most` bytes of a text that may be written as b'...'; nothing in it is run."""
    found = re.fullmatch(r"""b(['"])(.*)\1\s*""", text, re.DOTALL)
    if found is None:
        return first_bytes(text, most)
    # A byte of a literal takes at most four characters. Latin-1 maps characters back to the bytes they were.
    data = first_bytes(found[2], 4 * most)
    return data.decode("unicode_escape", "replace").encode("latin-1", "replace")[:most]


def _pairs(file: Path, length: int, kept: int) -> Arrays:
    chunks: list[Tensor] = []
    labels: list[int] = []
    texts: list[bytes] = []
    for label, pair in _rows(file):
        labels.append(label)
        texts += [decode_literal(text, kept) for text in pair]
        if len(texts) == 2 * _CHUNK:
            chunks.append(byte_tokens(texts, length, cut=kept, dtype=torch.int16))
            texts = []
    chunks.append(byte_tokens(texts, length, cut=kept, dtype=torch.int16))
    if not labels:
        raise ValueError(f"aan: {file} holds no pairs")
    return Arrays(torch.cat(chunks).view(-1, 2, length), torch.tensor(labels))


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    before = csv.field_size_limit(_LONGEST)  # a setting of the process; its default is too short for papers
    try:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as text:
            reader = csv.reader(_lines(text), delimiter="\t")
            for row in reader:
                yield _label(row), row[3:]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(before)


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise ValueError(f"a line has more than {_LONGEST:,} characters")
        yield line


def _label(row: list[str]) -> int:
    if len(row) != 5:
        raise ValueError(f"it has {len(row)} columns between tabs, not 5")
    try:
        return [0.0, 1.0].index(float(row[0]))
    except ValueError:
        raise ValueError(f"the class must be 0 or 1, got {row[0][:40]!r}") from None
