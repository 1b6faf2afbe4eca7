"""`ecoformer plan`: what a conversion would gain, layer by layer, against the model as it is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ecoformer.accounting import plan as plan_of
from ecoformer.cli import common
from ecoformer.cli.sources import inputs_of, open_model


def plan(
    model: common.Model,
    attention: common.Attention = common.BEST,
    layers: common.Layers = None,
    settings: common.Settings = None,
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    batch: Annotated[int, typer.Option(help="Images or texts of a batch.", min=1)] = 1,
    energy: common.Energy = "fp32-45nm",
    measure: Annotated[bool, typer.Option(help="Run both models here and time their layers.")] = True,
    as_json: common.AsJson = False,
) -> None:
    """Energy and time of each attention layer, as it is and converted, and whether that pays off.

    Example: `ecoformer plan pvt_v2_b0 --resolution 512`
    """
    common.exclude(("--resolution", resolution), ("--tokens", tokens))
    config = common.parse_settings(settings or [])
    common.check_settings([attention], config)
    with common.progress(as_json) as progress:
        progress(f"opening {model}")
        opened = open_model(model, resolution=resolution, tokens=tokens).model
        inputs = inputs_of(opened, resolution, tokens)
        progress("measuring both models")
        how: dict[str, Any] = {"layers": layers or None, "energy": energy, "measure": measure}
        found = plan_of(opened, attention, inputs(batch), **how, **config)
    common.show(found.to_dict(), found, as_json)
