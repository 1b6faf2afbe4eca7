"""What soft codes cost in training: steps with signs and with soft codes, in turns.

    python benchmarks/soft_start.py

A step is forward, backward and update of a recipe's model with sharp_eco, on the recipe's data in fp32.
"share" is the time of a run with soft codes in the first fifth of its steps, relative to one without.
Writes results/soft_start.json.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from record import write_result
from rich.console import Console
from rich.table import Table

import ecoformer
from ecoformer.training.batches import Loader, Task
from ecoformer.training.model import build_model, build_optimizer
from ecoformer.training.recipe import load_recipe
from ecoformer.training.run import load_splits

SOFT = 0.2
RECIPES = {
    "recall, 128 pairs": ("recall", ["data.options.pairs=128", "data.options.count=2000"]),
    "ListOps, up to 2,000 tokens": ("lra_listops", ["data.options.count=500"]),
    "digits, PVTv2-B0": ("digits", []),
}


def measure(name: str, changes: list[str], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of a step with signs and with soft codes."""
    recipe = load_recipe(name, [*changes, "attention.name=sharp_eco", "attention.options={}"])
    splits = load_splits(recipe)
    task = Task(recipe, splits)
    model = build_model(recipe, splits).to(device).train()
    optimizer = build_optimizer(model, recipe)
    start = ecoformer.SoftStart(model, steps=2)
    generator = torch.Generator(device).manual_seed(0)
    ((inputs, targets),) = next(Loader(splits.train, recipe, device, 0, 1).epoch(0))
    inputs, targets = task.training_batch(inputs, targets, generator)

    def step(soft: bool) -> float:
        start.set(1 if soft else 2)
        begin = time.perf_counter()
        torch.autograd.backward(task.loss(task.answer(model, inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for soft, found in seconds.items():
            found.append(step(soft))
    signs, slow = (median(found[1:]) for found in seconds.values())  # the first round compiles
    return {"signs": signs, "soft": slow, "ratio": slow / signs, "share": 1 - SOFT + SOFT * slow / signs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("training", "signs, s", "soft, s", "ratio", f"a run, {SOFT:.0%} soft")
    figures = {}
    for label, (name, changes) in RECIPES.items():
        figures[label] = found = measure(name, changes, options.rounds, device)
        table.add_row(label, *(f"{found[key]:.3g}" for key in ("signs", "soft", "ratio", "share")))
    Console().print(table)
    write_result("soft_start", {"soft": SOFT, "threads": torch.get_num_threads(), "rows": figures})


if __name__ == "__main__":
    main()
