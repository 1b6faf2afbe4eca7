"""Inside a trained model: its answers to one picture, and each layer's codes and attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.attention import Attention, HashedAttention
from ecoformer.backends.choice import use_backend
from ecoformer.benchmarking.measuring import Bench, Work
from ecoformer.benchmarking.results import Row
from ecoformer.checkpoints import load
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.running import eval_mode
from ecoformer.training import Recipe
from ecoformer.training.batches import Task, measured_batches
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits

MOST_TOKENS, MOST_LAYERS = 1600, 4
"""A page holds a number for each pair of tokens."""


@dataclass(frozen=True)
class Layer:
    """One attention layer and one sample.

    Attributes:
        name: of the layer.
        weights: (N, N), what share of its attention a query pays to each key, mean over heads.
        codes: (N, bits) of bool, the queries' codes, all heads side by side; None without codes.
    """

    name: str
    weights: Tensor
    codes: Tensor | None


@dataclass(frozen=True)
class Sample:
    """One picture, and what every model does with it.

    Attributes:
        picture: (3, H, W) of uint8.
        classes: number of classes.
        target: (N,) classes of tokens, with `IGNORED` where none is asked for; or one class, ().
        answers: of every model, like the target.
        layers: of every model; without those that are not ours, too long, or not square.
    """

    picture: Tensor
    classes: int
    target: Tensor
    answers: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, list[Layer]] = field(default_factory=dict)


@torch.no_grad()
def look_inside(models: Mapping[str, nn.Module], recipe: Recipe, splits: Splits, index: int = 0) -> Sample:
    """Show every model one test picture."""
    if splits.kind != "images" or not isinstance(splits.test, Arrays):
        raise ValueError(f"{recipe.data.name} has no pictures in memory")
    if index >= len(splits.test):
        raise ValueError(f"{recipe.data.name} has {len(splits.test)} test pictures, but no number {index}")
    task = Task(recipe, splits)
    pictures, targets = splits.test.batch(torch.tensor([index]))
    inputs, _ = task.test_batch(pictures, targets)
    sample = Sample(pictures[0], splits.classes, targets[0])
    for name, model in models.items():
        with eval_mode(model):
            seen = _inputs_of_layers(model, inputs)
            sample.answers[name] = model(inputs)[0].argmax(-1)
            found = [_layer(path, layer, x) for path, (layer, x) in seen.items() if _fits(x)]
        sample.layers[name] = found[:MOST_LAYERS]
    return sample


def look_inside_runs(folders: Sequence[Path], names: Sequence[str], index: int = 0) -> Sample:
    """Show the models of finished runs one test picture of the data set that they share."""
    recipes = [RunFolder(folder).recipe() for folder in folders]
    if any(recipe.data != recipes[0].data or recipe.augment != recipes[0].augment for recipe in recipes):
        raise ValueError("the runs do not share one data set and picture size")
    splits = load_splits(recipes[0])
    models = {name: load(RunFolder(folder).model_file) for name, folder in zip(names, folders, strict=True)}
    return look_inside(models, recipes[0], splits, index)


def _inputs_of_layers(model: nn.Module, inputs: Tensor) -> dict[str, tuple[Attention, Tensor]]:
    seen: dict[str, tuple[Attention, Tensor]] = {}

    def keep(path: str, layer: Any, args: Any) -> None:
        seen[path] = (layer, args[0])

    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Attention)]
    hooks = [module.register_forward_pre_hook(partial(keep, path)) for path, module in layers]
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _fits(x: Tensor) -> bool:
    tokens = x.shape[1]
    return tokens <= MOST_TOKENS and round(tokens**0.5) ** 2 == tokens


def _layer(path: str, layer: Attention, x: Tensor) -> Layer:
    """With the identity as values, the output of attention is its weights."""
    q, k, _ = layer._project(x)
    identity = torch.eye(x.shape[1]).expand(1, layer.num_heads, -1, -1)
    with use_backend("eager"):
        weights = layer.attend(q, k, identity, None, False, **layer._token_terms(x))
        codes = (
            (layer.hasher(q) > 0)[0].transpose(0, 1).flatten(1)
            if isinstance(layer, HashedAttention)
            else None
        )
    return Layer(path, weights[0].mean(0), codes)


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


@torch.no_grad()
def time_sizes(
    models: Mapping[str, nn.Module], sizes: Sequence[int], patch: int, *, seconds: float = 1.0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Milliseconds for one picture of every size, models in turn; and notes on what disturbed them."""
    bench = Bench(torch.device("cpu"), seconds=seconds / max(len(models), 1), memory=False)
    for size in sizes:
        inputs = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        rows = [Row(name, "", {"size": size}) for name in models]
        works = [Work(partial(model.eval(), inputs)) for model in models.values()]
        for work in works:
            work()
        bench.measure(rows, works)
    found = [
        {"name": row.mechanism, "size": row.setting["size"], "tokens": (row.setting["size"] // patch) ** 2}
        | {"ms": row.timing.median_ms}
        for row in bench.run.rows
        if row.timing is not None
    ]
    return found, bench.run.notes
