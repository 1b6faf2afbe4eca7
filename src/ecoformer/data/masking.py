"""Masked bytes: some bytes of a text are hidden, and the model predicts them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ecoformer.arguments import shape
from ecoformer.data.files import find_files, read_files
from ecoformer.data.registry import register_dataset
from ecoformer.data.samples import sample_text
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.data.texts import BYTE_IDS, PAD

MASK = BYTE_IDS
"""Token id of a hidden byte."""

_MOST_TEXT = 2**31  # bytes; tokens take six times as much memory
_TEST_SHARE = 10  # one in so many is for testing where the data set has no split


def mask_bytes(tokens: Tensor, generator: torch.Generator, rate: float = 0.15) -> tuple[Tensor, Tensor]:
    """Clean token ids (B, N) as inputs and targets (B, N), both int64.

    Selects a share `rate` of the bytes of each text, at least one. As in BERT, the model sees 80 % of them as
    `MASK`, 10 % as a random byte and 10 % unchanged.

    Args:
        tokens: ids that `byte_tokens` makes; padding is never selected.
        generator: on the device of `tokens`.
        rate: above 0, at most 1.

    Returns:
        What the model sees; and the selected bytes, 0 to 255, `IGNORED` elsewhere.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be above 0 and at most 1, got {rate}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be (B, N), got {shape(tokens)}")
    tokens = tokens.long()
    draw = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    change = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    others = torch.randint(1, BYTE_IDS, tokens.shape, generator=generator, device=tokens.device)
    draw = draw.masked_fill(tokens == PAD, 2)
    asked = (draw < rate) | (draw == draw.amin(dim=1, keepdim=True)) & (draw < 2)
    inputs = tokens.masked_fill(asked & (change < 0.8), MASK)
    inputs = torch.where(asked & (change >= 0.9), others, inputs)
    return inputs, (tokens - 1).masked_fill(~asked, IGNORED)


@register_dataset(
    "masked_bytes", layout="train/ and test/ with .txt files, as aclImdb has them, or .txt files"
)
def masked_bytes(root: Path, *, length: int = 1024, rate: float = 0.15, seed: int = 0) -> Splits:
    """The texts of a folder, joined and cut into stretches.

    Without `train` and `test`, every tenth text is for testing. Of aclImdb only `neg` and `pos` are read.

    Args:
        root: a folder of texts, or one that holds aclImdb.
        length: bytes of a stretch.
        rate: share of bytes that are hidden.
        seed: of what is hidden when testing.
    """
    root = root / "aclImdb" if (root / "aclImdb").is_dir() else root
    train, test = (_texts_below(root / part) for part in ("train", "test"))
    if not train and not test:
        paths = find_files(root, ".txt")
        train, test = [p for i, p in enumerate(paths) if i % _TEST_SHARE], paths[::_TEST_SHARE]
    if not train or not test:
        raise FileNotFoundError(
            f"masked_bytes: {root} must hold train/ and test/ with .txt files, or two .txt files itself"
        )
    size = sum(os.path.getsize(path) for path in (*train, *test))
    if size > _MOST_TEXT:
        raise ValueError(f"masked_bytes: the texts of {root} have {size:,} bytes, more than {_MOST_TEXT:,}")
    stretches = [_stretches(b"\n".join(read_files(paths)), length) for paths in (train, test)]
    return _masked(stretches[0], stretches[1], rate, seed)


@register_dataset("masked_sample")
def masked_sample(*, length: int = 256, rate: float = 0.15, seed: int = 0) -> Splits:
    """`masked_bytes` of 70 kB of English that scikit-learn ships; every tenth stretch is for testing."""
    stretches = _stretches(sample_text(), length)
    in_test = torch.arange(len(stretches)) % _TEST_SHARE == 0
    return _masked(stretches[~in_test], stretches[in_test], rate, seed)


def _texts_below(folder: Path) -> list[str]:
    """Texts in a folder and in those right below it; of reviews, those in `neg` and `pos`."""
    if not folder.is_dir():
        return []
    places = [folder / "neg", folder / "pos"]
    if not all(place.is_dir() for place in places):
        places = [folder, *sorted(e for e in folder.iterdir() if e.is_dir() and e.name != "unsup")]
    return [path for place in places for path in find_files(place, ".txt")]


def _stretches(text: bytes, length: int) -> Tensor:
    """Token ids (N, length) of a text; the bytes left over at its end are dropped."""
    if not 1 <= length <= len(text):
        raise ValueError(f"length must be from 1 to the text's {len(text)} bytes, got {length}")
    count = len(text) // length
    rows = torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8)
    return rows.view(count, length).to(torch.int16).add_(1)


def _masked(train: Tensor, test: Tensor, rate: float, seed: int) -> Splits:
    if not len(train):
        raise ValueError(f"length={test.shape[1]} leaves no stretch to learn from: choose a smaller one")
    inputs, targets = mask_bytes(test, torch.Generator().manual_seed(seed), rate)
    return Splits(
        Arrays(train, torch.tensor(IGNORED, dtype=torch.int16).expand(train.shape)),
        Arrays(inputs.to(torch.int16), targets.to(torch.int16)),
        "tokens",
        classes=256,
        vocabulary=MASK + 1,
        length=train.shape[1],
        masked=rate,
    )
