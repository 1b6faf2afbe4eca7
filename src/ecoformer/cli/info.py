"""`ecoformer info`: installed versions, which kernels run, and the attention layers of a model."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ecoformer import __version__
from ecoformer.arguments import one_line
from ecoformer.attention import list_attentions
from ecoformer.cli.common import MODEL_HELP, AsJson, print_json, print_table, say
from ecoformer.cli.sources import open_model
from ecoformer.conversion.layers import Found, find_layers
from ecoformer.ops.hash_attention import KERNELS, hash_attention, use_kernels
from ecoformer.quantization import IntegerAttention, integer_layers

CHECKS = (((2, 5, 196, 64), 16, False), ((1, 1, 3136, 32), 16, False), ((2, 2, 700, 96), 8, True))
"""Shape, bits and causal order of the calls that `--check` makes."""
BOUNDS = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest relative errors."""
PACKAGES = ("torch", "timm", "torchvision", "transformers", "safetensors", "accelerate", "triton")


def info(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the kernels with plain PyTorch on this machine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Versions and kernels, or the attention layers of MODEL.

    Example: `ecoformer info ecoformer_pvt_v2_b0`
    """
    if check:
        if model is not None:
            raise ValueError("--check tests this machine: leave the model out")
        _check(as_json)
    elif model is None:
        facts = {"versions": versions(), "kernels": kernels(), "mechanisms": list_attentions()}
        print_json(facts) if as_json else _show_machine(facts)
    else:
        source = open_model(model)
        facts = {"model": source.what} | describe(source.model)
        print_json(facts) if as_json else _show_model(facts)


def _check(as_json: bool) -> None:
    """Compare the kernels with eager in fp64; the exit status is 1 if some are wrong."""
    rows = []
    for name in KERNELS[1:]:
        device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
        if why_not(name, device) is not None:
            continue
        for shape, bits, is_causal in CHECKS:
            for dtype in BOUNDS if device.type == "cuda" else (torch.float32, torch.bfloat16):
                about = {"kernels": name, "shape": list(shape), "bits": bits, "causal": is_causal}
                try:
                    error = kernel_error(name, device, shape, bits, is_causal, dtype)
                    result = "right" if error <= BOUNDS[dtype] else "wrong"
                except Exception as problem:
                    error, result = None, f"failed: {one_line(problem, 200)}"
                facts = {"dtype": str(dtype).removeprefix("torch."), "error": error, "result": result}
                rows.append(about | facts)
    if as_json:
        print_json(rows)
    elif not rows:
        typer.echo("no kernels can run here (`ecoformer info` says why); eager needs no check")
    else:
        print_table(list(rows[0]), ({**row, "error": f"{row['error'] or 0:.0e}"} for row in rows), [])
    if any(row["result"] != "right" for row in rows):
        raise typer.Exit(1)


def kernel_error(
    name: str, device: torch.device, shape: Sequence[int], bits: int, is_causal: bool, dtype: torch.dtype
) -> float:
    """The largest relative error of output and gradients against eager in fp64."""
    torch.manual_seed(0)
    codes = (*shape[:3], bits)
    given = [torch.randn(*size, device=device).to(dtype) for size in (codes, codes, shape)]
    weight = torch.randn(*shape, device=device)

    def results(kernels: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        with use_kernels(kernels):
            out = hash_attention(*leaves, is_causal=is_causal)
            return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(dtype))]

    pairs = zip(results(name, dtype), results("eager", torch.float64), strict=True)
    return max(float((ours.double() - truth).norm() / truth.norm()) for ours, truth in pairs)


def versions() -> dict[str, str]:
    """Versions of ecoformer and of the packages it works with."""
    found = {"ecoformer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def kernels() -> dict[str, str]:
    """Which kernels of hashed attention run here, and why not the others."""
    found = {"eager": f"plain PyTorch, everywhere; {torch.get_num_threads()} CPU threads"}
    for name, device in (("cpu", "cpu"), ("triton", "cuda")):
        reason = why_not(name, torch.device(device))
        found[name] = f"run on {device}" if reason is None else f"do not run: {reason}"
    return found


def why_not(name: str, device: torch.device) -> str | None:
    """Why kernels cannot run on a device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    reason: str | None = importlib.import_module(f"ecoformer.ops.{name}").unavailable(device)
    return reason


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
    rows = facts["versions"] | {f"kernels {name}": value for name, value in facts["kernels"].items()}
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
