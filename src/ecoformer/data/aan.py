"""Pairs of papers from the ACL Anthology Network, in the Long Range Arena's tsv files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ecoformer.data.bytes import BYTE_IDS, byte_tokens, kept_bytes
from ecoformer.data.files import open_file
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits

_FILE = "new_aan_pairs.{}.tsv"
_COLUMNS = 5  # class, id, id, text, text
_CHUNK = 1024
_LONGEST = 2**25  # characters of a line; papers have up to about a million
_LITERAL = re.compile(r"""b(['"])(.*)\1\s*""", re.DOTALL)
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_NAMED = {
    b"n": b"\n",
    b"t": b"\t",
    b"r": b"\r",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
    b"\n": b"",
}


@register_dataset("aan", layout=f"{_FILE.format('train')}, .eval.tsv and .test.tsv of the Long Range Arena")
def aan(
    root: Path,
    *,
    length: int = 4096,
    cut: int | None = None,
    part: Literal["test", "eval"] = "test",
    literals: Literal["decoded", "kept"] = "decoded",
    limit: int | None = None,
) -> Splits:
    """Pairs of texts as bytes; class 1 says that one paper cites the other.

    A row of a file has five columns between tabs: class, two ids, two texts. The texts are written as Python
    writes bytes, b'...', with escapes.

    Args:
        root: the folder of the files, `tsv_data` of the release.
        length: tokens of a row.
        cut: bytes of a text that are kept: at most `length`; without it 4,000, or `length` if that is less.
        part: which file to test on.
        literals: "decoded" reads the bytes that b'...' stands for; "kept" takes b, quotes and escapes as
            text, as the Long Range Arena's own reader does.
        limit: most pairs of each split: the first ones of each class, in equal shares.
    """
    if part not in ("test", "eval"):
        raise ValueError(f'part must be "test" or "eval", got {part!r}')
    if literals not in ("decoded", "kept"):
        raise ValueError(f'literals must be "decoded" or "kept", got {literals!r}')
    kept = kept_bytes(length, min(4000, length) if cut is None else cut)
    files = [root / _FILE.format(name) for name in ("train", part)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"aan: there is no file {file}; it is part of the release's tsv_data")
    train, test = (_pairs(file, length, kept, literals == "decoded", limit) for file in files)
    return Splits(train, test, "pairs", 2, BYTE_IDS, length)


def decode_literal(text: str, most: int) -> bytes:
    """The first `most` bytes of a text that may be written as b'...'; nothing in it is run."""
    # No byte of a literal takes more than four characters, and papers are long.
    found = _LITERAL.fullmatch(text)
    if found is None:
        return _first_bytes(text, most)
    return _ESCAPE.sub(_meaning, _first_bytes(found[2], 4 * most))[:most]


def _first_bytes(text: str, most: int) -> bytes:
    return text[:most].encode(errors="surrogateescape")[:most]


def _meaning(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    if code[:1].isdigit() and code[:1] < b"8":
        return bytes([int(code, 8) & 0xFF])
    return _NAMED.get(code, code if code in b"\\'\"" else escape[0])


def _pairs(file: Path, length: int, kept: int, decode: bool, limit: int | None) -> Arrays:
    chunks: list[Tensor] = []
    labels: list[int] = []
    texts: list[bytes] = []
    shares = None if limit is None else {0: limit // 2, 1: limit - limit // 2}
    for label, pair in _rows(file):
        if shares is not None:
            if not any(shares.values()):
                break
            if not shares[label]:
                continue
            shares[label] -= 1
        labels.append(label)
        texts += [decode_literal(text, kept) if decode else _first_bytes(text, kept) for text in pair]
        if len(texts) == 2 * _CHUNK:
            chunks.append(byte_tokens(texts, length, cut=kept, dtype=torch.int16))
            texts = []
    chunks.append(byte_tokens(texts, length, cut=kept, dtype=torch.int16))
    if not labels:
        raise ValueError(f"aan: {file} holds no pairs")
    return Arrays(torch.cat(chunks).view(-1, 2, length), torch.tensor(labels))


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    raw = io.BufferedReader(open_file(file))
    with io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline="") as lines, _long_fields():
        reader = csv.reader(_lines(file, lines), delimiter="\t")
        try:
            for row in reader:
                yield _label(file, reader.line_num, row), row[3:]
        except csv.Error as error:
            raise ValueError(f"{file}, line {reader.line_num}: {error}") from error


def _lines(file: Path, lines: io.TextIOWrapper) -> Iterator[str]:
    while line := lines.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise ValueError(f"{file} has a line of more than {_LONGEST:,} characters")
        yield line


def _label(file: Path, line: int, row: list[str]) -> int:
    if len(row) != _COLUMNS:
        raise ValueError(f"{file}, line {line}: it has {len(row)} columns between tabs, not {_COLUMNS}")
    try:
        label = float(row[0])
    except ValueError:
        label = -1
    if label not in (0, 1):
        raise ValueError(f"{file}, line {line}: the class must be 0 or 1, got {row[0][:40]!r}")
    return int(label)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Papers are longer than the fields that `csv` takes by default, a setting of the whole process."""
    before = csv.field_size_limit(_LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)
