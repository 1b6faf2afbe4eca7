"""`ecoformer quantize`: writes a model that computes in int8."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ecoformer.checkpoints import save
from ecoformer.cli import common
from ecoformer.cli.samples import Samples, check_target
from ecoformer.cli.sources import open_model
from ecoformer.quantization import quantize as quantize_model


def quantize(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=common.MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Calibration data: a folder of images, or a text file with one text per line."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Images or texts to calibrate on.", min=1)] = 128,
    max_error: Annotated[
        float, typer.Option(help="Layers with a larger error stay in floating point.", min=0)
    ] = 0.1,
    batch: Annotated[int, typer.Option(help="Images or texts in a batch.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Seed for the order of the data.")] = 0,
    pretrained: common.Pretrained = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Convert a trained model to int8 and write it to a file that `ecoformer.load` reads.

    Linear layers, convolutions and `sharp_eco` attention run in int8. `ecoformer export` turns the file into
    ONNX.

    Example: `ecoformer quantize sharp_b0.safetensors int8_b0.safetensors --data photos/`
    """
    check_target(target, force)
    if data is None:
        raise ValueError(
            "quantize needs calibration data: pass --data, a folder of images or a text file with one text "
            "per line"
        )
    if not data.exists():
        raise FileNotFoundError(f"--data: no such folder or file: {data}")
    with common.progress(as_json) as progress:
        progress(f"opening {source}")
        opened = open_model(source, pretrained=pretrained, needs_weights=True)
    model = opened.model
    batches = list(islice(Samples(opened, data, batch, seed), -(-samples // batch)))
    report = quantize_model(model, batches, samples=samples, max_error=max_error, progress=not as_json)
    written = save(model, target)
    facts = {"source": opened.what} | report.to_dict() | {"written": str(written)}
    notes = [f"note: {note}" for note in opened.notes]
    common.show(facts, "\n".join([*notes, str(report), f"wrote {written}"]), as_json)
