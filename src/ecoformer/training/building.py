"""The model of a recipe: built or loaded, and given its mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints import load
from ecoformer.checkpoints.describe import ARGUMENTS, describe
from ecoformer.checkpoints.files import checked_description
from ecoformer.conversion import convert
from ecoformer.conversion.layers import choose, find_layers
from ecoformer.data.splits import Splits
from ecoformer.third_party import check_timm_name, import_timm
from ecoformer.training.recipe import Recipe
from ecoformer.training.tasks import Task

ENCODERS = {"text": "TextEncoder", "pairs": "TwoTowerEncoder", "tokens": "TextEncoder"}


def build_model(recipe: Recipe, splits: Splits) -> nn.Module:
    """The recipe's model on the CPU, in its mechanism, from its start or from random weights."""
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        return _started(recipe, splits)
    if splits.kind in ENCODERS:
        return _encoder(recipe, splits)
    return _convert(_picture_model(recipe, splits), recipe, splits)


def _picture_model(recipe: Recipe, splits: Splits) -> nn.Module:
    name = recipe.model.name
    check_timm_name(name, f"model.name: timm has no model {name!r}")
    model: nn.Module = import_timm().create_model(name, num_classes=splits.classes, **recipe.model.options)
    setattr(model, ARGUMENTS, dict(recipe.model.options))  # timm forgets them, a checkpoint needs them
    return model


def _encoder(recipe: Recipe, splits: Splits) -> nn.Module:
    from ecoformer.models import text

    if recipe.model.name != "text":
        raise ValueError(
            f"model.name must be text for {recipe.data.name}, which holds {splits.kind}, got "
            f"{recipe.model.name!r}"
        )
    if recipe.attention.name == "native" or recipe.attention.layers is not None:
        raise ValueError("attention: an encoder takes one mechanism by name, for all its layers")
    options: dict[str, Any] = {
        "vocabulary": splits.vocabulary,
        "length": splits.length,
        "classes": splits.classes,
    }
    if splits.kind == "tokens":
        options["pool"] = "none"
    cls: Any = getattr(text, ENCODERS[splits.kind])
    mechanism = {"attention": recipe.attention.name, "attention_config": recipe.attention.options}
    model: nn.Module = cls(**{**options, **mechanism, **recipe.model.options})
    return model


def _started(recipe: Recipe, splits: Splits) -> nn.Module:
    path = Path(recipe.start or "").expanduser()
    if not path.exists():
        raise FileNotFoundError(f"start: there is no checkpoint {recipe.start}")
    model = load(path)
    _check_start(model, recipe, splits, path.name)
    wanted, found = recipe.attention.name, find_layers(model)
    why_left = choose(found, recipe.attention.layers)
    kinds = {f.kind for f in found if why_left[f.name] is None}
    if kinds != {wanted}:
        return _convert(model, recipe, splits)
    if recipe.attention.options:
        raise ValueError(
            f"start: {path.name} attends by {wanted} already: leave attention.options out, which only a new "
            "layer can take"
        )
    return model


def _check_start(model: nn.Module, recipe: Recipe, splits: Splits, file: str) -> None:
    """A model from a file stays what it is, so that it must be what the recipe names and the data need."""
    held, name = describe(model)["model"], recipe.model.name
    named = ENCODERS[splits.kind] if name == "text" and splits.kind in ENCODERS else name
    if _variant(held["name"]) != _variant(named):
        raise ValueError(
            f"start: {file} holds {held['name']}, but the recipe trains {named}: set model.name to what the "
            "file holds, or start from another file"
        )
    arguments = held.get("arguments", {})
    classes = arguments.get("num_classes", arguments.get("classes"))
    if classes != splits.classes:
        raise ValueError(
            f"start: {file} answers with {classes} classes, but {recipe.data.name} has {splits.classes}: "
            f"load it, call reset_classifier({splits.classes}), and save it to start from that"
        )


def _variant(name: str) -> str:
    """A timm name without the weights it stands for; ours are timm's models, converted."""
    return name.split(".")[0].removeprefix("ecoformer_")


def _convert(model: nn.Module, recipe: Recipe, splits: Splits) -> nn.Module:
    attention = recipe.attention
    if attention.name != "native":
        example = example_of(recipe, splits)
        convert(model, attention.name, layers=attention.layers, example=example, **attention.options)
    return model


def example_of(recipe: Recipe, splits: Splits) -> torch.Tensor:
    """One input of the model, of zeros."""
    if splits.kind == "images":
        return torch.zeros(1, 3, recipe.augment.size, recipe.augment.size)
    shape = (1, 2, splits.length) if splits.kind == "pairs" else (1, splits.length)
    return torch.ones(shape, dtype=torch.long)


def check_export(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a model that could be trained, but not be written to a file that builds it again."""
    try:
        checked_description(model, "leave out model.options, or choose another model")
    except (ValueError, TypeError) as error:
        why = one_line(error, 500)
        raise ValueError(
            f"model.name={recipe.model.name}: a file could not hold this model: {why}"
        ) from error


def load_teacher(recipe: Recipe, splits: Splits, task: Task, device: torch.device) -> nn.Module | None:
    """The recipe's teacher, ready to answer, or None."""
    if recipe.teacher is None:
        return None
    path = Path(recipe.teacher.checkpoint).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"teacher.checkpoint: there is no file {path}")
    teacher = load(path).eval().requires_grad_(False)
    answered = task.answer(teacher, example_of(recipe, splits))
    if answered.shape[-1] != splits.classes:
        raise ValueError(
            f"teacher.checkpoint: {path.name} answers with {answered.shape[-1]} classes, but "
            f"{recipe.data.name} has {splits.classes}"
        )
    return teacher.to(device)


def make_average(model: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    """timm's running average of the weights, or None; buffers, hash functions among them, are copied."""
    if not recipe.ema:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model.to(device), decay=recipe.ema, use_warmup=True, exclude_buffers=True)
