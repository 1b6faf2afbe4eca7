"""A model as a small description that JSON can hold, and a model from its description."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from ecoformer.checkpoints.structure import structure
from ecoformer.conversion.convert import RECORD, reapply
from ecoformer.conversion.rules import known_modules
from ecoformer.storage import CheckpointError
from ecoformer.third_party import import_library, import_timm

_OURS = {
    "EcoPyramidVisionTransformerV2": "ecoformer.models.pvt_v2",
    "EcoTwins": "ecoformer.models.twins",
    "TextEncoder": "ecoformer.models.text",
    "TwoTowerEncoder": "ecoformer.models.text",
}
"""Our classes, and where they are."""
_IMAGES = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
"""What timm knows of how a model's images are prepared."""
_NEVER = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
_NEVER |= {"auto_map"}
"""Arguments by which a library would open other files or import code: a checkpoint must not make it so."""
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention")
"""Attention of transformers that is part of it; any other name may be that of code on the Hub."""
ARGUMENTS = "ecoformer_arguments"
"""Attribute of a timm model that was built from a file: what it was built with."""


def describe(
    model: nn.Module, arguments: dict[str, Any] | None = None, *, standalone: bool = True
) -> dict[str, Any]:
    """What `rebuild` needs to make such a model; `arguments` are the constructor's where they do not show."""
    architecture: dict[str, Any] = {"library": None, "name": type(model).__name__}
    if standalone:
        architecture = _architecture(model, arguments or {})
    known = architecture["library"] is not None
    return {
        "model": architecture,
        # Nobody but the user can build it again, so that the file must say what it was.
        "modules": {} if known else structure(model),
        "conversions": _conversions(model),
        "attention": structure(model, ours_only=True),
    }


def _conversions(model: nn.Module) -> list[dict[str, Any]]:
    """What was done to the model, or to a part of it, with the layers' names as the model knows them."""
    records = []
    for name, module in model.named_modules():
        for record in vars(module).get(RECORD, []):
            layers = {f"{name}.{layer}" if name else layer: s for layer, s in record["layers"].items()}
            records.append({"mechanism": record["mechanism"], "layers": layers})
    return records


def current_arguments(model: nn.Module) -> dict[str, Any] | None:
    """What one of our models was built with, and what was changed since; None for other models."""
    captured = getattr(model, "_hub_mixin_config", None)
    if captured is None:
        return None
    # Where and in which precision it was built is no part of what it is.
    known = {key: value for key, value in captured.items() if key not in ("device", "dtype")}
    changeable = ("num_classes", "global_pool", "classes")
    return known | {key: getattr(model, key) for key in changeable if hasattr(model, key)}


