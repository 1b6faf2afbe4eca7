"""The model of a recipe: built, checked, measured; with its teacher, optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecoformer.accounting import cost
from ecoformer.arguments import one_line
from ecoformer.checkpoints import load
from ecoformer.checkpoints.describe import ARGUMENTS, describe
from ecoformer.checkpoints.files import checked_description
from ecoformer.conversion import convert
from ecoformer.conversion.layers import choose, find_layers
from ecoformer.data.splits import Splits
from ecoformer.running import eval_mode
from ecoformer.third_party import check_timm_name, import_library, import_timm
from ecoformer.training.batches import Batch, Task
from ecoformer.training.recipe import Recipe

ENCODERS = {"text": "TextEncoder", "pairs": "TwoTowerEncoder", "tokens": "TextEncoder"}


def build_model(recipe: Recipe, splits: Splits) -> nn.Module:
    """The recipe's model on the CPU with its mechanism, from `start` or from random weights."""
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        return _load_start(recipe, splits)
    if splits.kind in ENCODERS:
        return _encoder(recipe, splits)
    name, options = recipe.model.name, recipe.model.options
    check_timm_name(name, f"model.name: timm has no model {name!r}")
    model: nn.Module = import_timm().create_model(name, num_classes=splits.classes, **options)
    setattr(model, ARGUMENTS, dict(options))  # timm does not keep them, but a checkpoint needs them
    return _convert(model, recipe, splits)


def _encoder(recipe: Recipe, splits: Splits) -> nn.Module:
    from ecoformer.models import text

    if recipe.model.name != "text":
        raise ValueError(
            f"model.name must be text for {recipe.data.name}, which holds {splits.kind}, got "
            f"{recipe.model.name!r}"
        )
    if recipe.attention.name == "native" or recipe.attention.layers is not None:
        raise ValueError("attention: an encoder takes one mechanism by name, for all its layers")
    options: dict[str, Any] = {"vocabulary": splits.vocabulary, "length": splits.length}
    options["classes"] = splits.classes
    options |= {"attention": recipe.attention.name, "attention_config": recipe.attention.options}
    options |= {"pool": "none"} if splits.kind == "tokens" else {}
    model: nn.Module = getattr(text, ENCODERS[splits.kind])(**options | recipe.model.options)
    return model


def _load_start(recipe: Recipe, splits: Splits) -> nn.Module:
    path = Path(recipe.start or "").expanduser()
    if not path.exists():
        raise FileNotFoundError(f"start: there is no checkpoint {recipe.start}")
    model = load(path)
    _check_start(model, recipe, splits, path.name)
    found = find_layers(model)
    why_left = choose(found, recipe.attention.layers)
    if {layer.kind for layer in found if why_left[layer.name] is None} != {recipe.attention.name}:
        return _convert(model, recipe, splits)
    if recipe.attention.options:
        raise ValueError(
            f"start: {path.name} already has {recipe.attention.name} attention: leave attention.options out, "
            "which are for new layers"
        )
    return model


def _check_start(model: nn.Module, recipe: Recipe, splits: Splits, file: str) -> None:
    """A loaded model keeps its shape, so it must match the recipe and the data."""
    held, name = describe(model)["model"], recipe.model.name
    named = ENCODERS.get(splits.kind, name) if name == "text" else name
    if _variant(held["name"]) != _variant(named):
        raise ValueError(f"start: {file} holds {held['name']}, but the recipe trains {named}: set model.name")
    classes = getattr(model, "num_classes", getattr(model, "classes", None))
    if classes != splits.classes:
        raise ValueError(
            f"start: {file} has {classes} classes, but {recipe.data.name} has {splits.classes}: call "
            f"reset_classifier({splits.classes}) first"
        )


def _variant(name: str) -> str:
    """A timm name without the tag of its weights; ours are timm's models, converted."""
    return name.split(".")[0].removeprefix("ecoformer_")


def _convert(model: nn.Module, recipe: Recipe, splits: Splits) -> nn.Module:
    attention = recipe.attention
    if attention.name != "native":
        example = example_of(recipe, splits)
        convert(model, attention.name, layers=attention.layers, example=example, **attention.options)
    return model


