"""Folders that `save_pretrained` wrote: ours, and those of Hugging Face's transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints.describe import leads_elsewhere
from ecoformer.checkpoints.limits import Held, check_numbers, offline, within
from ecoformer.conversion.huggingface import METHOD, reconvert, register_with_transformers
from ecoformer.storage import CheckpointError, blaming
from ecoformer.third_party import import_library

WEIGHTS = "model.safetensors"
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_INDICES = "*.index.json"
"""Which file of weights holds which tensor."""
_BYTES_PER_TENSOR = 128
"""At least so many, with its entry in the header."""
_LARGEST_JSON = 1 << 24
_LARGEST = Held(1 << 10, 1 << 32, 1 << 34)
"""What a model without weights is taken to hold."""
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def is_ours(folder: Path) -> bool:
    """Whether our `save_pretrained` wrote the folder: transformers names its own models in config.json."""
    return (folder / WEIGHTS).is_file() and not is_of_transformers(folder)


def is_of_transformers(folder: Path) -> bool:
    """Whether config.json is that of a model of transformers."""
    return not {"architectures", "model_type"}.isdisjoint(_read_config(folder))


def has_weights(folder: Path) -> bool:
    """Whether there is any file of weights."""
    return any(True for kind in _WEIGHT_FILES for _ in folder.glob(kind))


def load_transformers(folder: Path, *, name: str = "", safetensors_only: bool = True) -> nn.Module:
    """The model in a folder of transformers, converted again if `convert` had converted it.

    Its class is the one that was saved, head included. Code in the folder never runs, and no file outside of
    the folder is opened. `name` is for error messages.
    """
    with blaming(f"{name or f'{folder.name}/'} cannot be loaded by transformers"):
        cls, config = _class_and_config(folder)
        for index in folder.glob(_INDICES):
            _check_index(index)
        size = sum(file.stat().st_size for kind in _WEIGHT_FILES for file in folder.glob(kind))
        held = Held(size // _BYTES_PER_TENSOR, size, size)
        check_numbers({"model": config, "conversions": []}, held, "config.json")
        safe = _LOCAL | ({"use_safetensors": True} if safetensors_only else {})
        with offline(), within(held, "config.json"):
            model, loading = cls.from_pretrained(folder, output_loading_info=True, **safe)
        odd = [name for kind in ("missing_keys", "mismatched_keys") for name in loading.get(kind, ())]
        if odd:
            raise ValueError(
                f"{len(odd)} weights are missing or of another shape, such as {sorted(map(str, odd))[0]}"
            )
        return cast(nn.Module, model)


def build_transformers(
    folder: Path, name: str, *, resolution: int | None = None, tokens: int | None = None
) -> nn.Module:
    """The model that a folder's config.json describes, with random weights.

    `resolution` replaces the size of its images; `tokens` lengthens its texts, if necessary.
    """
    with blaming(f"{name} cannot be loaded by transformers"):
        cls, given = _class_and_config(folder)
        check_numbers({"model": given, "conversions": []}, _LARGEST, "config.json")
        with offline():
            config = import_library("transformers").AutoConfig.from_pretrained(folder, **_LOCAL)
        if resolution is not None and hasattr(config, "image_size"):
            config.image_size = resolution
        if tokens is not None and hasattr(config, "max_position_embeddings"):
            # RoBERTa counts positions from the id of padding on.
            least = tokens + (getattr(config, "pad_token_id", None) or 0) + 1
            config.max_position_embeddings = max(config.max_position_embeddings, least)

        described = given.get("quantization_config") or {}
        if is_conversion := described.get("quant_method") == METHOD:
            del config.quantization_config  # `reconvert` writes it again

        def build() -> nn.Module:
            make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
            model: nn.Module = make(copy.deepcopy(config))
            if is_conversion:
                reconvert(model, described)
            return model.eval()

        with offline():
            with torch.device("meta"), within(_LARGEST, "config.json"):
                build()
            return build()


def _class_and_config(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The class of transformers that is named in config.json, and its contents."""
    config = _read_config(folder)
    if not config:
        raise FileNotFoundError(f"{folder} has no config.json: was it written by save_pretrained?")
    library = import_library("transformers")
    import_library("transformers.modeling_utils")
    register_with_transformers()
    cls: Any = getattr(library, (config.get("architectures") or ["AutoModel"])[0], None)
    if cls is None or leads_elsewhere(config):
        raise ValueError("it needs code that is not part of transformers")
    return cls, config


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return _read_json(file) if file.is_file() else {}


def _check_index(file: Path) -> None:
    """Refuse an index that names files of weights outside of its folder."""
    shards = _read_json(file).get("weight_map")
    for shard in shards.values() if isinstance(shards, dict) else ():
        if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{file.name} names {str(shard)[:80]!r}, which is no file in the folder")


def _read_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > _LARGEST_JSON:
        raise CheckpointError(f"{file} is larger than {_LARGEST_JSON} bytes")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content
