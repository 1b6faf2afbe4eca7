"""Folders that `save_pretrained` wrote: ours, and those of Hugging Face's transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints.describe import leads_elsewhere
from ecoformer.checkpoints.limits import Held, check_numbers, within
from ecoformer.conversion.huggingface import register_with_transformers
from ecoformer.storage import CheckpointError
from ecoformer.third_party import import_library

WEIGHTS = "model.safetensors"
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_BYTES_PER_TENSOR = 128
"""At least so many, with its entry in the header."""
_LARGEST_CONFIG = 1 << 23


def is_ours(folder: Path) -> bool:
    """Whether our `save_pretrained` wrote the folder: transformers names the model's class in config.json."""
    return (folder / WEIGHTS).is_file() and "architectures" not in _read_config(folder)


def load_transformers(folder: Path, *, safetensors_only: bool = True) -> nn.Module:
    """The model in a folder of transformers, converted again if `convert` had converted it.

    Its class is the one that was saved, head included. Code in the folder or on the Hub never runs.
    """
    try:
        return _load(folder, safetensors_only)
    except ImportError:
        raise
    except Exception as error:  # transformers raises whatever a user's file makes it raise
        problem = f"{folder.name}/ cannot be loaded by transformers: {one_line(error)}"
        raise CheckpointError(problem) from error


def _load(folder: Path, safetensors_only: bool) -> nn.Module:
    config = _read_config(folder)
    if not config:
        raise FileNotFoundError(f"{folder} has no config.json: was it written by save_pretrained?")
    import transformers

    import_library("transformers.modeling_utils")
    register_with_transformers()
    cls: Any = getattr(transformers, (config.get("architectures") or ["AutoModel"])[0], None)
    if cls is None or leads_elsewhere(config):
        raise ValueError("it needs code that is not part of transformers")
    size = sum(file.stat().st_size for kind in _WEIGHT_FILES for file in folder.glob(kind))
    held = Held(size // _BYTES_PER_TENSOR, size, size)
    check_numbers({"model": config, "conversions": []}, held, "config.json")
    safe = {"local_files_only": True, "trust_remote_code": False}
    if safetensors_only:
        safe["use_safetensors"] = True
    with within(held, "config.json"):
        model, loading = cls.from_pretrained(folder, output_loading_info=True, **safe)
    odd = [name for kind in ("missing_keys", "mismatched_keys") for name in loading.get(kind, ())]
    if odd:
        raise ValueError(
            f"{len(odd)} weights are missing or of another shape, such as {sorted(map(str, odd))[0]}"
        )
    return cast(nn.Module, model)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        return {}
    if file.stat().st_size > _LARGEST_CONFIG:
        raise CheckpointError(f"{file} is larger than {_LARGEST_CONFIG} bytes")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return config
