"""`ecoformer info`: installed versions, available backends, and the attention layers of a model."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Column, Table
from torch import nn

from ecoformer import __version__
from ecoformer.attention import list_attentions
from ecoformer.backends.choice import PREFERRED, VARIABLE, available, default_backend, why_not_on
from ecoformer.benchmarking.attention import check_backends
from ecoformer.benchmarking.results import Row
from ecoformer.cli.common import MODEL_HELP, AsJson, plain_console, print_json
from ecoformer.cli.sources import open_model
from ecoformer.conversion.layers import Found, find_layers

PACKAGES = ("torch", "timm", "torchvision", "transformers", "safetensors", "accelerate", "triton", "numba")


def info(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the fused backends with the reference on this machine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Versions and backends, or the attention layers of MODEL.

    Example: `ecoformer info ecoformer_pvt_v2_b0`
    """
    if check:
        if model is not None:
            raise ValueError("--check tests this machine: leave the model out")
        _check(as_json)
    elif model is None:
        facts = {"versions": versions(), "backends": backends(), "mechanisms": list_attentions()}
        print_json(facts) if as_json else _show_machine(facts)
    else:
        source = open_model(model)
        facts = {"model": source.what} | describe(source.model)
        print_json(facts) if as_json else _show_model(facts)


def _check(as_json: bool) -> None:
    """Compare the backends; the exit status is 1 if one is wrong."""
    rows: list[Row] = []
    for name in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        rows += check_backends(torch.device(name), progress=partial(typer.echo, err=True))
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif not rows:
        typer.echo("no fused backend can run here (`ecoformer info` says why); eager needs no check")
    else:
        table = Table("backend", "shape", "bits, support", "dtype", "compared", "error", "bound", "")
        for row in rows:
            facts, held = row.setting, row.checked
            what = ("gradients" if facts["backward"] else "output") + (", causal" if facts["causal"] else "")
            numbers = ("", "") if held is None else (f"{held.error:.1e}", f"{held.bound:.1e}")
            sizes = ", ".join(map(str, facts["shape"])), f"{facts['bits']}, {facts['support']}"
            table.add_row(row.backend, *sizes, facts["dtype"], what, *numbers, row.failure or "right")
        plain_console().print(table)
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


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
    return {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": [_layer(found) for found in find_layers(model)],
    }


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
    if isinstance(local, nn.Module) and hasattr(local, "size"):
        facts["local"] = local.size
    if found.refusal is not None and not found.ours:
        facts["cannot be converted"] = found.refusal
    return facts


def _show_machine(facts: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in facts["versions"].items():
        table.add_row(name, value)
    for name, value in facts["backends"].items():
        table.add_row(f"backend {name}", value)
    table.add_row("mechanisms", ", ".join(facts["mechanisms"]))
    plain_console().print(table)


def _show_model(facts: dict[str, Any]) -> None:
    console = plain_console()
    console.print(f"{facts['model']}: {facts['class']}, {facts['parameters']:,} parameters", soft_wrap=True)
    # --layers takes these names: do not cut them.
    table = Table(Column("layer", overflow="fold"), "attention", "channels", "heads", "more")
    for layer in facts["layers"]:
        columns = ("name", "attention", "dim", "heads")
        more = ", ".join(f"{key}: {value}" for key, value in layer.items() if key not in columns)
        table.add_row(*(str(layer.get(key, "")) for key in columns), more)
    console.print(table)
