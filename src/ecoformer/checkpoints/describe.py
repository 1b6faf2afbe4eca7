"""A model as a small description that JSON can hold, and a model from its description.

A description has four parts: "model" (library, name, arguments), "conversions" (what `convert` did),
"quantized" (the layers that `quantize` gave int8 numbers) and "settings" (classes and settings of our own
modules, and of all modules if no library builds the model).
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from ecoformer.checkpoints.limits import offline
from ecoformer.conversion.convert import RECORD, reapply
from ecoformer.conversion.rules import known_modules
from ecoformer.quantization.quantize import integer_layers, requantize
from ecoformer.storage import CheckpointError
from ecoformer.third_party import import_library, import_timm

ARGUMENTS = "ecoformer_arguments"
"""Attribute of a timm model: the arguments it was built with, as far as we know them."""
_OURS = {
    "EcoPyramidVisionTransformerV2": "ecoformer.models.pvt_v2",
    "EcoTwins": "ecoformer.models.twins",
    "TextEncoder": "ecoformer.models.text",
    "TwoTowerEncoder": "ecoformer.models.text",
}
_IMAGES = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
"""timm's settings of how a model's images are prepared."""
_NEVER = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
_NEVER |= {"auto_map", "transformers_weights"}
"""Arguments that make a library open other files or import code."""
_ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:", "http:", "https:")
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention")
"""Attention that is part of transformers; any other name may be that of code on the Hub."""
_IGNORED = {"training", "inplace", "img_size", "num_patches", "H", "W", "drop_path_rate"}
_IGNORED |= {"grad_checkpointing", "gradient_checkpointing", "chunk_size_feed_forward", "name_or_path"}
_IGNORED |= {"pretrained_cfg", "default_cfg", ARGUMENTS, "warnings_issued", "all_tied_weights_keys"}


def describe(
    model: nn.Module, arguments: dict[str, Any] | None = None, *, standalone: bool = True
) -> dict[str, Any]:
    """What `rebuild` needs; `arguments` are constructor arguments that the model does not remember."""
    built = _architecture(model, arguments or {}) if standalone else None
    records = []
    for name, module in model.named_modules():
        for record in vars(module).get(RECORD, []):  # parts can be converted on their own
            layers = {f"{name}.{layer}" if name else layer: s for layer, s in record["layers"].items()}
            records.append({"mechanism": record["mechanism"], "layers": layers})
    return {
        "model": built or {"library": None, "name": type(model).__name__},
        "conversions": records,
        "quantized": integer_layers(model),
        "settings": settings_of(model, ours_only=built is not None),
    }


def current_arguments(model: nn.Module) -> dict[str, Any] | None:
    """What one of our models was built with, updated where it has changed since; None for other models."""
    captured = getattr(model, "_hub_mixin_config", None)
    if captured is None:
        return None
    known = {key: value for key, value in captured.items() if key not in ("device", "dtype")}
    changeable = ("num_classes", "global_pool", "classes")
    return known | {key: getattr(model, key) for key in changeable if hasattr(model, key)}


def _architecture(model: Any, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Library, name and arguments; None if no library builds the model."""
    name, module = type(model).__name__, type(model).__module__
    settings, known = getattr(model, "pretrained_cfg", None), current_arguments(model)
    if isinstance(settings, dict) and settings.get("architecture"):
        known = (_timm_arguments(model) if known is None else known) | arguments
        images = {key: settings[key] for key in _IMAGES if settings.get(key) is not None}
        return {"library": "timm", "name": settings["architecture"], "arguments": known, "images": images}
    if known is not None and _OURS.get(name) == module:
        return {"library": "ecoformer", "name": name, "arguments": known | arguments}
    if module.startswith("transformers.") and module in known_modules() and hasattr(model, "config"):
        config = json.loads(model.config.to_json_string(use_diff=False))
        config.pop("quantization_config", None)  # holds the conversions, which are described separately
        attention = getattr(model.config, "_attn_implementation", None)
        attention = attention if attention in _IMPLEMENTATIONS else None
        return {"library": "transformers", "name": name, "config": config, "attention": attention}
    return None


def _timm_arguments(model: Any) -> dict[str, Any]:
    """What timm's models keep of their constructor's arguments."""
    pool = getattr(model, "global_pool", None)
    kept = {name: getattr(model, name, None) for name in ("num_classes", "in_chans")}
    kept["global_pool"] = getattr(pool, "pool_type", None) if isinstance(pool, nn.Module) else pool
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    kept["img_size"] = None if size is None else list(size)
    kept["dynamic_img_size"] = getattr(model, "dynamic_img_size", False) or None
    return getattr(model, ARGUMENTS, {}) | {name: value for name, value in kept.items() if value is not None}


