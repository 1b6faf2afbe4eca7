"""`ecoformer convert`: converts a softmax model and writes it to a file."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ecoformer.checkpoints import save
from ecoformer.cli import common
from ecoformer.cli.samples import Samples, check_target
from ecoformer.cli.sources import open_model
from ecoformer.conversion import convert as convert_model
from ecoformer.conversion import distill, transfer
from ecoformer.conversion.convert import RANDOM_PLANES
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.hashing.base import NOT_FITTED


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=common.MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    attention: common.Attention = common.BEST,
    layers: common.Layers = None,
    settings: common.Settings = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Data to learn from: a folder of images, or a text file with one text per line."),
    ] = None,
    teach: Annotated[
        bool, typer.Option("--teach", help="Train the converted model on --data to match IN.")
    ] = False,
    steps: Annotated[
        int, typer.Option(help="Steps of attention transfer, and as many of distillation.", min=1)
    ] = 600,
    batch: Annotated[int, typer.Option(help="Images or texts in a step.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Images or texts to fit hash functions on.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed for fitting and for the order of the data.")] = 0,
    architecture: Annotated[
        str | None, typer.Option("--model", help="The timm model of a weights file.")
    ] = None,
    pretrained: common.Pretrained = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Replace the attention of a model and write it to a file that `ecoformer.load` reads.

    With --data, hash functions are fitted, if the mechanism has any. With --teach, each layer then learns
    from the original's layer, and the model from the original's outputs. `ecoformer plan` estimates the gain
    beforehand.

    Example: `ecoformer convert pvt_v2_b0 sharp_b0.safetensors --pretrained --data photos/ --teach`
    """
    check_target(target, force)
    config = common.parse_settings(settings or [])
    common.check_settings([attention], config)
    if teach and data is None:
        raise ValueError("--teach needs --data: a folder of images, or a text file with one text per line")
    if data is not None and not data.exists():
        raise FileNotFoundError(f"--data: no such folder or file: {data}")
    with common.progress(as_json) as progress:
        progress(f"opening {source}")
        opened = open_model(source, architecture=architecture, pretrained=pretrained, needs_weights=True)
    batches = None if data is None else Samples(opened, data, batch, seed)
    model, show = opened.model, not as_json
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    narrow = dtypes.pop() if teach and dtypes in ({torch.float16}, {torch.bfloat16}) else None
    if narrow is not None:
        model.float()  # 16 bits are too coarse for small steps

    teacher = copy.deepcopy(model) if teach else None
    report = convert_model(model, attention, layers=layers or None, **config)
    done = (NOT_FITTED if data is not None else None, RANDOM_PLANES if teach else None)
    notes = [note for note in (*report.notes, *opened.notes) if note not in done]
    report = replace(report, notes=tuple(notes))
    facts: dict[str, Any] = report.to_dict() | {"source": opened.what, "fitted": []}
    lines = [str(report)]
    if batches is not None and any(hasher.learns for hasher in hashers_of(model).values()):
        names = fit_hashers(model, batches, samples=samples, seed=seed, progress=show)
        facts["fitted"] = [name for name in names if hashers_of(model)[name].learns]
        count = min(samples, len(batches))
        lines.append(f"fitted {len(facts['fitted'])} hashers on {count} samples of {data}")
    elif batches is not None and not teach:
        raise ValueError(f"--data: {attention} has no hash functions to fit: add --teach")
    if teacher is not None and batches is not None:
        passed = transfer(model, teacher, batches, steps=steps, progress=show)
        learned = distill(model, teacher, batches, steps=steps, progress=show)
        facts |= {"transfer": passed.final, "distillation": [learned.outputs[0], learned.outputs[-1]]}
        lines += [f"transfer: {passed}", f"distillation: {learned}"]
    facts["written"] = str(save(model if narrow is None else model.to(narrow), target))
    common.show(facts, "\n".join([*lines, f"wrote {facts['written']}"]), as_json)
