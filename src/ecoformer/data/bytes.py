"""Texts as token ids, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

PAD = 0
"""Token id of padding."""

BYTE_IDS = 257
"""Token ids of padding and bytes."""


def byte_tokens(
    texts: Sequence[str | bytes],
    length: int,
    *,
    cut: int | None = None,
    pad_to: Literal["length", "longest"] = "length",
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Texts as token ids (B, length): byte b is b + 1, `PAD` fills up the end.

    The Long Range Arena's own preparation is `byte_tokens(texts, 4096, cut=4000)`.

    Args:
        texts: strings, taken as UTF-8, or bytes.
        length: tokens of a row.
        cut: bytes of a text that are kept, at most `length`, which is also the default.
        pad_to: "longest" makes rows only as long as the longest text needs, but at least one token.
        dtype: of the ids; models take int64 and int32, `torch.int16` is for keeping many texts.
    """
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts must be a list of texts, got one {type(texts).__name__}: put it in a list")
    if dtype not in (torch.int16, torch.int32, torch.int64):
        raise ValueError(f"dtype must be int16, int32 or int64, which hold {BYTE_IDS} ids, got {dtype}")
    kept = kept_bytes(length, cut)
    if pad_to not in ("length", "longest"):
        raise ValueError(f'pad_to must be "length" or "longest", got {pad_to!r}')
    rows = [_first_bytes(text, kept) for text in texts]
    width = length if pad_to == "length" else max([1, *map(len, rows)])
    if not rows:
        return torch.zeros(0, width, dtype=dtype)
    raw = bytearray().join(row.ljust(width, b"\0") for row in rows)
    values = torch.frombuffer(raw, dtype=torch.uint8).view(len(rows), width).to(dtype)
    ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    return values.add_(1).masked_fill_(torch.arange(width) >= ends, PAD)


def kept_bytes(length: int, cut: int | None) -> int:
    """How many bytes of a text are kept, once both settings are found to be in order."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    kept = length if cut is None else cut
    if not 1 <= kept <= length:
        raise ValueError(f"cut must be from 1 to length={length}, got {cut}")
    return kept


def _first_bytes(text: str | bytes, count: int) -> bytes:
    if isinstance(text, str):
        text = text[:count].encode()  # no character has less than one byte
    elif not isinstance(text, bytes):
        raise TypeError(f"texts must hold str or bytes, got {type(text).__name__}")
    return text[:count]