def example_of(recipe: Recipe, splits: Splits) -> torch.Tensor:
    """One input of the model."""
    if splits.kind == "images":
        return torch.zeros(1, 3, recipe.augment.size, recipe.augment.size)
    shape = (1, 2, splits.length) if splits.kind == "pairs" else (1, splits.length)
    return torch.ones(shape, dtype=torch.long)


def check_model(model: nn.Module, recipe: Recipe) -> None:
    """Raise for a model that cannot be saved."""
    try:
        checked_description(model, "leave out model.options, or choose another model")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"model.name={recipe.model.name}: a file could not hold this model: {one_line(error, 500)}"
        ) from error


def load_teacher(recipe: Recipe, splits: Splits, task: Task, device: torch.device) -> nn.Module | None:
    """The recipe's teacher, or None."""
    if recipe.teacher is None:
        return None
    path = Path(recipe.teacher.checkpoint).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"teacher.checkpoint: there is no file {path}")
    teacher = load(path).eval().requires_grad_(False)
    classes = task.answer(teacher, example_of(recipe, splits)).shape[-1]
    if classes != splits.classes:
        raise ValueError(
            f"teacher.checkpoint: {path.name} has {classes} classes, but {recipe.data.name} has "
            f"{splits.classes}"
        )
    return teacher.to(device)


def same_attention(model: nn.Module, teacher: nn.Module) -> bool:
    """Whether all attention layers of the two are of the same kind, so that there is nothing to transfer."""
    kinds = [[layer.kind for layer in find_layers(each)] for each in (model, teacher)]
    return kinds[0] == kinds[1]


def make_average(model: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    """timm's running average of the weights, or None; buffers such as hash functions are copied."""
    if not recipe.ema:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model.to(device), decay=recipe.ema, use_warmup=True, exclude_buffers=True)


def costs(model: nn.Module, recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Multiplications, additions and energy of one sample, by the paper's and by exact accounting."""
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


def mixed_precision(precision: str, device: torch.device) -> Any:
    """Context in which a model computes in a recipe's precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])


@torch.no_grad()
def judge(model: nn.Module, task: Task, batches: Iterable[Batch], device: torch.device) -> torch.Tensor:
    """Correct answers, summed loss and number of targets over all batches, (3,)."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    with eval_mode(model), mixed_precision(task.recipe.precision, device):
        for batch in batches:
            inputs, targets = task.test_batch(*batch)
            total = total + task.judge(task.answer(model, inputs), targets)
    return total


def figures(sums: torch.Tensor) -> dict[str, float]:
    """The sums of `judge` as an accuracy (0 to 1) and a mean loss."""
    correct, loss, targets = sums.tolist()
    if not targets:
        raise ValueError("the test data have no targets: there is nothing to measure")
    return {"accuracy": correct / targets, "loss": loss / targets}


def build_optimizer(model: nn.Module, recipe: Recipe) -> Any:
    """timm's optimizer of the recipe; biases and norms have no weight decay."""
    optim, o = import_library("timm.optim"), recipe.optimiser
    if o.name not in optim.list_optimizers():
        raise ValueError(
            f"optimiser.name: timm has no optimizer {o.name!r}; adamw, lamb, lion, sgd are common"
        )
    try:
        return optim.create_optimizer_v2(model, o.name, o.lr, o.weight_decay, eps=o.eps)
    except TypeError as error:
        raise ValueError(f"optimiser.name: {o.name} does not take these settings: {error}") from error


def learning_rate(recipe: Recipe, step: int, total: int, steps_per_epoch: int) -> float:
    """The learning rate of a step; neither the first nor the last step has a rate of zero."""
    s, peak = recipe.schedule, recipe.optimiser.lr
    warmup = round(s.warmup * steps_per_epoch) if s.epochs is not None else int(s.warmup)
    if warmup >= total:
        raise ValueError(f"schedule.warmup={s.warmup} is as long as the training, {total} steps")
    if step < warmup:
        return s.warmup_lr + (peak - s.warmup_lr) * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    share = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[s.name]
    return s.floor + (peak - s.floor) * share
