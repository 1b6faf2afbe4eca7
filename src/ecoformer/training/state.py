"""A run's folder: checkpoints that are whole or not there, and the course of the training.

A checkpoint is a folder of files that Accelerate writes (weights, optimiser, scaler, random states) and one
of ours (where the run stands, averaged weights). It is written under another name, listed with its checksums,
and renamed when all of it is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from ecoformer.files import TEMPORARY, append_text, replace_text, to_disk
from ecoformer.storage import CheckpointError, read, write
from ecoformer.training.recipe import Recipe, as_yaml, load_recipe

LOCK = ".lock"
MANIFEST = "manifest.json"
PROGRESS = "progress.safetensors"
CHANGEABLE = {
    *("about", "data.root", "data.workers", "optimiser.lr", "optimiser.clip", "precision"),
    *("split_tokens", "eval_batch", "save_every", "keep", "log_every", "tensorboard"),
}
"""What a run may be resumed with in another value: where data lie, who works, what helps against NaN."""


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
    def changes_file(self) -> Path:
        """What was changed in the recipe when the run was resumed."""
        return self.path / "changes.txt"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process, or raise with who holds it; the lock ends with the process."""
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / LOCK
        descriptor = _lock(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            os.close(descriptor)
            if made:
                with suppress(OSError):  # only where the run has left nothing
                    self.path.rmdir()

    def check(self, recipe: Recipe, *, resume: bool) -> list[str]:
        """Refuse a folder that holds another run, or one that is not to go on; returns what is changed."""
        if not self.recipe_file.exists():
            if resume and not _barely_begun(self.path):
                raise FileNotFoundError(f"there is no run to resume in {self.path}: leave --resume out")
            return []
        if not resume:
            raise FileExistsError(
                f"{self.path} holds a run already: go on with --resume, or choose another --out"
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
        """Make the folder, and write down what the run is."""
        for folder in (self.checkpoints, self.path / "tensorboard"):
            if folder.is_symlink():
                raise OSError(f"{folder} is a link: a run writes no files through links, remove it")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if new := list(changes):
            replace_text(self.changes_file, "".join(f"{line}\n" for line in (*self.changes(), *new)))
        for left_by_a_kill in self.path.glob(TEMPORARY):
            left_by_a_kill.unlink()
        replace_text(self.recipe_file, as_yaml(recipe))

    def changes(self) -> list[str]:
        """What was changed in the recipe when the run was resumed."""
        file = self.changes_file
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return all(file.is_file() for file in (self.recipe_file, self.model_file, self.result_file))

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"{self.path} holds no run: there is no {self.recipe_file.name}")
        return load_recipe(str(self.recipe_file))

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are complete, oldest first."""
        try:
            names = os.listdir(self.checkpoints)  # glob passes by errors, as if there were nothing
        except FileNotFoundError:
            return []
        return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())

    def checkpoint(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.checkpoints / f"step-{step:09d}"

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written before it is complete."""
        return self.checkpoints / f".writing-{step:09d}"

    def newest_good(self) -> int | None:
        """Step of the newest checkpoint whose files are as they were written; damaged ones are passed by."""
        for step in reversed(self.steps()):
            path = self.checkpoint(step)
            problem = damage(path)
            if problem is None:
                return step
            warnings.warn(f"checkpoint {path} is damaged ({problem}): an older one is taken", stacklevel=2)
        if self.steps():
            raise CheckpointError(
                f"every checkpoint in {self.checkpoints} is damaged: start again with another --out"
            )
        return None

    def go_back(self, step: int) -> None:
        """Forget what came after `step`: damaged checkpoints, and what will be logged again."""
        for later in self.steps():
            if later > step:
                path = self.checkpoint(later)
                path.rename(path.with_name(f".damaged-{later:09d}-{secrets.token_hex(4)}"))
        self._cut_metrics(step)

    def _cut_metrics(self, step: int) -> None:
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):  # it was being written when the run was killed
                continue
        replace_text(self.metrics_file, "".join(kept))

    def log(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        append_text(self.metrics_file, json.dumps(record) + "\n")


def prepare(folder: RunFolder, step: int) -> Path:
    """An empty place to write a checkpoint to."""
    path = folder.unfinished(step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def complete(folder: RunFolder, step: int, keep: int) -> Path:
    """Give a written checkpoint its name, once all is on the disk; then remove those that are too old."""
    unfinished, path = folder.unfinished(step), folder.checkpoint(step)
    if folder.metrics_file.exists():
        to_disk(folder.metrics_file)
    files = sorted(file for file in unfinished.rglob("*") if file.is_file())
    manifest = {str(file.relative_to(unfinished)): _checksum(file) for file in files}
    replace_text(unfinished / MANIFEST, json.dumps(manifest, indent=1))
    for entry in (*files, *(entry for entry in unfinished.rglob("*") if entry.is_dir()), unfinished):
        to_disk(entry)
    unfinished.rename(path)
    to_disk(folder.checkpoints)
    tidy(folder, keep, damaged=True)
    return path


def tidy(folder: RunFolder, keep: int, *, damaged: bool = False) -> None:
    """Remove checkpoints that are too old or were never completed, and damaged ones if asked to."""
    left = [folder.checkpoint(old) for old in folder.steps()[:-keep]]
    for pattern in (".writing-*", ".damaged-*") if damaged else (".writing-*",):
        left += folder.checkpoints.glob(pattern)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None; an error in reading, which may pass, is raised."""
    name = MANIFEST
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or PROGRESS not in manifest:
            return f"{MANIFEST} does not name {PROGRESS}"
        for name, checksum in manifest.items():
            if _checksum(path / name) != checksum:
                return f"{name} is not what was written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OSError(
            f"{path / name} cannot be read ({reason}): nothing was changed, try again with --resume"
        ) from error
    except ValueError:
        return f"{MANIFEST} is no JSON"
    return None


def write_progress(path: Path, progress: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Where the run stands, with tensors that Accelerate does not know of."""
    write(path / PROGRESS, tensors, progress)


def read_progress(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_progress` wrote."""
    tensors, progress = read(path / PROGRESS)
    return progress, tensors


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _lock(file: Path) -> int:
    """An open descriptor that holds the lock on a file.

    POSIX locks belong to one process: workers that it forks do not hold them after it is killed.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                warnings.warn(
                    f"{file} cannot be locked ({error.strerror}): run one training here", stacklevel=2
                )
                return descriptor
            holder = " ".join(os.read(descriptor, 200).decode(errors="replace").split())
            os.close(descriptor)
            raise RuntimeError(
                f"{file.parent} is in use by {holder or 'another process'}: wait for it to end, or choose "
                "another --out"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(file)):  # the last holder removes the file
                os.ftruncate(descriptor, 0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(
                    descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode()
                )
                return descriptor
        os.close(descriptor)


def _barely_begun(path: Path) -> bool:
    """Whether a folder is what a run leaves that is killed before it has written its recipe."""
    if not path.is_dir():
        return False
    names = (entry.name for entry in path.iterdir())
    return all(name in ("checkpoints", LOCK) or fnmatch(name, TEMPORARY) for name in names)


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The old and the new value where two recipes differ, by name."""
    return _differences(old.model_dump(mode="json"), new.model_dump(mode="json"))


def _differences(old: Any, new: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {where: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*old, *new}):
        found |= _differences(old.get(name), new.get(name), f"{where}.{name}".lstrip("."))
    return found
