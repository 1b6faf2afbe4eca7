"""Checkpoints of a run: what is written, by which process, and how a run goes on from one."""

from __future__ import annotations

import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.storage import CheckpointError, load_into
from ecoformer.training import state

if TYPE_CHECKING:
    from ecoformer.training.loop import Trainer

_LOSSES = "losses"
_AVERAGE = "average."


@dataclass
class Progress:
    """Where a run stands; with the recipe it determines all that is to come."""

    step: int = 0
    samples: int = 0
    """Of the training data, from which the order of samples follows."""
    best: float = 0.0
    measured: dict[str, float] | None = None
    """The last evaluation."""
    training_seconds: float = 0.0
    seconds: float = 0.0
    """Evaluation and checkpoints included; of the steps that led here, not of those lost and repeated."""


def write_checkpoint(trainer: Trainer) -> None:
    """Write the state of a run as a whole; if that fails, the checkpoints before it stay."""
    folder, step, accelerator = trainer.folder, trainer.progress.step, trainer.accelerator
    path = folder.unfinished(step)
    losses = accelerator.gather(_stacked(trainer.losses, trainer.device).unsqueeze(0))
    try:
        if trainer.first:
            state.prepare(folder, step)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(path), safe_serialization=True)
        if trainer.first:
            state.write_progress(path, asdict(trainer.progress), {_LOSSES: losses, **_averaged(trainer)})
        accelerator.wait_for_everyone()
        if trainer.first:
            state.complete(folder, step, trainer.recipe.keep)
    except Exception as error:  # a full disk is an OSError, a RuntimeError or safetensors' own
        shutil.rmtree(path, ignore_errors=True)
        what = one_line(error)
        remedy = ": make room" if "No space left" in what else ""
        raise OSError(f"the checkpoint of step {step} was not completed ({what}){remedy}") from error
    accelerator.wait_for_everyone()


def read_checkpoint(trainer: Trainer) -> None:
    """Put a run where its newest good checkpoint left it; without one it stays at its start."""
    step = _agreed_step(trainer)
    if step:
        path = trainer.folder.checkpoint(step)
        values, tensors = state.read_progress(path)
        progress = Progress(**values)
        if progress.samples != trainer.progress.samples:
            raise ValueError(
                f"{trainer.folder.path} was trained on {progress.samples} samples, but the data now have "
                f"{trainer.progress.samples}: resume with the data it began with"
            )
        losses = tensors.pop(_LOSSES)
        rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        if rank < len(losses):
            _check_random_states(path / f"random_states_{rank}.pkl")
        trainer.accelerator.load_state(str(path))
        trainer.accelerator.step = 0  # no gradient is half accumulated, whatever the file says
        trainer.progress = progress
        mine = losses[rank] if len(losses) == ranks else losses.mean(dim=0)
        trainer.losses = list(mine.to(trainer.device))
        if trainer.average is not None:
            averaged = {name.removeprefix(_AVERAGE): tensor for name, tensor in tensors.items()}
            load_into(trainer.average.module, averaged, source=str(path))
    if trainer.first:
        trainer.folder.go_back(step)
        if step:
            state.tidy(trainer.folder, trainer.recipe.keep)
    trainer.accelerator.wait_for_everyone()


def _check_random_states(file: Path) -> None:
    """Raise for a file that Accelerate would pass over."""
    from accelerate.utils import load

    try:
        states = load(file)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])  # noqa: NPY002  the state that Accelerate keeps
        torch.set_rng_state(states["torch_manual_seed"])
    except Exception as error:  # a malformed pickle fails in many ways
        raise CheckpointError(
            f"{file} holds no random states ({one_line(error, 100)}): remove {file.parent} to resume from an "
            "older checkpoint"
        ) from error


def _agreed_step(trainer: Trainer) -> int:
    """The first process looks for a good checkpoint, and the others take the same; 0 for none."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None]
    if trainer.first:
        try:
            found = [trainer.folder.newest_good() or 0]
        except (CheckpointError, OSError) as error:
            found = [error]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return int(found[0])


def _stacked(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(losses).float() if losses else torch.empty(0, device=device)


def _averaged(trainer: Trainer) -> dict[str, Tensor]:
    if trainer.average is None:
        return {}
    return {_AVERAGE + name: tensor for name, tensor in trainer.average.module.state_dict().items()}
