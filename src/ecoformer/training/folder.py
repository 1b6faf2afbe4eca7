"""The folder of a run: its lock, recipe and metrics, and checkpoints that are complete or absent.

A checkpoint is a folder of files that Accelerate writes (weights, optimizer, scaler, random states) and one
of ours (position, averaged weights). It is written under another name, listed with checksums, and renamed
once everything is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ecoformer.arguments import one_line
from ecoformer.files import TEMPORARY, append_text, replace_text, to_disk
from ecoformer.storage import CheckpointError
from ecoformer.training.recipe import Recipe, as_yaml, differences, load_recipe

LOCK, MANIFEST, PROGRESS = ".lock", "manifest.json", "progress.safetensors"
CHANGEABLE = {
    *("about", "data.root", "data.workers", "optimiser.lr", "optimiser.clip", "precision"),
    *("eval_batch", "save_every", "keep", "log_every", "tensorboard"),
}
"""Values that may change on resume: where data are, how work is shared, what helps against NaN."""


_HELD: dict[Path, object] = {}
"""Folders in which this process trains."""


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.model_file = self.path / "model.safetensors"
        self.result_file = self.path / "result.json"
        self.changes_file = self.path / "changes.txt"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, or raise with the name of its holder. The lock ends with the process.

        POSIX locks belong to one process, so forked workers do not hold them after it is killed, and its
        threads share them: `_HELD` tells those apart.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        place, me = self.path.resolve(), object()
        if _HELD.setdefault(place, me) is not me:
            raise RuntimeError(f"{self.path} is in use by another thread: choose another folder")
        try:
            with self._locked_file():
                yield
        finally:
            del _HELD[place]

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(self.path / LOCK, flags, 0o666), "r+", errors="replace") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = " ".join(file.read(200).split()) or "another process"
                    raise RuntimeError(
                        f"{self.path} is in use by {holder}: wait for it to end, or choose another --out"
                    ) from None
                warnings.warn(f"{self.path} cannot be locked ({error.strerror})", stacklevel=3)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
            file.flush()
            yield

    def check(self, recipe: Recipe, *, resume: bool) -> list[str]:
        """Raise unless the recipe can start or resume in this folder; return what it changes."""
        for folder in (self.checkpoints, self.tensorboard):
            if folder.is_symlink():
                raise OSError(f"{folder} is a link: a run writes no files through links, remove it")
        if not self.recipe_file.exists():
            return []
        if not resume:
            raise FileExistsError(
                f"{self.path} already holds a run: continue it with --resume, or choose another --out"
            )
        differing = {
            name: f"{name}: {then!r} then, {now!r} now"
            for name, (then, now) in differences(self.recipe(), recipe).items()
        }
        fixed = [line for name, line in differing.items() if name not in CHANGEABLE]
        if fixed:
            raise ValueError(
                f"{self.path} holds a run with another recipe ({', '.join(fixed)}): resume with the same "
                "values, or start a new run with --out"
            )
        return list(differing.values())

    def begin(self, recipe: Recipe, changes: Iterable[str] = ()) -> None:
        """Create the folder and write the recipe and what has changed in it."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(TEMPORARY):
            leftover.unlink()
        if new := list(changes):
            replace_text(self.changes_file, "".join(f"{line}\n" for line in (*self.changes(), *new)))
        replace_text(self.recipe_file, as_yaml(recipe))

    def changes(self) -> list[str]:
        """What changed in the recipe whenever the run was resumed."""
        file = self.changes_file
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

    def is_finished(self) -> bool:
        """Whether the run has ended with a model and a result."""
        return all(file.is_file() for file in (self.recipe_file, self.model_file, self.result_file))

    def recipe(self, changes: Iterable[str] = ()) -> Recipe:
        """The recipe of the run."""
        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"{self.path} holds no run: there is no {self.recipe_file.name}")
        return load_recipe(self.recipe_file, changes)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        append_text(self.metrics_file, json.dumps(record) + "\n")

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        try:
            names = os.listdir(self.checkpoints)  # glob would ignore errors
        except FileNotFoundError:
            return []
        return sorted(int(name[5:]) for name in names if re.fullmatch("step-[0-9]{9,}", name))

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.checkpoints / f"step-{step:09d}"

    def new_checkpoint(self, step: int) -> Path:
        """The folder in which a checkpoint is written until it is complete."""
        return self.checkpoints / f".writing-{step:09d}"

    def complete(self, step: int, keep: int) -> None:
        """Rename a written checkpoint once it is on the disk, then remove old ones."""
        path = self.new_checkpoint(step)
        if self.metrics_file.is_file():
            to_disk(self.metrics_file)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        manifest = {str(file.relative_to(path)): _checksum(file) for file in files}
        replace_text(path / MANIFEST, json.dumps(manifest, indent=1))
        for entry in (*files, *(entry for entry in path.rglob("*") if entry.is_dir()), path):
            to_disk(entry)
        path.rename(self.checkpoint(step))
        to_disk(self.checkpoints)
        self.tidy(keep)

    def tidy(self, keep: int) -> None:
        """Remove all but the last `keep` checkpoints, and unfinished ones."""
        old = [self.checkpoint(step) for step in self.steps()[:-keep]]
        for path in (*old, *self.checkpoints.glob(".writing-*")):
            shutil.rmtree(path, ignore_errors=True)

    def newest_good(self) -> int | None:
        """Step of the newest undamaged checkpoint."""
        for step in reversed(self.steps()):
            path = self.checkpoint(step)
            problem = _damage(path)
            if problem is None:
                return step
            warnings.warn(f"checkpoint {path} is damaged ({problem}): trying an older one", stacklevel=2)
        if self.steps():
            raise CheckpointError(
                f"every checkpoint in {self.checkpoints} is damaged: start again with another --out"
            )
        return None

    def go_back(self, step: int) -> None:
        """Remove damaged checkpoints after `step`, and metrics that will be logged again."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.checkpoint(later))
        if not self.metrics_file.is_file():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # the run may have been killed in a line
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
        replace_text(self.metrics_file, "".join(kept))


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None; other read errors, which may be temporary, are raised."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or PROGRESS not in manifest:
            return f"{MANIFEST} does not list {PROGRESS}"
        for name, checksum in manifest.items():
            if _checksum(path / name) != checksum:
                return f"{name} has another checksum"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        return one_line(error)
    return None


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
