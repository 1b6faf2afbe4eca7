"""`ecoformer convert`: converts a softmax model and writes it to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ecoformer.arguments import one_line
from ecoformer.checkpoints import save
from ecoformer.cli import common
from ecoformer.cli.sources import Source, longest_text, open_model
from ecoformer.conversion import convert as convert_model
from ecoformer.data.files import IMAGE_ENDINGS, find_files, read_image
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.hashing.base import NOT_FITTED


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=common.MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    attention: Annotated[str, typer.Option(help="The mechanism; `ecoformer info` lists them.")] = "eco",
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of layer names, such as `stages.1.*`, or `all`; repeatable."),
    ] = None,
    settings: common.Settings = None,
    fit: Annotated[
        Path | None,
        typer.Option(help="Fit the hash functions on a folder of images, or a file with one text per line."),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many images or texts to fit on.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the fitting.")] = 0,
    architecture: Annotated[
        str | None, typer.Option("--model", help="The timm model of a weights file.")
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Load the trained weights of a model given by its name.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Replace the attention of a model and write it to a file that `ecoformer.load` reads.

    Example: `ecoformer convert pvt_v2_b0 eco_b0.safetensors --attention eco --fit photos/`
    """
    _check_target(target, force)
    config = _config(settings or [])
    if fit is not None and not fit.exists():
        raise FileNotFoundError(f"--fit: no such folder or file: {fit}")
    opened = open_model(source, architecture=architecture, pretrained=pretrained, needs_weights=True)
    report = convert_model(opened.model, attention, layers=layers or None, **config)
    notes = [note for note in report.notes if note != NOT_FITTED]
    if fit is None and len(notes) < len(report.notes):
        notes.append("hash functions are not fitted: --fit takes a folder of images or a file of texts")
    report = replace(report, notes=(*notes, *opened.notes))
    fitted: list[str] = []
    if fit is not None:
        if not hashers_of(opened.model):
            raise ValueError(f"--fit: {attention} has no hash functions to fit")
        batch, samples = _sample_batch(opened, fit, samples)
        names = fit_hashers(opened.model, [batch], samples=samples, seed=seed, progress=not as_json)
        fitted = [name for name in names if hashers_of(opened.model)[name].learns]
    written = save(opened.model, target)
    facts = report.to_dict() | {"source": opened.what, "fitted": fitted, "written": str(written)}
    if as_json:
        common.print_json(facts)
        return
    typer.echo(report)
    if fitted:
        typer.echo(f"fitted {len(fitted)} hashers on {samples} samples of {fit}")
    typer.echo(f"wrote {written}")


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise IsADirectoryError(f"OUT must be a file, but {target} is a folder")
    if target.exists() and not force:
        raise FileExistsError(f"OUT: {target} exists; choose another name or pass --force")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"OUT: no such folder: {target.parent}")


def _config(settings: list[str]) -> dict[str, Any]:
    config = common.parse_settings(settings)
    options = {"mechanism": "--attention", "layers": "--layers", "model": "IN", "example": "IN"}
    for key in config.keys() & options.keys():
        raise ValueError(f"--set {key} is not an argument of the mechanism: use {options[key]}")
    return config


def _sample_batch(source: Source, path: Path, samples: int) -> tuple[Any, int]:
    """The first samples as the model's input, and how many there are."""
    if path.is_dir():
        images = _images(source, path, samples)
        return images, len(images)
    if source.tokenizer is None:
        remedy = "pass a folder of images"
        if not hasattr(source.model, "pretrained_cfg"):
            remedy = (
                "convert a transformers folder that includes the tokeniser (tokenizer.save_pretrained), or "
                "fit in Python with ecoformer.fit_hashers"
            )
        raise ValueError(f"--fit {path}: {source.what} has no tokeniser for texts: {remedy}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--fit {path} is not UTF-8 text: {error}") from error
    texts = [line for line in lines if line.strip()][:samples]
    if not texts:
        raise ValueError(f"--fit {path} is empty")
    most = min(512, longest_text(source.model))
    batch = source.tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
    return dict(batch), len(texts)


def _images(source: Source, folder: Path, samples: int) -> Any:
    files = find_files(folder, IMAGE_ENDINGS, deep=True)[:samples]
    if not files:
        raise ValueError(f"--fit {folder} has no images ({', '.join(IMAGE_ENDINGS)})")
    transform: Any = source.images
    if hasattr(source.model, "pretrained_cfg"):
        from timm import data

        timm_data: Any = data
        settings = timm_data.resolve_model_data_config(source.model)
        transform = timm_data.create_transform(**settings, is_training=False)
    if transform is None:
        raise ValueError(
            f"--fit {folder}: {source.what} does not say how it prepares images (preprocessor_config.json)"
        )
    images = []
    for file in files:
        try:
            images.append(transform(read_image(file)))
        except (OSError, ValueError) as error:
            raise ValueError(f"--fit: {file} cannot be read as an image: {one_line(error)}") from error
    return torch.stack(images)
