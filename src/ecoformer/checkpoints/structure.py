"""What a model is made of besides its tensors, to notice when two models are not the same."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

Structure = dict[str, dict[str, Any]]

_RATES = ("p", "drop_prob", "drop_path_rate")
"""Dropout of whatever kind changes training only, and many models do not remember theirs."""
_IGNORED = {"training", "inplace", "img_size", "num_patches", "H", "W", "grad_checkpointing"}
_IGNORED |= {"gradient_checkpointing"}
_NOTES = {"pretrained_cfg", "default_cfg", "ecoformer_arguments", "warnings_issued", "all_tied_weights_keys"}
"""What libraries write down about a model, such as where its weights came from."""


def structure(model: nn.Module, *, ours_only: bool = False) -> Structure:
    """The class and the plain attributes of every module, by name; `ours_only`: of our own classes."""
    return {
        name: {"class": _class(module)} | _attributes(module)
        for name, module in model.named_modules()
        if not ours_only or (type(module).__module__.startswith("ecoformer.") and name)
    }


def difference(ours: Structure, theirs: Structure) -> str | None:
    """The first thing in which two structures differ.

    Attributes that only one of them has are passed over: versions of a library may add some.
    """
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            return f"{name or 'the model'} is there only once"
        mine, yours = ours[name], theirs[name]
        for key in mine:
            if key in yours and _plain(mine[key]) != _plain(yours[key]):
                return f"{name or 'the model'}: {key} is {mine[key]!r} against {yours[key]!r}"
    return None


def _class(module: nn.Module) -> str:
    name = type(module).__qualname__
    return "Identity" if name in ("DropPath", "Dropout") else name


def _attributes(module: nn.Module) -> dict[str, Any]:
    skipped = _IGNORED | _NOTES | (set(_RATES) if not list(module.parameters(recurse=False)) else set())
    named = {key: f"function {value.__name__}" for key, value in vars(module).items() if _is_function(value)}
    plain = {key: value for key, value in vars(module).items() if _is_plain_or_dict(value)}
    return {k: v for k, v in (named | plain).items() if not k.startswith("_") and k not in skipped}


def _is_function(value: Any) -> bool:
    """A plain function, such as an activation."""
    return inspect.isbuiltin(value) or inspect.isfunction(value)


def _is_plain_or_dict(value: Any) -> bool:
    """Also names with plain values, such as what an `Adapter` remembers of the layer before it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