def _architecture(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    cls, anything = type(model), cast(Any, model)
    settings = getattr(model, "pretrained_cfg", None)
    known = current_arguments(model)
    if isinstance(settings, dict) and settings.get("architecture"):
        known = (_timm_arguments(model) if known is None else known) | arguments
        images = {key: settings[key] for key in _IMAGES if settings.get(key) is not None}
        return {"library": "timm", "name": settings["architecture"], "arguments": known, "images": images}
    if known is not None and _OURS.get(cls.__name__) == cls.__module__:
        return {"library": "ecoformer", "name": cls.__name__, "arguments": known | arguments}
    if cls.__module__ in _known_modules() and hasattr(model, "config"):
        config = json.loads(anything.config.to_json_string(use_diff=False))
        config.pop("quantization_config", None)  # the conversions, which are described apart
        implementation = getattr(anything.config, "_attn_implementation", None)
        implementation = implementation if implementation in _IMPLEMENTATIONS else None
        return {
            "library": "transformers",
            "name": cls.__name__,
            "config": config,
            "attention": implementation,
        }
    return {"library": None, "name": cls.__name__}


def _timm_arguments(model: Any) -> dict[str, Any]:
    """What timm's models keep of their constructor's arguments."""
    pool = getattr(model, "global_pool", None)
    pool = getattr(pool, "pool_type", None) if isinstance(pool, nn.Module) else pool
    kept = {name: getattr(model, name, None) for name in ("num_classes", "in_chans")} | {"global_pool": pool}
    arguments = dict(getattr(model, ARGUMENTS, {}))
    arguments |= {name: value for name, value in kept.items() if value is not None}
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        arguments["img_size"] = list(size)
    if getattr(model, "dynamic_img_size", False):
        arguments["dynamic_img_size"] = True
    return arguments


def _known_modules() -> set[str]:
    """The modules of transformers whose models are built from files: those that `convert` knows."""
    return {name for name in known_modules() if name.startswith("transformers.")}


def check_description(description: Any, source: str) -> None:
    """Refuse what `describe` did not write."""
    built = description.get("model") if isinstance(description, dict) else None
    if not isinstance(built, dict) or not isinstance(built.get("name"), str) or "library" not in built:
        raise CheckpointError(f"{source} was not written by ecoformer.save")
    arguments = built.get("arguments", {})
    names = {"library": built["library"], "arguments": arguments, "attention": description.get("attention")}
    if not isinstance(arguments, dict) or not isinstance(names["attention"], dict):
        raise CheckpointError(f"{source} is damaged: its description is not what ecoformer.save writes")
    if ":" in built["name"] or leads_elsewhere(arguments) or leads_elsewhere(built.get("config")):
        raise CheckpointError(f"{source} names files or code other than itself, which are not opened")
    if built.get("attention") not in _IMPLEMENTATIONS:
        raise CheckpointError(
            f"{source} names an attention kernel, {built['attention']!r}, which is not loaded"
        )
    records = description.get("conversions")
    for record in records if isinstance(records, list) else [None]:
        if not isinstance(record, dict) or not isinstance(record.get("layers"), dict):
            raise CheckpointError(f"{source} is damaged: it does not say how layers were converted")


def leads_elsewhere(value: Any) -> bool:
    """Whether arguments or a config would make a library open other files, download, or import code."""
    if isinstance(value, dict):
        named = any(key in _NEVER or str(key).endswith("attn_implementation") for key in value)
        return named or any(leads_elsewhere(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(leads_elsewhere(item) for item in value)
    return isinstance(value, str) and value.startswith(
        ("hf-hub:", "hf_hub:", "local-dir:", "http:", "https:")
    )


def rebuild(description: dict[str, Any]) -> nn.Module:
    """A model as described, with fresh weights; the global random state is left alone."""
    built = description["model"]
    name, library = built["name"], built["library"]
    with torch.random.fork_rng(devices=[]):
        if library == "timm":
            model = _timm(name, built["arguments"], built.get("images", {}))
        elif library == "transformers":
            model = _transformers(name, built["config"], built.get("attention"))
        elif library == "ecoformer" and name in _OURS:
            model = getattr(importlib.import_module(_OURS[name]), name)(**_tuples(built["arguments"]))
        else:
            raise CheckpointError(
                f"the file holds a {name}, which cannot be built from its name: build it and pass it as "
                "ecoformer.load(path, model)"
            )
        return prepare(model, description)


def prepare(model: nn.Module, description: dict[str, Any]) -> nn.Module:
    """Do to a bare model what was done to the described one."""
    for record in description["conversions"]:
        reapply(model, record["mechanism"], record["layers"])
    return model


def _tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _timm(name: str, arguments: dict[str, Any], images: dict[str, Any]) -> nn.Module:
    with _needs("timm", name):
        timm = import_timm()
    if not timm.is_model(name):
        raise CheckpointError(f"timm {timm.__version__} has no model {name!r}")
    model: nn.Module = timm.create_model(name, **_tuples(arguments))
    settings = getattr(model, "pretrained_cfg", None)
    if isinstance(settings, dict):
        settings.update(_tuples({key: images[key] for key in _IMAGES if key in images}))
    setattr(model, ARGUMENTS, dict(arguments))
    return model


def _transformers(name: str, config: dict[str, Any], attention: str | None) -> nn.Module:
    with _needs("transformers", name):
        import transformers

        import_library("transformers.modeling_utils")
    cls: Any = getattr(transformers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model or cls.__module__ not in _known_modules():
        raise CheckpointError(f"transformers {transformers.__version__} has no model class {name!r}")
    anything = cast(Any, cls)
    built = anything._from_config(anything.config_class.from_dict(config), attn_implementation=attention)
    return cast(nn.Module, built)


@contextlib.contextmanager
def _needs(package: str, name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} is built by {package}: pip install {package}") from error
