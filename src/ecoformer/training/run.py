"""Whole runs: a recipe in, a folder with model, metrics and result out; and measuring a trained model."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ecoformer
from ecoformer.accounting import cost
from ecoformer.checkpoints import load
from ecoformer.data import load as load_data
from ecoformer.data.splits import Arrays, Splits
from ecoformer.training.building import example_of
from ecoformer.training.display import Display
from ecoformer.training.loading import measured_batches
from ecoformer.training.loop import Interrupted, Trainer, figures, judge
from ecoformer.training.recipe import Recipe, changed, load_recipe
from ecoformer.training.state import RunFolder, replace_text
from ecoformer.training.tasks import Task


def load_splits(recipe: Recipe) -> Splits:
    """The recipe's data."""
    data = recipe.data
    return load_data(data.name, data.root, **data.options)


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
    if resume and folder.result_file.is_file() and folder.recipe() == recipe:
        finished: dict[str, Any] = json.loads(folder.result_file.read_text(encoding="utf-8"))
        return finished
    splits = splits or load_splits(recipe)
    board = folder.path / "tensorboard" if recipe.tensorboard else None
    with _saying_how_to_go_on(folder):
        display = Display(show=show, board=board)
        trainer = Trainer(recipe, splits, folder, resume=resume, device=device, display=display)
        began = time.perf_counter()
        measured = trainer.run()
        trainer.export()
        result = _result(trainer, measured, time.perf_counter() - began)
    if trainer.first:
        replace_text(folder.result_file, json.dumps(result, indent=2) + "\n")
    return result


def evaluate(
    model: nn.Module, recipe: Recipe, splits: Splits, *, device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Accuracy and loss of a model on a recipe's test data."""
    device = torch.device(device)
    model, task = model.to(device), Task(recipe, splits)
    test = splits.test.to(device) if isinstance(splits.test, Arrays) else splits.test
    return figures(judge(model, task, measured_batches(test, recipe, device)))


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
    if not file.is_file():
        raise FileNotFoundError(f"there is no trained model {file}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return evaluate(load(file), chosen, load_splits(chosen), device=where)


def _result(trainer: Trainer, measured: dict[str, float], seconds: float) -> dict[str, Any]:
    recipe, splits = trainer.recipe, trainer.splits
    model = trainer.bare if trainer.ema is None else trainer.ema.module
    trained = trainer.progress.step * recipe.batch
    return {
        "recipe": recipe.model_dump(mode="json"),
        "accuracy": measured["accuracy"],
        "best_accuracy": trainer.progress.best,
        "test_loss": measured["loss"],
        "steps": trainer.progress.step,
        "samples_per_second": trained / trainer.progress.seconds if trainer.progress.seconds else None,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cost": costs(model, recipe, splits),
        "processes": trainer.accelerator.num_processes,
        "hardware": _hardware(trainer.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ecoformer": ecoformer.__version__,
        },
    }


def costs(model: nn.Module, recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Multiplications, additions and energy of one sample, as the paper counts and as executed."""
    example: Any = example_of(recipe, splits)
    if splits.kind == "pairs":
        example = {"first": example[:, 0], "second": example[:, 1]}
    found = {}
    for accounting in ("paper", "exact"):
        ledger = cost(model, example, accounting=accounting)
        found[accounting] = {"mul": ledger.total.mul, "add": ledger.total.add, "energy_pj": ledger.energy_pj}
        if ledger.uncounted:
            found[accounting]["uncounted"] = len(ledger.uncounted)
    return found


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@contextmanager
def _saying_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    """Errors that stop a run, in one line with what is left and what to do."""
    try:
        yield
    except (FileExistsError, FileNotFoundError):
        raise
    except (Interrupted, OSError, FloatingPointError, RuntimeError) as error:
        steps = folder.steps()
        if not steps:
            raise
        remedy = f"the state of step {steps[-1]} is kept: go on with --resume --out {folder.path}"
        line = " ".join(str(error).split())
        raise type(error)(f"{line[:400]}; {remedy}") from error
