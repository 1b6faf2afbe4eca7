"""A batch of a user's own images or texts, to fit hash functions on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ecoformer.cli.sources import Source

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def sample_batch(source: Source, path: Path, samples: int) -> Any:
    """The first samples as the model takes them: a tensor of images, or tokens with their mask."""
    if path.is_dir():
        return _images(source, path, samples)
    if not path.is_file():
        raise FileNotFoundError(f"--fit: there is no folder or file {path}")
    if source.tokenizer is None:
        raise ValueError(
            f"--fit {path}: {source.what} has no tokeniser to read texts with: pass a folder of images"
        )
    texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:samples]
    if not texts:
        raise ValueError(f"--fit {path} holds no text")
    batch = source.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
    return dict(batch)


def _images(source: Source, folder: Path, samples: int) -> Any:
    from PIL import Image
    from timm import data

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)[:samples]
    if not files:
        raise ValueError(f"--fit {folder} holds no image ({', '.join(sorted(IMAGES))})")
    if not hasattr(source.model, "pretrained_cfg"):
        raise ValueError(f"--fit {folder}: {source.what} does not say how it takes images")
    timm_data: Any = data
    settings = timm_data.resolve_model_data_config(source.model)
    transform = timm_data.create_transform(**settings, is_training=False)
    images = []
    for file in files:
        with Image.open(file) as image:
            images.append(transform(image.convert("RGB")))
    return torch.stack(images)