def check_description(description: dict[str, Any], source: str) -> None:
    """Refuse what `describe` did not write, and what would open anything but this file."""
    built = description.get("model")
    if not isinstance(built, dict) or not isinstance(built.get("name"), str) or "library" not in built:
        raise CheckpointError(f"{source} was not written by ecoformer.save")
    records, layers = description.get("conversions"), description.get("quantized", [])
    parts = [built.get(part, {}) for part in ("arguments", "config", "images")]
    dicts = [*parts, description.get("settings")]
    for record in records if isinstance(records, list) else [None]:
        dicts.append(record.get("layers") if isinstance(record, dict) else None)
    named = isinstance(layers, list) and all(isinstance(name, str) for name in layers)
    if not named or not all(isinstance(part, dict) for part in dicts):
        raise CheckpointError(f"{source} is damaged: its description is not what ecoformer.save writes")
    foreign_attention = built.get("attention") not in _IMPLEMENTATIONS
    if ":" in built["name"] or foreign_attention or any(map(leads_elsewhere, parts)):
        raise CheckpointError(f"{source} names files or code other than itself, which are not opened")


def leads_elsewhere(value: Any) -> bool:
    """Whether arguments or a config would make a library open other files, download, or import code."""
    if isinstance(value, dict):
        named = any(key in _NEVER or str(key).endswith("attn_implementation") for key in value)
        return named or any(map(leads_elsewhere, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(leads_elsewhere, value))
    return isinstance(value, str) and value.startswith(_ELSEWHERE)


def rebuild(description: dict[str, Any]) -> nn.Module:
    """A model as described, with fresh weights; the global random state stays as it was."""
    built = description["model"]
    name, library = built["name"], built["library"]
    with torch.random.fork_rng(devices=[]):
        if library == "timm":
            model = _timm(name, built["arguments"], built.get("images", {}))
        elif library == "transformers":
            model = _transformers(name, built["config"], built.get("attention"))
        elif library == "ecoformer" and name in _OURS:
            model = getattr(import_library(_OURS[name]), name)(**_tuples(built["arguments"]))
        else:
            raise CheckpointError(
                f"the file holds a {name}, which cannot be built from its name: build it and pass it as "
                "ecoformer.load(path, model)"
            )
        return prepare(model, description)


def prepare(model: nn.Module, description: dict[str, Any]) -> nn.Module:
    """Convert and quantise a bare model as the described one was."""
    for record in description["conversions"]:
        reapply(model, record["mechanism"], record["layers"])
    if description.get("quantized"):
        requantize(model, description["quantized"])
    return model


def _tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _timm(name: str, arguments: dict[str, Any], images: dict[str, Any]) -> nn.Module:
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
    import_library("transformers.modeling_utils")
    library = import_library("transformers")
    cls: Any = getattr(library, name, None)
    if getattr(cls, "__module__", None) not in known_modules() or not hasattr(cls, "_from_config"):
        raise CheckpointError(f"transformers {library.__version__} has no model class {name!r}")
    with offline():
        model: nn.Module = cls._from_config(cls.config_class.from_dict(config), attn_implementation=attention)
    return model


def settings_of(model: nn.Module, *, ours_only: bool = False) -> dict[str, dict[str, Any]]:
    """The class of every module, or of ours, by name, with its attributes that JSON can hold."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if ours_only and not (name and kind.__module__.startswith("ecoformer.")):
            continue
        known = {key: x for key, x in vars(module).items() if key[:1] != "_" and key not in _IGNORED}
        found[name] = known | {"class": kind.__qualname__}
        if "Drop" in kind.__name__:  # changes training only, and many models do not remember theirs
            found[name] = {"class": "Identity"}
    # Functions are known by their names; what else JSON cannot hold does not count.
    text = json.dumps(found, default=lambda value: getattr(value, "__name__", None), skipkeys=True)
    settings: dict[str, dict[str, Any]] = json.loads(text)
    return settings


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference between the settings of two models, or between what else is known by name.

    Attributes that only one of them has are ignored: versions of a library may add some.
    """
    for name in {**ours, **theirs}:
        where, mine, yours = name or "the model", ours.get(name), theirs.get(name)
        if mine is None or yours is None:
            return f"{where} is there only once"
        for key in mine:
            if key in yours and mine[key] != yours[key]:
                return f"{where}: {key} is {mine[key]!r} against {yours[key]!r}"
    return None
