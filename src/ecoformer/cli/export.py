"""`ecoformer export`: writes a model as ONNX, for runtimes without PyTorch."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ecoformer.cli import common
from ecoformer.cli.samples import Samples, check_target
from ecoformer.cli.sources import inputs_of, open_model
from ecoformer.conversion import convert as convert_model
from ecoformer.export import export_onnx


def export(
    model: common.Model,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The ONNX file to write.")],
    attention: Annotated[
        str | None, typer.Option(help="Convert the model first; default: export it as it is.")
    ] = None,
    layers: common.Layers = None,
    settings: common.Settings = None,
    pretrained: common.Pretrained = False,
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Also compare on these: a folder of images, or a text file with one text per line."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Images or texts to compare on.", min=1)] = 64,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Write a model as ONNX, and compare it with PyTorch in ONNX Runtime.

    Batch, image size and text length are dynamic if the model permits it.

    Example: `ecoformer export sharp_b0.safetensors sharp_b0.onnx --data photos/`
    """
    check_target(target, force)
    config = common.parse_settings(settings or [])
    if attention is None and (config or layers):
        raise ValueError("--set and --layers are for --attention: name a mechanism")
    if attention is not None:
        common.check_settings([attention], config)
    if data is not None and not data.exists():
        raise FileNotFoundError(f"--data: no such folder or file: {data}")
    with common.progress(as_json) as progress:
        progress(f"opening {model}")
        opened = open_model(model, pretrained=pretrained, resolution=resolution, tokens=tokens)
        inputs = inputs_of(opened.model, resolution, tokens)
        example = _text_inputs(opened.model, inputs(2))
        notes = list(opened.notes)
        if attention is not None:
            how: Any = {"layers": layers or None, "example": inputs(1), **config}
            notes += convert_model(opened.model, attention, **how).notes
        compare_on: Any = ()
        if data is not None:
            compare_on = islice(Samples(opened, data, batch=1, seed=0), samples)
            if isinstance(example, dict):
                compare_on = ({name: batch[name] for name in example} for batch in compare_on)
        progress(f"exporting {opened.what}, and comparing it in ONNX Runtime: about a minute")
        made = export_onnx(opened.model, target, example, samples=compare_on)
    facts = asdict(made) | {"path": str(made.path), "notes": notes}
    common.show(facts, "\n".join([str(made), *(f"note: {note}" for note in notes)]), as_json)


def _text_inputs(model: Any, example: torch.Tensor) -> Any:
    """What a model of transformers takes with token ids; the second text has padding."""
    if getattr(model, "main_input_name", None) != "input_ids":
        return example
    mask = torch.ones_like(example)
    mask[1, (example.shape[1] + 1) // 2 :] = 0
    found = {"input_ids": example, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        found["token_type_ids"] = torch.zeros_like(example)
    return found
