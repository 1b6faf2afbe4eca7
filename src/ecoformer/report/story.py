"""The whole story on embedded data: train with softmax, convert, fit, fine-tune with a teacher, compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ecoformer.benchmarking import Work, time_contestants
from ecoformer.checkpoints import load
from ecoformer.conversion import convert
from ecoformer.data.splits import Arrays, Images, Splits
from ecoformer.hashing import fit_hashers
from ecoformer.report.page import render, table_rows, write_page
from ecoformer.report.runs import Run, read_run
from ecoformer.training import Recipe, evaluate, load_recipe, train
from ecoformer.training.batches import Task
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits

SOFTMAX, ECO = "softmax", "eco"
LATENCY_BATCH = 16
FINE_TUNING = ("schedule.epochs=5", "optimiser.lr=1e-3", "teacher.weight=0.5")


@dataclass(frozen=True)
class Story:
    """What came out.

    Attributes:
        rows: the table, one row a model.
        page: the page with pictures.
        lost: accuracy that hashed attention lost against softmax, 0 to 1; negative if it gained.
        saved: share of the energy that it saved, by the paper's accounting.
        margin: the loss that was allowed.
        unlearned: accuracy right after conversion and fitting, before fine-tuning.
    """

    rows: list[dict[str, str]]
    page: Path
    lost: float
    saved: float
    margin: float
    unlearned: float

    @property
    def kept(self) -> bool:
        """Whether the accuracy kept within the margin."""
        return self.lost <= self.margin

    def __str__(self) -> str:
        verb = "kept" if self.kept else "not kept"
        change = (
            f"{abs(self.lost):.2%} {'less' if self.lost > 0 else 'more'} than softmax"
            if self.lost
            else "that of softmax"
        )
        return (
            f"accuracy {verb}: {change} ({self.margin:.2%} may be lost), {self.saved:.0%} of the energy saved"
        )


def tell(
    out: str | Path,
    *,
    margin: float = 0.01,
    changes: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
    show: bool = True,
) -> Story:
    """Train, convert, fit, fine-tune and compare on scikit-learn's digits.

    What an earlier call has finished in the same folder is not done again.

    Args:
        out: folder of the runs and of the page.
        margin: accuracy that may be lost, 0 to 1.
        changes: of the recipe `digits`, for both trainings.
        say: told what happens, line by line.
        show: progress bars on stderr.
    """
    folder = Path(out)
    common = load_recipe("digits", [*changes, "attention.name=softmax"])
    splits = load_splits(common)
    say(f"1. training with softmax attention: {common.schedule.epochs} epochs of {len(splits.train)} digits")
    teacher = _run(common, folder / SOFTMAX, splits, show)
    say(f"   accuracy {teacher.accuracy:.2%}")
    checkpoint = RunFolder(folder / SOFTMAX).model_file
    say("2. converting to hashed attention and fitting its hash functions, without any labels")
    unlearned = _converted_accuracy(checkpoint, common, splits)
    say(f"   accuracy {unlearned:.2%} before any training")
    paths = (f"start={checkpoint}", f"teacher.checkpoint={checkpoint}")
    recipe = load_recipe("digits", [*changes, "attention.name=eco", *FINE_TUNING, *paths])
    say(f"3. fine-tuning for {recipe.schedule.epochs} epochs, taught by the softmax model")
    student = _run(recipe, folder / ECO, splits, show)
    say(f"   accuracy {student.accuracy:.2%}")
    return _compared(teacher, student, folder, recipe, splits, margin, unlearned)


def _run(recipe: Recipe, folder: Path, splits: Splits, show: bool) -> Run:
    resume = RunFolder(folder).recipe_file.exists()
    train(recipe, folder, resume=resume, device="cpu", show=show, splits=splits)
    return read_run(folder)


def _converted_accuracy(checkpoint: Path, recipe: Recipe, splits: Splits) -> float:
    model = load(checkpoint)
    inputs = _inputs(splits.train, recipe, splits, recipe.hashing.samples)
    convert(model, ECO, example=inputs[:1])
    fit_hashers(model, [inputs], samples=len(inputs), progress=False)
    return evaluate(model, recipe, splits)["accuracy"]


def _compared(
    teacher: Run, student: Run, folder: Path, recipe: Recipe, splits: Splits, margin: float, unlearned: float
) -> Story:
    latencies = _latencies(folder, recipe, splits)
    rows = table_rows(
        [teacher, student],
        {n: {f"latency of {LATENCY_BATCH}": f"{ms:.1f} ms"} for n, ms in latencies.items()},
    )
    lost = teacher.accuracy - student.accuracy
    saved = 1 - student.cost()["energy_pj"] / teacher.cost()["energy_pj"]
    story = Story(rows, folder / "index.html", lost, saved, margin, unlearned)
    tested = len(splits.test)
    notes = (
        f"One seed, {tested} test images: one image is {1 / tested:.2%}. Right after conversion and fitting, "
        f"before fine-tuning, the accuracy was {unlearned:.2%}. Operations and energy are of one image of "
        f"{recipe.augment.size} x {recipe.augment.size} pixels; latency is the median of a batch of "
        f"{LATENCY_BATCH} on this machine's CPU, {torch.get_num_threads()} threads, both models in turns.",
    )
    lead = str(story)
    write_page(
        story.page,
        render(
            "Softmax to hashed attention",
            lead[0].upper() + lead[1:] + ".",
            [teacher, student],
            rows,
            notes=notes,
        ),
    )
    return story


def _latencies(folder: Path, recipe: Recipe, splits: Splits) -> dict[str, float]:
    """Median milliseconds of a batch for both models, taken in turns."""
    inputs = _inputs(splits.test, recipe, splits, LATENCY_BATCH)
    models = {name: load(RunFolder(folder / name).model_file) for name in (SOFTMAX, ECO)}
    with torch.inference_mode():
        works = {name: Work(partial(model, inputs)) for name, model in models.items()}
        for work in works.values():
            work()
        timings = time_contestants(works, torch.device("cpu"), seconds=3.0)
    return {name: timing.median_ms for name, timing in timings.items()}


def _inputs(part: Arrays | Images, recipe: Recipe, splits: Splits, count: int) -> torch.Tensor:
    if not isinstance(part, Arrays):
        raise TypeError("the story is told on data in memory")
    samples = part.batch(torch.arange(min(count, len(part))))
    inputs: torch.Tensor = Task(recipe, splits).test_batch(*samples)[0]
    return inputs
