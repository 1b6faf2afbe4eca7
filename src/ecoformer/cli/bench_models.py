"""The models of `ecoformer bench`, and what they are fed with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.benchmarking.models import Load
from ecoformer.cli.bench_options import exclude
from ecoformer.cli.sources import open_model
from ecoformer.running import NOT_TAKEN, eval_mode, run_on_meta


def base_model(name: str, resolution: int | None, tokens: int | None, **how: Any) -> tuple[nn.Module, Load]:
    """A model as it is before conversion, and its load; `how` is that of `Load`."""
    if name == "lra_text":
        exclude("--resolution", resolution, "for a text model")
        return _text_model(tokens or 4096, **how)
    exclude("--tokens", tokens, "for a model of images")
    resolution = resolution or 224
    try:
        model = open_model(name, image_size=resolution).model
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs {error.name}: pip install 'ecoformer[vision]', or take lra_text"
        ) from error
    channels = getattr(model, "in_chans", 3)

    def images(count: int) -> Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randn(count, channels, resolution, resolution, generator=generator)

    try:
        with torch.no_grad(), eval_mode(model):
            run_on_meta(model, images(1))
    except NOT_TAKEN as error:
        size = f"{resolution} x {resolution} pixels (--resolution)"
        raise ValueError(f"{name} cannot take images of {size}: {one_line(error, 200)}") from error
    return model, Load(images, "images", {"model": name, "resolution": resolution} | _words(how), **how)


def _text_model(tokens: int, **how: Any) -> tuple[nn.Module, Load]:
    from ecoformer.models.text import lra_text

    if how.get("channels_last"):
        raise ValueError("--channels-last is for images: lra_text has none")

    def texts(count: int) -> Tensor:
        return torch.randint(1, 257, (count, tokens), generator=torch.Generator().manual_seed(count))

    about = {"model": "lra_text", "tokens": tokens} | _words(how)
    model = lra_text(attention="softmax", length=tokens)
    return model.eval(), Load(texts, "tokens", about, per_sample=tokens, **how)


def _words(how: dict[str, Any]) -> dict[str, Any]:
    """What the rows say of how the models run."""
    flags = {"train": "train", "channels_last": "channels last", "graphs": "graphs"}
    words: dict[str, Any] = {flags[key]: True for key in flags if how.get(key)}
    if how.get("amp") is not None:
        words["autocast"] = str(how["amp"]).removeprefix("torch.")
    return words
