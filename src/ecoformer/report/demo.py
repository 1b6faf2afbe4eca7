"""`ecoformer demo`: train with softmax, convert, fit, fine-tune with a teacher, and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ecoformer.benchmarking import Work, time_contestants
from ecoformer.checkpoints import load
from ecoformer.conversion import convert
from ecoformer.data.splits import Splits
from ecoformer.hashing import fit_hashers
from ecoformer.report.page import Run, read_run, table_rows, write_page
from ecoformer.training import Recipe, evaluate, load_recipe, train
from ecoformer.training.batches import Task
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits

LATENCY_BATCH, LATENCY_SECONDS = 16, 3.0
FINE_TUNING = ("schedule.epochs=5", "optimiser.lr=1e-3", "teacher.weight=0.5")


@dataclass(frozen=True)
class Demo:
    """The outcome.

    Attributes:
        rows: the table, one row for each model.
        page: the HTML page.
        lost: accuracy lost against softmax, 0 to 1; negative for a gain.
        saved: share of the energy saved, by the paper's accounting.
        margin: accuracy that may be lost.
        unlearned: accuracy after conversion and fitting, before fine-tuning.
    """

    rows: list[dict[str, str]]
    page: Path
    lost: float
    saved: float
    margin: float
    unlearned: float

    @property
    def kept(self) -> bool:
        """Whether the lost accuracy is within the margin."""
        return self.lost <= self.margin

    def __str__(self) -> str:
        than = f"{abs(self.lost):.2%} {'less' if self.lost > 0 else 'more'} than" if self.lost else "equal to"
        return (
            f"accuracy {'kept' if self.kept else 'not kept'}: {than} softmax (margin {self.margin:.2%}), "
            f"{self.saved:.0%} of the energy saved"
        )


def run_demo(
    out: str | Path,
    *,
    margin: float = 0.01,
    changes: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda line: None,
    show: bool = True,
) -> Demo:
    """Train, convert, fit, fine-tune and compare on scikit-learn's digits.

    Runs that an earlier call has finished in the same folder are not repeated.

    Args:
        out: folder of the runs and the page.
        margin: accuracy that may be lost, 0 to 1.
        changes: of the recipe `digits`, for both trainings.
        progress: called with each line of progress.
        show: progress bars on stderr.
    """
    folder = Path(out)
    common = load_recipe("digits", [*changes, "attention.name=softmax"])
    splits = load_splits(common)
    epochs, count = common.schedule.epochs, len(splits.train)
    progress(f"1. training with softmax attention: {epochs} epochs of {count} digits")
    softmax = _run(common, folder / "softmax", splits, show)
    progress(f"   accuracy {softmax.accuracy:.2%}")
    checkpoint = RunFolder(folder / "softmax").model_file
    progress("2. converting to hashed attention and fitting its hash functions, without labels")
    unlearned = _converted_accuracy(checkpoint, common, splits)
    progress(f"   accuracy {unlearned:.2%} before any training")
    paths = (f"start={checkpoint}", f"teacher.checkpoint={checkpoint}")
    recipe = load_recipe("digits", [*changes, "attention.name=eco", *FINE_TUNING, *paths])
    progress(f"3. fine-tuning for {recipe.schedule.epochs} epochs with the softmax model as the teacher")
    eco = _run(recipe, folder / "eco", splits, show)
    progress(f"   accuracy {eco.accuracy:.2%}")
    rows = table_rows([softmax, eco])
    for row, latency in zip(rows, _latencies(folder, recipe, splits), strict=True):
        row[f"latency of {LATENCY_BATCH}"] = f"{latency:.1f} ms"
    saved = 1 - eco.cost()["energy_pj"] / softmax.cost()["energy_pj"]
    demo = Demo(rows, folder / "index.html", softmax.accuracy - eco.accuracy, saved, margin, unlearned)
    size, tested = recipe.augment.size, len(splits.test)
    note = (
        f"One seed, {tested} test images: one image is {1 / tested:.2%}. After conversion and fitting, "
        f"before fine-tuning, accuracy was {unlearned:.2%}. Operations and energy are for one image of "
        f"{size} x {size} pixels; latency is the median of a batch of {LATENCY_BATCH} on this machine's CPU, "
        f"{torch.get_num_threads()} threads, models in turn."
    )
    lead = f"{str(demo)[0].upper()}{str(demo)[1:]}."
    write_page(demo.page, "Softmax to hashed attention", lead, [softmax, eco], rows, note)
    return demo


def _run(recipe: Recipe, folder: Path, splits: Splits, show: bool) -> Run:
    resume = RunFolder(folder).recipe_file.exists()
    train(recipe, folder, resume=resume, device="cpu", show=show, splits=splits)
    return read_run(folder)


def _converted_accuracy(checkpoint: Path, recipe: Recipe, splits: Splits) -> float:
    model = load(checkpoint)
    inputs = _inputs(splits.train, recipe, splits, recipe.hashing.samples)
    convert(model, "eco", example=inputs[:1])
    fit_hashers(model, [inputs], samples=len(inputs), progress=False)
    return evaluate(model, recipe, splits)["accuracy"]


def _latencies(folder: Path, recipe: Recipe, splits: Splits) -> list[float]:
    """Median milliseconds of a batch for both models, timed in turn."""
    inputs = _inputs(splits.test, recipe, splits, LATENCY_BATCH)
    models = [load(RunFolder(folder / name).model_file) for name in ("softmax", "eco")]
    with torch.inference_mode():
        works = {i: Work(partial(model, inputs)) for i, model in enumerate(models)}
        timings = time_contestants(works, torch.device("cpu"), seconds=LATENCY_SECONDS)
    return [timing.median_ms for timing in timings.values()]


def _inputs(part: Any, recipe: Recipe, splits: Splits, count: int) -> torch.Tensor:
    return Task(recipe, splits).test_batch(*part.batch(torch.arange(min(count, len(part)))))[0]
