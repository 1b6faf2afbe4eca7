"""Any data set of arrays as two files, so that it is prepared once."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ecoformer import storage
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Kind, Splits

_PARTS = ("train", "test")
_FILES = tuple(f"{part}.safetensors" for part in _PARTS)


@dataclass(frozen=True)
class _Facts:
    """What a file says of the data set beside the arrays."""

    kind: Kind
    classes: int
    vocabulary: int
    length: int
    name: str
    masked: bool


def store(splits: Splits, folder: str | os.PathLike[str]) -> Path:
    """Write a data set of arrays as train.safetensors and test.safetensors, for `load("stored", folder)`.

    Each file appears complete or not at all, and files of two different calls are told apart when read.
    """
    folder = Path(folder)
    facts = _Facts(**{name: getattr(splits, name) for name in _Facts.__dataclass_fields__})
    parts = [_arrays(part, getattr(splits, part)) for part in _PARTS]
    folder.mkdir(parents=True, exist_ok=True)
    call = secrets.token_hex(8)
    for part, file, arrays in zip(_PARTS, _FILES, parts, strict=True):
        tensors = {"inputs": arrays.inputs.contiguous(), "targets": arrays.targets.contiguous()}
        storage.write(folder / file, tensors, {"data": asdict(facts), "part": part, "call": call})
    return folder


def is_stored(folder: Path) -> bool:
    """Whether `store` wrote into a folder."""
    return all((folder / file).is_file() for file in _FILES)


@register_dataset("stored", layout="train.safetensors and test.safetensors, written by ecoformer.data.store")
def read_stored(root: Path) -> Splits:
    """What `store` wrote, under the name that the data set had then."""
    missing = [file for file in _FILES if not (root / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"stored: {root} holds no {' and no '.join(missing)}; ecoformer.data.store writes them"
        )
    parts, configs = zip(
        *(_read(root / file, part) for part, file in zip(_PARTS, _FILES, strict=True)), strict=True
    )
    if configs[0] != configs[1]:
        raise storage.CheckpointError(
            f"{root} holds train.safetensors and test.safetensors of two different calls: store them again"
        )
    return Splits(*parts, **configs[0]["data"])


def _arrays(name: str, part: Any) -> Arrays:
    if not isinstance(part, Arrays):
        raise TypeError(
            f"only arrays can be stored, but {name} is {type(part).__name__}, decoded when asked for"
        )
    return part


def _read(path: Path, part: str) -> tuple[Arrays, dict[str, Any]]:
    tensors, config = storage.read(path)
    facts = config.get("data")
    right = isinstance(facts, dict) and facts.keys() == _Facts.__dataclass_fields__.keys()
    if not right or config.get("part") != part or tensors.keys() != {"inputs", "targets"}:
        raise storage.CheckpointError(f"{path} is no {part} part that ecoformer.data.store wrote")
    return Arrays(**tensors), {"data": facts, "call": config.get("call")}
