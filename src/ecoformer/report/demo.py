"""`ecoformer demo`: train one model with four kinds of attention, equally long, and compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ecoformer.checkpoints import load
from ecoformer.data.mosaic import TILE
from ecoformer.data.splits import IGNORED, Splits
from ecoformer.environment import hardware
from ecoformer.files import replace_text
from ecoformer.running import eval_mode
from ecoformer.training import Recipe, load_recipe, train
from ecoformer.training.batches import Task, measured_batches
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits

CONTESTANTS = ("native", "softmax", "eco", "sharp_eco")
OURS = "sharp_eco"
TIME_SECONDS = 3.0
"""Of measuring each model."""
WHEN = (
    "The task is generated, and chosen because single tokens far apart must be compared. The native model "
    "merges 64 tokens into one before it attends, which loses them. Photographs lose little by that "
    "(docs/choosing.md): there, compare with the native model first."
)


def run_demo(out: str | Path, *, changes: Sequence[str] = (), show: bool = True) -> dict[str, Any]:
    """Train all contestants from scratch on generated mosaics and compare them.

    The folder gets a run for each, and the comparison as `comparison.json`. Runs that an earlier call has
    finished there are not repeated.

    Args:
        out: the folder.
        changes: of the recipe `mosaic`, for all contestants.
        show: progress on stderr.

    Returns:
        "rows", one for each kind of attention: accuracy from 0 to 1, millijoules and milliseconds a picture;
        "verdicts", what `sharp_eco` gains and loses against softmax and the native model; "notes".
    """
    console = Console(stderr=True, quiet=not show)
    folder = Path(out)
    recipes = {name: load_recipe("mosaic", [f"attention.name={name}", *changes]) for name in CONTESTANTS}
    recipe = recipes[OURS]
    splits = load_splits(recipe)
    rows, scores = [], []
    for number, (name, own) in enumerate(recipes.items(), 1):
        console.print(f"{number} of {len(recipes)}: training with {name} attention")
        run = RunFolder(folder / name)
        result = train(own, run.path, resume=run.recipe_file.exists(), device="cpu", show=show, splits=splits)
        console.print(f"   accuracy {result['accuracy']:.1%} after {result['seconds']:.0f} s")
        energy = {kind: result["cost"][kind]["energy_pj"] * 1e-9 for kind in ("paper", "exact")}
        model = load(run.model_file)
        rows.append(
            {"model": name, "accuracy": result["accuracy"]}
            | {f"{kind}_mj": energy[kind] for kind in energy}
            | {"ms": milliseconds(model, recipe.augment.size)}
        )
        scores.append(sample_accuracies(model, recipe, splits))
    least = smallest_difference(scores)
    notes = [
        f"Accuracy: {len(splits.test)} test pictures; the smallest difference that they resolve is "
        f"{100 * least:.1f} points (two standard errors). All models were trained equally long, from "
        "scratch, once: other seeds give other figures.",
        f"Energy and time are for one picture of {(recipe.augment.size // TILE) ** 2:,} tokens. Energy is "
        "counted, by the paper's and by the exact accounting; time is the median of a forward pass on "
        f"{hardware(torch.device('cpu'))}.",
        WHEN,
    ]
    verdicts = [_verdict(rows, against, least) for against in ("softmax", "native")]
    found = {"rows": rows, "verdicts": verdicts, "notes": notes}
    replace_text(folder / "comparison.json", json.dumps(found, indent=2) + "\n")
    return found


@torch.no_grad()
def milliseconds(model: nn.Module, size: int) -> float:
    """Median time of a forward pass with one picture."""
    images = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with eval_mode(model):
        names, threads = {"model": model, "images": images}, torch.get_num_threads()
        timer = Timer("model(images)", globals=names, num_threads=threads)
        return timer.blocked_autorange(min_run_time=TIME_SECONDS).median * 1e3


@torch.no_grad()
def sample_accuracies(model: nn.Module, recipe: Recipe, splits: Splits) -> Tensor:
    """Share of right answers for every test sample, (samples,)."""
    task, shares = Task(recipe, splits), []
    with eval_mode(model):
        for batch in measured_batches(splits.test, recipe, torch.device("cpu")):
            inputs, targets = task.test_batch(*batch)
            asked = (targets != IGNORED).view(len(targets), -1)
            right = (task.answer(model, inputs).argmax(-1) == targets).view(len(targets), -1)
            shares.append((right & asked).sum(1) / asked.sum(1).clamp(min=1))
    return torch.cat(shares)


def smallest_difference(accuracies: Sequence[Tensor]) -> float:
    """The smallest difference in accuracy that these samples resolve.

    It is two standard errors of the mean difference between two models on the same samples, for the pair
    of models whose difference varies most.
    """
    pairs = [a - b for i, a in enumerate(accuracies) for b in accuracies[:i]]
    return float(max(2 * pair.std() / len(pair) ** 0.5 for pair in pairs))


def _verdict(rows: Sequence[dict[str, Any]], against: str, least: float) -> str:
    """What `sharp_eco` gains and loses against another, in one sentence."""
    ours, other = (next(row for row in rows if row["model"] == name) for name in (OURS, against))
    gained = ours["accuracy"] - other["accuracy"]
    points = f"{100 * abs(gained):.1f} points {'more' if gained > 0 else 'less'} accuracy"
    if abs(gained) < least:
        points = "the same accuracy (within what the test resolves)"
    paper, exact, time = (ours[key] / other[key] for key in ("paper_mj", "exact_mj", "ms"))
    return (
        f"Against {against}, {OURS} has {points} for {paper:.2f} times the energy "
        f"({exact:.2f} exact) and {time:.2f} times the time."
    )
