"""Opening a model by a name, a file or a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints import CheckpointError, folders, load, load_official
from ecoformer.third_party import check_timm_name, import_timm


@dataclass(frozen=True)
class Source:
    """A model and, for text, its tokeniser."""

    model: nn.Module
    what: str
    tokenizer: Callable[..., Any] | None = None
    notes: tuple[str, ...] = ()


def open_model(
    name: str,
    *,
    architecture: str | None = None,
    pretrained: bool = False,
    image_size: int | None = None,
) -> Source:
    """Open a model.

    `name` is a file of `ecoformer.save` or of the authors of EcoFormer; weights of the timm model
    `architecture`; a folder written by `save_pretrained` of transformers or ours; or the name of a timm
    model, built for images of `image_size` if it takes one size only.
    """
    path = Path(name)
    is_name = not path.is_dir() and not path.is_file()
    if architecture is not None and not path.is_file():
        raise ValueError(f"--model is for a weights file, but {name} is not a file")
    if pretrained and not is_name:
        raise ValueError(f"--pretrained is for the name of a timm model, but {name} has its own weights")
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_weights(path, architecture) if architecture else _from_file(path)
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin") or len(path.parts) > 1:
        raise FileNotFoundError(f"no such file: {name}")
    notes = () if pretrained else (f"the weights of {name} are random: --pretrained starts from timm's",)
    return Source(_timm(name, image_size, pretrained=pretrained), f"timm model {name}", notes=notes)


def _from_file(path: Path) -> Source:
    hint = (
        "Weights of a timm model need its name: --model pvt_v2_b0 with convert; other commands take "
        "the output of convert, or the name itself"
    )
    try:
        if _is_safetensors(path):
            return Source(load(path), f"checkpoint {path.name}")
        return Source(load_official(path), f"released checkpoint {path.name}")
    except CheckpointError as error:
        raise CheckpointError(f"{str(error).rstrip('.')}. {hint}") from error


def _is_safetensors(path: Path) -> bool:
    """By the name or the first bytes: the header's length, then JSON."""
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _from_weights(path: Path, architecture: str) -> Source:
    from timm.models import load_checkpoint, load_state_dict

    with _file_errors(f"{path.name} cannot be read as weights"):
        state = load_state_dict(str(path), weights_only=True)
    names = ("head.weight", "fc.weight", "classifier.weight")
    head = next((state[name] for name in names if name in state), None)
    model = _timm(architecture, **({} if head is None else {"num_classes": head.shape[0]}))
    with _file_errors(f"{path.name} does not fit {architecture}"):
        load_checkpoint(model, str(path), strict=True, weights_only=True)
    return Source(model, f"timm model {architecture} with the weights of {path.name}")


def _from_folder(path: Path) -> Source:
    with _file_errors(f"{path.name}/ cannot be read"):
        ours = folders.is_ours(path)
    if ours:
        return Source(load(path), f"checkpoint {path.name}/")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"folder {path} has no config.json: was it written by save_pretrained?")
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = folders.load_transformers(path, safetensors_only=False)
    files = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
    tokenizer = None
    if any((path / name).is_file() for name in files):
        from transformers import AutoTokenizer

        with _file_errors(f"{path.name}/ cannot be loaded by transformers"):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return Source(model, f"transformers model {path.name}/", tokenizer)


def _timm(name: str, image_size: int | None = None, **arguments: Any) -> nn.Module:
    check_timm_name(name, f"{name!r} is not a file, a folder or a timm model")
    create = import_timm().create_model
    model: nn.Module
    if image_size is not None:
        with contextlib.suppress(TypeError):  # models for images of any size have no such argument
            model = create(name, img_size=image_size, **arguments)
            return model.eval()
    model = create(name, **arguments)
    return model.eval()


@contextlib.contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Any error that another library raises for a user's file, as one line that names the file."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from error
