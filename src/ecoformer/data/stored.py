"""Any data set of arrays as two files, so that it is prepared once."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ecoformer import storage
from ecoformer.arguments import one_line, shape
from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import MOST_CLASSES, Arrays, Splits

_PARTS = {"train": "train.safetensors", "test": "test.safetensors"}
_FACTS = {"kind": str, "classes": int, "vocabulary": int, "length": int, "name": str, "masked": bool}
_MOST_IDS = 2**20


def store(splits: Splits, folder: str | os.PathLike[str]) -> Path:
    """Write a data set of arrays as train.safetensors and test.safetensors, for `load("stored", folder)`.

    Each file appears complete or not at all. Files of two different calls are not read together.
    """
    folder = Path(folder)
    parts = {part: getattr(splits, part) for part in _PARTS}
    for part, arrays in parts.items():
        if not isinstance(arrays, Arrays):
            raise TypeError(f"store takes Splits of Arrays, but {part} is {type(arrays).__name__}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {"data": {name: getattr(splits, name) for name in _FACTS}, "call": secrets.token_hex(8)}
    for part, arrays in parts.items():
        tensors = {"inputs": arrays.inputs.contiguous(), "targets": arrays.targets.contiguous()}
        storage.write(folder / _PARTS[part], tensors, {**config, "part": part})
    return folder


def is_stored(folder: Path) -> bool:
    """Whether `store` wrote into a folder."""
    return all((folder / file).is_file() for file in _PARTS.values())


@register_dataset("stored", layout="train.safetensors and test.safetensors, written by ecoformer.data.store")
def read_stored(root: Path) -> Splits:
    """What `store` wrote, under the name that the data set had then."""
    missing = [file for file in _PARTS.values() if not (root / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"stored: {root} holds no {' and no '.join(missing)}; ecoformer.data.store writes them"
        )
    (train, facts, call), (test, *same) = (_read(root / file, part) for part, file in _PARTS.items())
    if same != [facts, call]:
        raise storage.CheckpointError(
            f"{root} holds train.safetensors and test.safetensors of two different calls: store them again"
        )
    try:
        return Splits(train, test, **facts)
    except ValueError as error:
        raise storage.CheckpointError(f"{root} holds damaged files: {one_line(error)}") from error


def _read(path: Path, part: str) -> tuple[Arrays, dict[str, Any], Any]:
    tensors, config = storage.read(path)
    facts = config.get("data")
    if not isinstance(facts, dict) or config.get("part") != part or tensors.keys() != {"inputs", "targets"}:
        raise storage.CheckpointError(f"{path} is not the {part} part that ecoformer.data.store writes")
    # What a model is built for must be in proportion to what the file holds.
    inputs, targets = tensors["inputs"], tensors["targets"]
    sound = {name: type(value) for name, value in facts.items()} == _FACTS and inputs.ndim and targets.ndim
    sound = sound and 1 <= facts["classes"] <= MOST_CLASSES and 0 <= facts["vocabulary"] <= _MOST_IDS
    if not sound or facts["length"] not in (0, inputs.shape[-1]):
        raise storage.CheckpointError(f"{path} is damaged: inputs {shape(inputs)} do not go with {facts}")
    return Arrays(inputs, targets), facts, config.get("call")
