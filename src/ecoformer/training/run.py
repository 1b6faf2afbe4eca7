"""Whole runs: a recipe in, a folder with model, metrics and result out; and measuring a trained model."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ecoformer
from ecoformer.arguments import one_line
from ecoformer.benchmarking.results import hardware
from ecoformer.checkpoints import load
from ecoformer.data import load as load_data
from ecoformer.data.splits import Arrays, Splits
from ecoformer.files import replace_text
from ecoformer.training.devices import is_first_process, one_process_first
from ecoformer.training.display import Display
from ecoformer.training.loading import measured_batches
from ecoformer.training.loop import Interrupted, Trainer
from ecoformer.training.measuring import figures, judge
from ecoformer.training.recipe import MASKED_DATA, Recipe, changed, load_recipe
from ecoformer.training.state import RunFolder
from ecoformer.training.tasks import Task


class RunStopped(RuntimeError):
    """A run met an error and has ended; its cause is the `__cause__`."""


def load_splits(recipe: Recipe) -> Splits:
    """The recipe's data."""
    data = recipe.data
    rate = {"rate": recipe.mask_rate} if data.name in MASKED_DATA else {}
    return load_data(data.name, data.root, **data.options | rate)


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    device: str | None = None,
    show: bool = True,
    splits: Splits | None = None,
) -> dict[str, Any]:
    """Run a recipe in the folder `out`; returns what `result.json` holds.

    Whatever stops the run, the last checkpoint stays and the error says how to go on.

    Args:
        recipe: see `load_recipe`.
        out: the run's folder: recipe, metrics, checkpoints, the trained model and the result.
        resume: go on with the run in `out`, from its newest good checkpoint; from the start if it has none.
        device: "cpu" keeps off the GPU; None takes what there is.
        show: progress on stderr.
        splits: the data, if they are loaded already.
    """
    folder = RunFolder(Path(out))
    folder.check(recipe, resume=resume)
    if folder.is_finished():
        finished: dict[str, Any] = json.loads(folder.result_file.read_text(encoding="utf-8"))
        return finished
    first = is_first_process()
    with folder.locked() if first else nullcontext():
        if splits is None:
            shared = "cache" in recipe.data.options  # two processes must not write it at once
            with one_process_first(device) if shared else nullcontext():
                splits = load_splits(recipe)
        board = folder.path / "tensorboard" if recipe.tensorboard and first else None
        display = Display(show=show and first, board=board)
        trainer = Trainer(recipe, splits, folder, resume=resume, device=device, display=display)
        with _saying_how_to_go_on(folder):
            measured = trainer.run()
            trainer.export()
            result = _result(trainer, measured)
            if trainer.first:
                replace_text(folder.result_file, json.dumps(result, indent=2) + "\n")
    return result


def evaluate(
    model: nn.Module, recipe: Recipe, splits: Splits, *, device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Accuracy and loss of a model on a recipe's test data, computed in the recipe's precision."""
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
        recipe: whose data and preparation are meant; a run has its own.
        changes: of the recipe, such as `data.root=/data/cifar`.
        device: "cpu" or "cuda"; None takes a GPU if there is one.
    """
    folder = RunFolder(Path(path))
    file = folder.model_file if folder.path.is_dir() else folder.path
    if recipe is None and folder.path.is_file():
        raise ValueError(f"{path} is a checkpoint: say with --recipe on which data it is to be measured")
    chosen = changed(folder.recipe(), changes) if recipe is None else load_recipe(recipe, changes)
    if recipe is None and not file.is_file():
        raise FileNotFoundError(f"the run in {path} is not finished: train with --resume --out {path}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no trained model {file}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return evaluate(load(file), chosen, load_splits(chosen), device=where)


def _result(trainer: Trainer, measured: dict[str, float]) -> dict[str, Any]:
    recipe, progress = trainer.recipe, trainer.progress
    spent = progress.training_seconds
    return {
        "recipe": recipe.model_dump(mode="json"),
        "changes": trainer.folder.changes(),
        "accuracy": measured["accuracy"],
        "best_accuracy": progress.best,
        "test_loss": measured["loss"],
        "steps": progress.step,
        "samples_per_second": progress.step * recipe.batch / spent if spent else None,
        "seconds": progress.seconds,
        "parameters": trainer.parameters,
        "cost": trainer.cost,
        "processes": trainer.accelerator.num_processes,
        "hardware": hardware(trainer.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ecoformer": ecoformer.__version__,
        },
    }


@contextmanager
def _saying_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    """Errors that stop a run, in one line with what is left and what to do."""
    try:
        yield
    except Exception as error:
        remedy = f"{_kept(folder)} in {folder.path}; the same command with --resume goes on"
        kind = Interrupted if isinstance(error, Interrupted) else RunStopped
        raise kind(f"{_cause(error)}; {remedy}") from error


def _kept(folder: RunFolder) -> str:
    try:
        steps = folder.steps()
    except OSError:  # it may be what stopped the run
        return "the checkpoints cannot be listed"
    return f"the state of step {steps[-1]} is kept" if steps else "no checkpoint was written yet"


def _cause(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if any("Original Traceback" in line for line in lines):  # of a worker: its own message comes last
        return lines[-1]
    return one_line(error, 500)
