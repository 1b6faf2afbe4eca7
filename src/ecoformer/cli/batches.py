"""A batch of a user's images or texts, to fit hash functions on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ecoformer.arguments import one_line
from ecoformer.cli.sources import Source
from ecoformer.data.files import IMAGE_ENDINGS, find_files, read_image


def sample_batch(source: Source, path: Path, samples: int) -> tuple[Any, int]:
    """The first samples as the model's input, and how many there are."""
    if path.is_dir():
        images = _images(source, path, samples)
        return images, len(images)
    if source.tokenizer is None:
        remedy = "pass a folder of images"
        if not hasattr(source.model, "pretrained_cfg"):
            remedy = (
                "convert a transformers folder that includes the tokeniser (tokenizer.save_pretrained), or "
                "fit in Python with ecoformer.fit_hashers"
            )
        raise ValueError(f"--fit {path}: {source.what} has no tokeniser for texts: {remedy}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--fit {path} is not UTF-8 text: {error}") from error
    texts = [line for line in lines if line.strip()][:samples]
    if not texts:
        raise ValueError(f"--fit {path} is empty")
    most = getattr(getattr(source.model, "config", None), "max_position_embeddings", 512)
    batch = source.tokenizer(
        texts, padding=True, truncation=True, max_length=min(512, most), return_tensors="pt"
    )
    return dict(batch), len(texts)


def _images(source: Source, folder: Path, samples: int) -> Any:
    from timm import data

    files = find_files(folder, IMAGE_ENDINGS, deep=True)[:samples]
    if not files:
        raise ValueError(f"--fit {folder} has no images ({', '.join(IMAGE_ENDINGS)})")
    if not hasattr(source.model, "pretrained_cfg"):
        raise ValueError(f"--fit {folder}: {source.what} does not define its image preprocessing")
    timm_data: Any = data
    settings = timm_data.resolve_model_data_config(source.model)
    transform = timm_data.create_transform(**settings, is_training=False)
    images = []
    for file in files:
        try:
            images.append(transform(read_image(file)))
        except (OSError, ValueError) as error:
            raise ValueError(f"--fit: {file} cannot be read as an image: {one_line(error)}") from error
    return torch.stack(images)
