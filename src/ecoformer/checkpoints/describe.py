"""A model as a small description that JSON can hold, and a model from its description."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from ecoformer.conversion import convert
from ecoformer.conversion.verb import RECORD
from ecoformer.storage import CheckpointError

_OURS = {"TextEncoder": "ecoformer.models.text", "TwoTowerEncoder": "ecoformer.models.text"}
"""Our classes that timm does not build, and where they are."""


def describe(model: nn.Module, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `rebuild` needs to make such a model; `arguments` are the constructor's where they do not show."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        "model": _architecture(model, arguments or {}),
        "conversions": getattr(model, RECORD, []),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _architecture(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    cls, anything = type(model), cast(Any, model)
    captured = getattr(model, "_hub_mixin_config", None)
    settings = getattr(model, "pretrained_cfg", None)
    if cls.__name__ in _OURS and cls.__module__.startswith("ecoformer."):
        library, name, known = "ecoformer", cls.__name__, dict(captured or {})
    elif isinstance(settings, dict) and settings.get("architecture"):
        library, name = "timm", settings["architecture"]
        known = _timm_arguments(model) if captured is None else dict(captured)
    elif cls.__module__.startswith("transformers.") and hasattr(model, "config"):
        config = json.loads(anything.config.to_json_string(use_diff=False))
        return {"library": "transformers", "name": cls.__name__, "config": config}
    else:
        return {"library": None, "name": cls.__name__}
    if hasattr(model, "num_classes"):  # reset_classifier may have changed it
        known["num_classes"] = anything.num_classes
    return {"library": library, "name": name, "arguments": known | arguments}


def _timm_arguments(model: Any) -> dict[str, Any]:
    """What timm's models keep of their constructor's arguments."""
    arguments = {
        "global_pool": getattr(model, "global_pool", None),
        "in_chans": getattr(model, "in_chans", None),
    }
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    if size is not None:
        arguments["img_size"] = list(size)
    return {key: value for key, value in arguments.items() if value is not None}


def rebuild(description: dict[str, Any]) -> nn.Module:
    """A model as described, with fresh weights."""
    built = description["model"]
    name, library = built["name"], built["library"]
    if library == "timm":
        model = _timm(name, built["arguments"])
    elif library == "transformers":
        model = _transformers(name, built["config"])
    elif library == "ecoformer" and name in _OURS:
        model = getattr(importlib.import_module(_OURS[name]), name)(**built["arguments"])
    else:
        raise CheckpointError(
            f"the file holds a {name}, which cannot be built from its name: build it and pass it as "
            "ecoformer.load(path, model)"
        )
    return prepare(model, description)


def prepare(model: nn.Module, description: dict[str, Any]) -> nn.Module:
    """Do to a bare model what was done to the described one."""
    for record in description["conversions"]:
        for layer, settings in record["layers"].items():
            convert(model, record["mechanism"], layers=[_escape(layer)], **settings)
    setattr(model, RECORD, list(description["conversions"]))
    dtype = getattr(torch, description["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the file names an unknown dtype: {description['dtype']!r}")
    return model.to(dtype)


def _escape(name: str) -> str:
    """A layer's name as a pattern that only it matches."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in name)


def _timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    with _needs("timm", name):
        import timm
    arguments = {key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
    model: nn.Module = timm.create_model(name, **arguments)
    return model


def _transformers(name: str, config: dict[str, Any]) -> nn.Module:
    with _needs("transformers", name):
        import transformers
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise CheckpointError(f"transformers {transformers.__version__} has no model class {name}")
    model: nn.Module = cls(cast(Any, cls.config_class).from_dict(config))
    return model


@contextlib.contextmanager
def _needs(package: str, name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name} is built by {package}: pip install {package}") from error
