"""`save` and `load`: a converted model in one safetensors file that describes how to build it."""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer import storage
from ecoformer.arguments import one_line
from ecoformer.checkpoints import folders
from ecoformer.checkpoints.describe import (
    check_description,
    describe,
    difference,
    prepare,
    rebuild,
    settings_of,
)
from ecoformer.checkpoints.limits import Held, build_within, check_numbers, untied, within
from ecoformer.conversion.convert import RECORD, unwrapped
from ecoformer.quantization import integer_layers
from ecoformer.storage import CheckpointError


@torch.inference_mode(mode=False)  # else conversion cannot tell which parameters were read
def save(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    arguments: dict[str, Any] | None = None,
    standalone: bool = True,
) -> Path:
    """Write `model` to a safetensors file with its config inside, so that `load(path)` needs nothing else.

    An existing file is replaced when the new one is complete. The file holds weights and hash functions,
    fitted or not, but no state of training (optimiser, dropout of timm's original layers).

    Args:
        model: one of ours, of timm's or of Hugging Face's, converted or not. Any other module can be saved
            too; to load it, pass such a module to `load`.
        path: the file; its folder must exist.
        arguments: those of `timm.create_model` that a timm model does not remember. `save` checks that
            `load(path)` will build the same model; if not, the error names the difference.
        standalone: False omits how the model is built, for a model that was changed by hand. `load` then
            needs such a model.
    """
    model = unwrapped(model)
    remedy = (
        "pass save(..., arguments={...}) with what it was created with, or standalone=False, and such a "
        "model to load"
    )
    description = checked_description(model, remedy, arguments, standalone=standalone)
    return storage.write(path, model.state_dict(), description)


def checked_description(
    model: nn.Module, remedy: str, arguments: dict[str, Any] | None = None, *, standalone: bool = True
) -> dict[str, Any]:
    """A model's description, after a check that it builds the same model; errors end with the `remedy`."""
    description = describe(model, arguments, standalone=standalone)
    storage.as_json(description)
    if description["model"]["library"] is None:
        return description
    name, arguments = description["model"]["name"], description["model"].get("arguments", {})
    state = model.state_dict()
    check_numbers(description, Held.by(state), name)
    try:
        with torch.device("meta"):
            again = rebuild(description)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be built with {arguments} ({one_line(error)}): {remedy}") from error
    odd = difference(_shape_of(model), _shape_of(again)) or untied(state, again.state_dict())
    if odd:
        raise ValueError(f"another {name} would come back, built with {arguments} ({odd}): {remedy}")
    return description


def _shape_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything that two equal models have in common but the numbers."""
    state = model.state_dict()
    tensors = {key: {"shape": tuple(x.shape)} for key, x in state.items() if isinstance(x, Tensor)}
    return settings_of(model) | tensors


@torch.inference_mode(mode=False)  # else parameters could not learn
def load(
    path: str | PathLike[str], model: nn.Module | None = None, *, device: str | torch.device = "cpu"
) -> nn.Module:
    """The model in a file of `save`, in eval mode.

    Args:
        path: the file, or a folder that `save_pretrained` or a Trainer wrote.
        model: needed if no library here builds the file's model: such a model, converted in the same way or
            not at all. It is converted and loaded in place and keeps its dtypes; an error changes nothing.
        device: where to put the weights, if no `model` is given.
    """
    if Path(path).is_dir():
        folder = Path(path)
        if model is None and not folders.is_ours(folder):
            return folders.load_transformers(folder).to(device).eval()
        path = folder / folders.WEIGHTS
    source = str(path)
    tensors, description = storage.read(path)
    check_description(description, source)
    held = Held.by(tensors)
    check_numbers(description if model is None else description | {"model": {}}, held, source)
    if model is None:
        return _build(tensors, description, source).to(device).eval()
    given, model = model, unwrapped(model)
    # Everything is tried on a copy without data first.
    rehearsal = _on_meta(model)
    steps = description | ({"conversions": []} if settings_of(model, ours_only=True) else {})
    steps |= {"quantized": []} if integer_layers(model) else {}
    with (
        storage.blaming(f"{source} does not fit {type(model).__name__}", CheckpointError, MemoryError),
        torch.device("meta"),
        within(held, source),
    ):
        prepare(rehearsal, steps)
        _check_same(rehearsal, description, source)
    storage.check_fit(rehearsal, tensors, source=source)
    prepare(model, steps)
    storage.load_into(model, tensors, source=source)
    return given.eval()


def _build(tensors: dict[str, Tensor], description: dict[str, Any], source: str) -> nn.Module:
    def build() -> nn.Module:
        model = rebuild(description)
        _check_same(model, description, source)
        return model

    what = f"{source} does not describe a model that can be built here"
    with storage.blaming(what, CheckpointError, MemoryError):
        model = build_within(build, tensors, source)
    # Every parameter and buffer gets the precision that it was saved in.
    for name, own in model.state_dict(keep_vars=True).items():
        if own.is_floating_point() and tensors[name].is_floating_point():
            own.data = own.data.to(tensors[name].dtype)
    storage.load_into(model, tensors, source=source)
    return model


def _check_same(model: nn.Module, description: dict[str, Any], source: str) -> None:
    """Mechanisms and settings that leave no trace in the tensors must be the file's."""
    ours_only = description["model"]["library"] is not None
    odd = difference(settings_of(model, ours_only=ours_only), description["settings"])
    if odd:
        known = " (it is converted already: pass it as it was before)" if getattr(model, RECORD, []) else ""
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {odd} in the file{known}")


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without data, to try things on."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): b.to("meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)
