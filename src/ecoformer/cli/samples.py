"""Images of a folder or texts of a file, as a model takes them, and where a command writes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ecoformer.cli.sources import Source, input_name, longest_text
from ecoformer.data.files import IMAGE_ENDINGS, find_files, read_image
from ecoformer.data.texts import byte_tokens


def check_target(target: Path, force: bool) -> None:
    """Refuse a file that cannot or must not be written, before any work is done."""
    if target.is_dir():
        raise IsADirectoryError(f"OUT must be a file, but {target} is a folder")
    if os.path.lexists(target) and not force:  # a link counts, wherever it leads
        raise FileExistsError(f"OUT: {target} exists; choose another name or pass --force")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"OUT: no such folder: {target.parent}")


_REMEDIES = {"input_ids": "texts: pass a text file", "pixel_values": "images: pass a folder of images"}


class Samples:
    """Batches of images in a folder or texts in a file, as the model takes them, in a new order each time."""

    def __init__(self, source: Source, path: Path, batch: int, seed: int) -> None:
        self.source, self.path, self.batch, self.seed = source, path, batch, seed
        takes, given = input_name(source.model), "pixel_values" if path.is_dir() else "input_ids"
        if given != takes and takes in _REMEDIES:
            raise ValueError(f"--data {path}: {source.what} takes {_REMEDIES[takes]}")
        self.items: list[Any] = self._image_files() if path.is_dir() else self._texts()

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        order = list(self.items)
        random.Random(self.seed).shuffle(order)
        self.seed += 1
        for start in range(0, len(order), self.batch):
            yield self._make(order[start : start + self.batch])

    def _reads_bytes(self) -> bool:
        from ecoformer.models.text import TextEncoder

        return isinstance(self.source.model, TextEncoder)

    def _texts(self) -> list[str]:
        if self.source.tokenizer is None and not self._reads_bytes():
            raise ValueError(
                f"--data {self.path}: {self.source.what} has no tokeniser for texts: pass a transformers "
                "folder that includes the tokeniser (tokenizer.save_pretrained), or call ecoformer in Python"
            )
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"--data {self.path} is not UTF-8 text: {error}") from error
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise ValueError(f"--data {self.path} is empty")
        return texts

    def _image_files(self) -> list[str]:
        files = find_files(self.path, IMAGE_ENDINGS, deep=True)
        if not files:
            raise ValueError(f"--data {self.path} has no images ({', '.join(IMAGE_ENDINGS)})")
        self.transform: Any = self.source.images
        if hasattr(self.source.model, "pretrained_cfg"):
            from timm import data

            timm_data: Any = data
            settings = timm_data.resolve_model_data_config(self.source.model)
            self.transform = timm_data.create_transform(**settings, is_training=False)
        if self.transform is None:
            raise ValueError(
                f"--data {self.path}: {self.source.what} does not say how it prepares images "
                "(preprocessor_config.json)"
            )
        return files

    def _make(self, items: list[Any]) -> Any:
        if self.path.is_dir():
            return torch.stack([self.transform(read_image(file)) for file in items])
        most = min(512, longest_text(self.source.model))
        if self._reads_bytes():
            return byte_tokens(items, min(most, max(len(text.encode()) for text in items)))
        tokenizer: Any = self.source.tokenizer
        texts = tokenizer(items, padding=True, truncation=True, max_length=most, return_tensors="pt")
        return dict(texts)
