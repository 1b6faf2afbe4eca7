"""A model from what a user types: a name, a file or a folder."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ecoformer.checkpoints import CheckpointError, load, load_official


@dataclass(frozen=True)
class Source:
    """A model and, where it is text's, its tokeniser."""

    model: nn.Module
    what: str
    tokenizer: Callable[..., Any] | None = None
    notes: tuple[str, ...] = ()


def open_model(name: str, *, architecture: str | None = None, pretrained: bool = False) -> Source:
    """The model that `name` stands for.

    A file of `ecoformer.save` or of the authors of EcoFormer; weights of a timm model, whose name is
    `architecture`; a folder that `transformers` or our `save_pretrained` wrote; or a timm model's name.
    """
    path = Path(name)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_weights(path, architecture) if architecture else _from_file(path)
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin") or len(path.parts) > 1:
        raise FileNotFoundError(f"there is no file {name}")
    notes = () if pretrained else (f"the weights of {name} are random: --pretrained starts from timm's",)
    return Source(_timm(name, pretrained=pretrained), f"timm model {name}", notes=notes)


def _from_file(path: Path) -> Source:
    if path.suffix == ".safetensors":
        return Source(load(path), f"checkpoint {path.name}")
    try:
        return Source(load_official(path), f"released checkpoint {path.name}")
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} If these are the weights of a timm model, name it with --model, as in --model pvt_v2_b0"
        ) from error


def _from_weights(path: Path, architecture: str) -> Source:
    from timm.models import load_checkpoint, load_state_dict

    state = load_state_dict(str(path), weights_only=True)
    head = next(
        (state[name] for name in ("head.weight", "fc.weight", "classifier.weight") if name in state), None
    )
    arguments = {} if head is None else {"num_classes": head.shape[0]}
    model = _timm(architecture, **arguments)
    try:
        load_checkpoint(model, str(path), strict=True, weights_only=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path.name} does not fit {architecture}: {error}") from error
    return Source(model, f"timm model {architecture} with the weights of {path.name}")


def _from_folder(path: Path) -> Source:
    weights = path / "model.safetensors"
    if weights.is_file():
        try:
            return Source(load(weights), f"checkpoint {path.name}/")
        except CheckpointError:
            pass  # not ours: Hugging Face's files have the same name
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"folder {path} holds no config.json: is it what save_pretrained wrote?")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModel.from_pretrained(path, local_files_only=True)
    has_words = any(
        (path / name).is_file() for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
    )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if has_words else None
    return Source(model, f"transformers model {path.name}/", tokenizer)


def _timm(name: str, **arguments: Any) -> nn.Module:
    import timm

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
        raise ValueError(f"{name!r} is neither a file, nor a folder, nor a timm model: {hint}")
    model: nn.Module = timm.create_model(name, **arguments)
    return model.eval()
