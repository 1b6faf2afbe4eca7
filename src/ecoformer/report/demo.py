"""`ecoformer demo`: train one model with four kinds of attention, equally long, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecoformer.benchmarking.results import hardware
from ecoformer.checkpoints import load
from ecoformer.data.mosaic import TILE
from ecoformer.report.inside import look_inside, sample_accuracies, smallest_difference, time_sizes
from ecoformer.report.page import Run, read_run, table_rows, write_page
from ecoformer.training import load_recipe, train
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits

CONTESTANTS = ("native", "softmax", "eco", "sharp_eco")
OURS = "sharp_eco"
TIMED_SIZES, TIME_SECONDS = (0.5, 1, 2, 3), 4.0
"""Pictures to time, times the size of those to learn from; seconds for each, all models together."""
ABOUT = (
    "Each picture is a mosaic of {tokens:,} tiles, and every tile is a token. The model names the colour of "
    "the grey tiles: that of the coloured tiles with the same symbol, anywhere in the picture."
)
WHEN = (
    "The task is generated, and chosen because single tokens far apart must be compared. The native model "
    "merges 64 tokens into one before it attends, which loses them. Photographs lose little by that "
    "(docs/choosing.md): there, compare with the native model first."
)


@dataclass(frozen=True)
class Demo:
    """The outcome.

    Attributes:
        rows: the table, one row for each kind of attention.
        verdicts: what `sharp_eco` gains and loses against softmax and the native model.
        notes: how the figures were obtained.
        page: the HTML page.
    """

    rows: list[dict[str, str]]
    verdicts: list[str]
    notes: list[str]
    page: Path


def run_demo(
    out: str | Path,
    *,
    changes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
    show: bool = True,
) -> Demo:
    """Train all contestants from scratch on generated mosaics, compare them, and write a page.

    Runs that an earlier call has finished in the same folder are not repeated.

    Args:
        out: folder of the runs and the page.
        changes: of the recipe `mosaic`, for all contestants.
        progress: called with each line of progress.
        show: progress bars and evaluations on stderr.
    """
    folder = Path(out)
    recipes = {name: load_recipe("mosaic", [f"attention.name={name}", *changes]) for name in CONTESTANTS}
    recipe = recipes[OURS]
    splits = load_splits(recipe)
    tokens = (recipe.augment.size // TILE) ** 2
    runs = []
    for number, (name, own) in enumerate(recipes.items(), 1):
        progress(f"{number} of {len(recipes)}: training with {name} attention")
        resume = RunFolder(folder / name).recipe_file.exists()
        train(own, folder / name, resume=resume, device="cpu", show=show, splits=splits)
        runs.append(read_run(folder / name))
        progress(f"   accuracy {runs[-1].accuracy:.1%} after {runs[-1].result['seconds']:.0f} s")
    progress("measuring time")
    models = {name: load(RunFolder(folder / name).model_file) for name in recipes}
    size = recipe.augment.size
    times, busy = time_sizes(
        models, [round(share * size) for share in TIMED_SIZES], TILE, seconds=TIME_SECONDS
    )
    scores = [sample_accuracies(model, recipe, splits) for model in models.values()]
    least = smallest_difference(scores)
    rows = table_rows(runs)
    for row, run in zip(rows, runs, strict=True):
        row["time"] = f"{_ms(times, run.name, size):.1f} ms"
    sample = look_inside(models, recipe, splits)
    codes = {name: layers[0].codes for name, layers in sample.layers.items() if layers}
    bits = [f"{code.shape[1]} bits in {name}" for name, code in codes.items() if code is not None]
    notes = [
        f"Accuracy: {len(splits.test)} test pictures; the smallest difference that they resolve is "
        f"{100 * least:.1f} points (two standard errors). All models were trained equally long, from "
        f"scratch, once: other seeds give other figures. Codes have {' and '.join(bits)}.",
        f"Energy and time are for one picture of {tokens:,} tokens. Energy is counted, by the paper's and by "
        "the exact accounting; time is the median of a forward pass on this machine, "
        f"{hardware(torch.device('cpu'))}.",
        *(f"{note[0].upper()}{note[1:]}." for note in busy),
        WHEN,
    ]
    verdicts = [_verdict(runs, times, size, against, least) for against in ("softmax", "native")]
    page = folder / "index.html"
    lead = f"{ABOUT.format(tokens=tokens)} {' '.join(verdicts)}"
    write_page(
        page, "Hashed attention, side by side", lead, runs, rows, notes=notes, sample=sample, times=times
    )
    return Demo(rows, verdicts, notes, page)


def _ms(times: Sequence[Mapping[str, Any]], name: str, size: int) -> float:
    return float(next(row["ms"] for row in times if row["name"] == name and row["size"] == size))


def _verdict(
    runs: Sequence[Run], times: Sequence[Mapping[str, Any]], size: int, against: str, least: float
) -> str:
    """What `sharp_eco` gains and loses against another, in one sentence."""
    ours, other = (next(run for run in runs if run.name == name) for name in (OURS, against))
    gained = ours.accuracy - other.accuracy
    points = f"{100 * abs(gained):.1f} points {'more' if gained > 0 else 'less'} accuracy"
    if abs(gained) < least:
        points = "the same accuracy (within what the test resolves)"
    energies = [ours.energy_mj(kind) / other.energy_mj(kind) for kind in ("paper", "exact")]
    ratio = _ms(times, OURS, size) / _ms(times, against, size)
    return (
        f"Against {against}, {OURS} has {points} for {energies[0]:.2f} times the energy "
        f"({energies[1]:.2f} exact) and {ratio:.2f} times the time."
    )
