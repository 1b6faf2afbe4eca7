"""Pairs of papers from the ACL Anthology Network, in the Long Range Arena's tsv files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ecoformer.data.files import open_file
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.data.texts import BYTE_IDS, byte_tokens, check_cut, first_bytes

_FILE = "new_aan_pairs.{}.tsv"
_CHUNK = 1024
_LONGEST = 2**25  # characters of a line; papers have up to about a million


@register_dataset("aan", layout=f"{_FILE.format('train')}, .eval.tsv and .test.tsv of the Long Range Arena")
def aan(
    root: Path,
    *,
    length: int = 4096,
    cut: int | None = None,
    part: Literal["test", "eval"] = "test",
    limit: int | None = None,
) -> Splits:
    """Pairs of texts as bytes; class 1 means that one paper cites the other.

    A row of a file has five columns between tabs: class, two ids, two texts. The texts are written as Python
    writes bytes, b'...', with escapes.

    Args:
        root: the folder of the files, `tsv_data` of the release.
        length: tokens of a row.
        cut: bytes kept of each text; default: 4,000, or `length` if that is less.
        part: which file to test on.
        limit: most pairs of each split: the first ones of each class, in equal shares.
    """
    if part not in ("test", "eval"):
        raise ValueError(f'part must be "test" or "eval", got {part!r}')
    kept = check_cut(length, cut)
    files = [root / _FILE.format(name) for name in ("train", part)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"aan: there is no file {file}; it is part of the release's tsv_data")
    train, test = (_pairs(file, length, kept, limit) for file in files)
    return Splits(train, test, "pairs", 2, BYTE_IDS, length)


def decode_literal(text: str, most: int) -> bytes:
    """The first `most` bytes of a text that may be written as b'...'; nothing in it is run."""
    found = re.fullmatch(r"""b(['"])(.*)\1\s*""", text, re.DOTALL)
    if found is None:
        return first_bytes(text, most)
    # A byte of a literal takes at most four characters. Latin-1 maps characters back to the bytes they were.
    data = first_bytes(found[2], 4 * most)
    return data.decode("unicode_escape", "replace").encode("latin-1", "replace")[:most]


def _pairs(file: Path, length: int, kept: int, limit: int | None) -> Arrays:
    chunks: list[Tensor] = []
    labels: list[int] = []
    texts: list[bytes] = []
    left = [1 << 62] * 2 if limit is None else [limit // 2, limit - limit // 2]  # of each class
    for label, pair in _rows(file):
        if not any(left):
            break
        if not left[label]:
            continue
        left[label] -= 1
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
    text = io.TextIOWrapper(io.BufferedReader(open_file(file)), "utf-8", "surrogateescape", newline="")
    reader = csv.reader(_lines(text), delimiter="\t")
    before = csv.field_size_limit(_LONGEST)  # a setting of the process; its default is too short for papers
    try:
        with text:
            for row in reader:
                yield _label(row), row[3:]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(before)


def _lines(file: io.TextIOWrapper) -> Iterator[str]:
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
