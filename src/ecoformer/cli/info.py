"""`ecoformer info`: installed versions, available backends, and the attention layers of a model."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ecoformer import __version__
from ecoformer.attention import list_attentions
from ecoformer.backends.choice import PREFERRED, VARIABLE, available, default_backend, why_not_on
from ecoformer.cli.common import MODEL_HELP, AsJson, print_json, print_table, say
from ecoformer.cli.sources import open_model
from ecoformer.conversion.layers import Found, find_layers
from ecoformer.quantization import IntegerAttention, integer_layers

PACKAGES = ("torch", "timm", "torchvision", "transformers", "safetensors", "accelerate", "triton", "numba")


def info(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Versions and backends, or the attention layers of MODEL.

    Example: `ecoformer info ecoformer_pvt_v2_b0`
    """
    if model is None:
        facts = {"versions": versions(), "backends": backends(), "mechanisms": list_attentions()}
        print_json(facts) if as_json else _show_machine(facts)
    else:
        source = open_model(model)
        facts = {"model": source.what} | describe(source.model)
        print_json(facts) if as_json else _show_model(facts)


def versions() -> dict[str, str]:
    """Versions of ecoformer and of the packages it works with."""
    found = {"ecoformer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def backends() -> dict[str, str]:
    """What each backend needs to run here, and which one is chosen for each device."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found = {"eager": f"PyTorch operators, CPU with {torch.get_num_threads()} threads; GPU: {gpu}"}
    asked = default_backend()
    for device, names in PREFERRED.items():
        here = device != "cuda" or torch.cuda.is_available()
        for name in names:
            reason = why_not_on(name, device) if here else gpu
            found[name] = f"can run on {device}" if reason is None else f"cannot run: {reason}"
        if here:
            first = asked if asked in available(device) else "eager" if asked else available(device)[0]
            found[f"for {device}"] = f"{first} ({VARIABLE}={asked})" if asked else str(first)
    return found


def describe(model: nn.Module) -> dict[str, Any]:
    """The size of a model and its attention layers, one dictionary each."""
    integers = integer_layers(model)
    weights = sum(x.numel() for x in model.buffers() if x.dtype == torch.int8) if integers else 0
    facts = {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()) + weights,
        "layers": [_layer(found) for found in find_layers(model)],
    }
    return facts | ({"int8 layers": len(integers), "int8 weights": weights} if integers else {})


def _layer(found: Found) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": found.name, "attention": found.kind}
    sized = found.inner if found.source is None else found.source
    if found.ours or found.source is not None:
        facts |= {"dim": sized.dim, "heads": sized.num_heads}
    hasher, local, groups = (getattr(found.inner, name, None) for name in ("hasher", "local", "groups"))
    if hasher is not None:
        facts |= {"bits": hasher.bits, "fitted": bool(hasher.fitted)}
    if groups is not None:
        facts["groups"] = groups
    if isinstance(found.inner, IntegerAttention):
        facts["attention"] = f"{found.inner.name}, int8"
    if isinstance(local, nn.Module) and hasattr(local, "size"):
        facts["local"] = local.size
    if found.refusal is not None and not found.ours:
        facts["cannot be converted"] = found.refusal
    return facts


def _show_machine(facts: dict[str, Any]) -> None:
    rows = facts["versions"] | {f"backend {name}": value for name, value in facts["backends"].items()}
    rows["mechanisms"] = ", ".join(facts["mechanisms"])
    print_table(["", " "], ({"": name, " ": value} for name, value in rows.items()), [], show_header=False)


def _show_model(facts: dict[str, Any]) -> None:
    integers = f", {facts['int8 weights']:,} of them int8" if "int8 layers" in facts else ""
    say(f"{facts['model']}: {facts['class']}, {facts['parameters']:,} parameters{integers}\n")
    columns = {"layer": "name", "attention": "attention", "channels": "dim", "heads": "heads"}
    rows = []
    for layer in facts["layers"]:
        more = [f"{layer[key]} {key}" for key in ("bits", "groups") if key in layer]
        more += ["fitted" if layer["fitted"] else "not fitted"] if "fitted" in layer else []
        more += [f"{key}: {layer[key]}" for key in ("local", "cannot be converted") if key in layer]
        rows.append({head: layer.get(key, "") for head, key in columns.items()} | {"more": ", ".join(more)})
    print_table([*columns, "more"], rows, [])
