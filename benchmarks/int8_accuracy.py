"""Accuracy of trained models in fp32 and in int8, on their own test data.

    python benchmarks/int8_accuracy.py NAME RUN... [--calibrate 64] [--device cuda] [--set data.root=FOLDER]

Every RUN is the folder of a finished `ecoformer train`. The model is quantised with samples of its training
data, which are not augmented, and both are judged on the same test samples. "agree" is the share of answers
that both give, and "resolves" two standard errors of the difference, in points. Writes results/NAME.json.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from record import relative, write_result
from torch import nn

import ecoformer
from ecoformer.data.splits import IGNORED
from ecoformer.training.batches import Task, measured_batches
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits


@torch.inference_mode()
def answers(model: nn.Module, task: Task, batches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model answers and whether that is right, for all positions that are judged."""
    found, right = [], []
    for batch in batches:
        inputs, targets = task.test_batch(*batch)
        judged = targets != IGNORED
        top = task.answer(model, inputs).argmax(dim=-1)
        found.append(top[judged])
        right.append((top == targets)[judged])
    return torch.cat(found), torch.cat(right)


def compare(run: Path, count: int, changes: list[str], device: torch.device) -> dict[str, Any]:
    folder = RunFolder(run)
    recipe = folder.recipe(changes)
    splits = load_splits(recipe)
    model = ecoformer.load(folder.model_file).to(device)
    task = Task(recipe, splits)
    batches = list(measured_batches(splits.test, recipe, device))
    before, right_before = answers(model, task, batches)
    size = recipe.eval_batch or recipe.batch
    samples = islice(measured_batches(splits.train, recipe, device), -(-count // size))
    calibration = [task.test_batch(*batch)[0] for batch in samples]
    quantization = ecoformer.quantize(
        model, calibration, samples=count, forward=forward(task), progress=False
    )
    after, right_after = answers(model, task, batches)
    described = recipe.model_dump(mode="json")
    described["data"]["root"] = relative(described["data"]["root"] or "")
    difference = right_after.float() - right_before.float()
    return {
        "attention": {"name": recipe.attention.name, "options": recipe.attention.options},
        "recipe": described,
        "answers": len(difference),
        "fp32": float(right_before.float().mean()),
        "int8": float(right_after.float().mean()),
        "agree": float((before == after).float().mean()),
        "resolves": 2 * float(difference.std()) / math.sqrt(len(difference)),
        "kept_in_fp32": [layer.name for layer in quantization.layers if layer.why],
        "megabytes": quantization.megabytes,
        "largest_error": max(layer.error or 0.0 for layer in quantization.layers if not layer.why),
    }


def forward(task: Task) -> Any:
    return lambda model, inputs: task.answer(model, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--calibrate", type=int, default=64)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    options = parser.parse_args()
    rows = []
    for run in options.runs:
        row = compare(run, options.calibrate, options.changes, options.device)
        rows.append(row)
        shares = {key: f"{row[key]:.2%}" for key in ("fp32", "int8", "agree", "resolves")}
        print(row["attention"]["name"], shares, f"{row['largest_error']:.1e}", row["kept_in_fp32"])
    write_result(options.name, rows)


if __name__ == "__main__":
    main()
