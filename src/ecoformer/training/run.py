"""`train` runs a recipe in a folder; `evaluate` measures a trained model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints import load
from ecoformer.data import load as load_data
from ecoformer.data.splits import Arrays, Splits
from ecoformer.environment import hardware, versions
from ecoformer.files import replace_text
from ecoformer.training.batches import Task, measured_batches
from ecoformer.training.console import Display
from ecoformer.training.folder import RunFolder
from ecoformer.training.loop import Interrupted, Trainer
from ecoformer.training.model import figures, judge
from ecoformer.training.processes import is_first_process
from ecoformer.training.recipe import Recipe, load_recipe


class RunStopped(RuntimeError):
    """A run has ended with an error, which is the `__cause__`."""


def load_splits(recipe: Recipe) -> Splits:
    """The recipe's data."""
    return load_data(recipe.data.name, recipe.data.root, **recipe.data.options)


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    device: str | None = None,
    show: bool = True,
    splits: Splits | None = None,
) -> dict[str, Any]:
    """Run a recipe in the folder `out`; return what `result.json` holds.

    Whatever stops the run, the last checkpoint stays and the error says how to continue.

    Args:
        recipe: see `load_recipe`.
        out: the run's folder: recipe, metrics, checkpoints, the trained model and the result.
        resume: continue the run in `out` from its newest good checkpoint; without one, start.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        show: progress on stderr.
        splits: the data; default: those of the recipe.
    """
    folder, first = RunFolder(out), is_first_process()
    folder.check(recipe, resume=resume)
    if folder.is_finished():
        finished: dict[str, Any] = json.loads(folder.result_file.read_text(encoding="utf-8"))
        return finished
    with folder.locked() if first else nullcontext():
        splits = load_splits(recipe) if splits is None else splits
        board = folder.tensorboard if recipe.tensorboard and first else None
        display = Display(show=show and first, board=board)
        trainer = Trainer(recipe, splits, folder, resume=resume, device=device, display=display)
        with _how_to_continue(folder):
            measured = trainer.run()
            trainer.export()
            result = _result(trainer, measured)
            if first:
                replace_text(folder.result_file, json.dumps(result, indent=2) + "\n")
    return result


def evaluate(
    model: nn.Module, recipe: Recipe, splits: Splits, *, device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Accuracy and loss of a model on a recipe's test data, in the recipe's precision."""
    device = torch.device(device)
    model, task = model.to(device), Task(recipe, splits)
    test = splits.test.to(device) if isinstance(splits.test, Arrays) else splits.test
    return figures(judge(model, task, measured_batches(test, recipe, device), device))


def evaluate_path(
    path: str | Path, recipe: str | None = None, changes: Iterable[str] = (), *, device: str | None = None
) -> dict[str, float]:
    """Accuracy and loss of the model in a run's folder, or of a checkpoint on a recipe's test data.

    Args:
        path: the folder of a run, or a file that `ecoformer.save` wrote.
        recipe: whose test data to use; default: the run's own.
        changes: of the recipe, such as `data.root=/data/cifar`.
        device: "cpu" or "cuda"; default: a GPU if there is one.
    """
    folder = RunFolder(path)
    file = folder.model_file if folder.path.is_dir() else folder.path
    if recipe is None and folder.path.is_file():
        raise ValueError(f"{path} is a checkpoint: name the recipe whose test data to use with --recipe")
    chosen = folder.recipe(changes) if recipe is None else load_recipe(recipe, changes)
    if not file.is_file():
        unfinished = f"the run in {path} is not finished: train with --resume --out {path}"
        raise FileNotFoundError(unfinished if recipe is None else f"there is no trained model {file}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return evaluate(load(file), chosen, load_splits(chosen), device=device)


def _result(trainer: Trainer, measured: dict[str, float]) -> dict[str, Any]:
    recipe, progress = trainer.recipe, trainer.progress
    spent = progress.training_seconds
    return {
        "recipe": recipe.model_dump(mode="json"),
        "changes": trainer.folder.changes(),
        "accuracy": measured["accuracy"],
        "best_accuracy": progress.best,
        "test_loss": measured["loss"],
        "test_samples": len(trainer.splits.test),
        "steps": progress.step,
        "samples_per_second": progress.step * recipe.batch / spent if spent else None,
        "seconds": progress.seconds,
        "parameters": trainer.parameters,
        "cost": trainer.cost,
        "processes": trainer.accelerator.num_processes,
        "hardware": hardware(trainer.device),
        "versions": versions(),
    }


@contextmanager
def _how_to_continue(folder: RunFolder) -> Iterator[None]:
    """Put an error that stops a run in one line, with what is kept and how to continue."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        in_worker = any("Original Traceback" in line for line in lines)  # whose own message comes last
        cause = lines[-1] if in_worker else one_line(error, 500)
        steps = folder.steps()
        kept = f"the state of step {steps[-1]} is kept" if steps else "no checkpoint was written yet"
        kind = Interrupted if isinstance(error, Interrupted) else RunStopped
        raise kind(
            f"{cause}; {kept} in {folder.path}; continue with the same command and --resume"
        ) from error
