"""A run's folder: checkpoints that are whole or not there, and the course of the training.

A checkpoint is a folder of files that Accelerate writes (weights, optimiser, scaler, random states) and one
of ours (where the run stands, averaged weights). It is written under another name, listed with its checksums,
and renamed when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from ecoformer.storage import CheckpointError, read, write
from ecoformer.training.recipe import Recipe, as_yaml, checked

MANIFEST = "manifest.json"
PROGRESS = "progress.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it must not lose."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The recipe with all its values."""
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: losses and accuracies."""
        return self.path / "metrics.jsonl"

    @property
    def model_file(self) -> Path:
        """The trained model, for `ecoformer.load`."""
        return self.path / "model.safetensors"

    @property
    def result_file(self) -> Path:
        """What came out, with settings and versions."""
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse a folder that holds another run, or one that is not to go on."""
        if not self.recipe_file.exists():
            if resume and not self.path.is_dir():
                raise FileNotFoundError(f"there is no run to resume in {self.path}: leave --resume out")
            return
        if not resume:
            raise FileExistsError(
                f"{self.path} holds a run already: go on with --resume, or choose another --out"
            )
        differing = _differences(self.recipe().model_dump(mode="json"), recipe.model_dump(mode="json"))
        if differing:
            raise ValueError(
                f"{self.path} holds a run with another recipe ({', '.join(differing)}): resume with the same "
                "values, or start a new run with --out"
            )

    def begin(self, recipe: Recipe) -> None:
        """Make the folder, and write down what the run is."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        replace_text(self.recipe_file, as_yaml(recipe))

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"{self.path} holds no run: there is no {self.recipe_file.name}")
        return checked(yaml.safe_load(self.recipe_file.read_text(encoding="utf-8")), str(self.recipe_file))

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete, oldest first."""
        names = [entry.name for entry in self.checkpoints.glob("step-*") if entry.name[5:].isdigit()]
        return sorted(int(name[5:]) for name in names)

    def checkpoint(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.checkpoints / f"step-{step:09d}"

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written before it is complete."""
        return self.checkpoints / f".writing-{step:09d}"

    def newest_good(self) -> Path | None:
        """The newest checkpoint whose files are as they were written; damaged ones are passed by."""
        for step in reversed(self.steps()):
            path = self.checkpoint(step)
            problem = damage(path)
            if problem is None:
                return path
            warnings.warn(f"checkpoint {path} is damaged ({problem}): an older one is taken", stacklevel=2)
        if self.steps():
            raise CheckpointError(
                f"every checkpoint in {self.checkpoints} is damaged: start again with another --out"
            )
        return None

    def cut_metrics(self, step: int) -> None:
        """Forget what was logged after `step`: it will be logged again."""
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # the line that was being written when the run was killed
                continue
        replace_text(self.metrics_file, "".join(kept))

    def log(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def prepare(folder: RunFolder, step: int) -> Path:
    """An empty place to write a checkpoint to."""
    path = folder.unfinished(step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def complete(folder: RunFolder, step: int, keep: int) -> Path:
    """Give a written checkpoint its name, once all is on the disk; then remove those that are too old."""
    unfinished, path = folder.unfinished(step), folder.checkpoint(step)
    files = sorted(file for file in unfinished.rglob("*") if file.is_file())
    manifest = {str(file.relative_to(unfinished)): _checksum(file) for file in files}
    replace_text(unfinished / MANIFEST, json.dumps(manifest, indent=1))
    for file in files:
        _to_disk(file)
    if path.exists():  # a run that was resumed at an older step writes this one again
        shutil.rmtree(path)
    unfinished.rename(path)
    _to_disk(folder.checkpoints)
    for old in folder.steps()[:-keep]:
        shutil.rmtree(folder.checkpoint(old), ignore_errors=True)
    for left in folder.checkpoints.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    return path


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, checksum in manifest.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if _checksum(path / name) != checksum:
                return f"{name} is not what was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}"
    return None


def write_progress(path: Path, progress: Mapping[str, Any], averaged: Mapping[str, Tensor]) -> None:
    """Where the run stands, and the averaged weights if there are any."""
    write(path / PROGRESS, averaged, progress)


def read_progress(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_progress` wrote."""
    tensors, progress = read(path / PROGRESS)
    return progress, tensors


def replace_text(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Names of the values that differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{where}: {old!r} then, {new!r} now"]
    names = sorted({*old, *new})
    found = [_differences(old.get(name), new.get(name), f"{where}.{name}".lstrip(".")) for name in names]
    return [line for lines in found for line in lines]
