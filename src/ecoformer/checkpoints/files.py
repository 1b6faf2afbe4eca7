"""`save` and `load`: a converted model in one safetensors file that says how to build it."""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer import storage
from ecoformer.checkpoints.describe import describe, prepare, rebuild
from ecoformer.conversion.verb import RECORD
from ecoformer.storage import CheckpointError


def save(model: nn.Module, path: str | PathLike[str], *, arguments: dict[str, Any] | None = None) -> Path:
    """Write `model` to a safetensors file with its config inside, so that `load(path)` needs nothing else.

    The file is written aside and put in place when it is whole. Weights, hash functions and whether they are
    fitted are all in it.

    Args:
        model: one of ours, of timm's or of Hugging Face's, converted or not. Any other module can be saved
            too; to load it, pass such a module to `load`.
        path: where to; the folder must be there.
        arguments: those of `timm.create_model` that a timm model does not remember. It is checked that the
            file can be loaded; where it could not, the error asks for them.
    """
    description = describe(model, arguments)
    if description["model"]["library"] is not None:
        _check_rebuilds(model, description)
    return storage.write(path, model.state_dict(), description)


def load(
    path: str | PathLike[str], model: nn.Module | None = None, *, device: str | torch.device = "cpu"
) -> nn.Module:
    """The model in a file of `save`, in eval mode.

    Args:
        path: the file.
        model: where the file's model is of a class that no library here builds: such a model, converted or
            not. It is converted and loaded in place; an error leaves it as it was.
        device: where to put the weights, if no `model` is given.
    """
    tensors, description = storage.read(path)
    if not {"model", "conversions", "dtype"} <= set(description):
        raise CheckpointError(f"{path} was not written by ecoformer.save")
    if model is None:
        new = rebuild(description)
        storage.load_into(new, tensors, source=str(path))
        return new.to(device).eval()
    if not getattr(model, RECORD, []):
        rehearsal = _on_meta(model)
        prepare(rehearsal, description)
        _check_same(tensors, rehearsal.state_dict(), str(path))
        prepare(model, description)
    storage.load_into(model, tensors, source=str(path))
    return model.eval()


def _check_rebuilds(model: nn.Module, description: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        again = rebuild(description).state_dict()
    own = model.state_dict()
    odd = [name for name in {**own, **again} if _shape(own, name) != _shape(again, name)]
    if odd:
        name = description["model"]["name"]
        raise ValueError(
            f"a {name} built with {description['model'].get('arguments', {})} would differ in {odd[0]} "
            f"({_shape(own, odd[0])} here, {_shape(again, odd[0])} there) and {len(odd) - 1} more: pass "
            "save(..., arguments={...}) with what it was created with"
        )


def _check_same(tensors: dict[str, Tensor], state: dict[str, Tensor], source: str) -> None:
    odd = [name for name in {**tensors, **state} if _shape(tensors, name) != _shape(state, name)]
    if odd:
        raise CheckpointError(
            f"{source} does not fit the model: {odd[0]} is {_shape(tensors, odd[0])} in the file and "
            f"{_shape(state, odd[0])} in the model, and {len(odd) - 1} more differ"
        )


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | str:
    return tuple(state[name].shape) if name in state else "missing"


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without data, to try things on."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): b.to("meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)
