"""What PVTv2 and Twins share: the constructor, timm's pretrained weights, and registration with timm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from ecoformer.attention.weights import Projections, carry_over
from ecoformer.checkpoints.hub import HubMixin
from ecoformer.conversion import Adapter, convert
from ecoformer.conversion.convert import RECORD
from ecoformer.conversion.layers import Selection


class WithMechanism(HubMixin):
    """Mixin for a timm class: the model is converted as it is built.

    Args:
        attention: one of `ecoformer.list_attentions()`; "softmax" is the paper's MSA baseline.
        attention_config: the mechanism's arguments, such as {"bits": 16, "local": (3, 3)}.
        attention_layers: as `layers` of `ecoformer.convert`; by default all but the last stage.
        img_size: largest input, needed by mechanisms that are sized by the number of tokens (linformer);
            others take any resolution.
        kwargs: those of timm's class.
    """

    takes_img_size = False
    """Whether timm's class takes the size of its images."""

    def __init__(
        self,
        attention: str = "eco",
        attention_config: dict[str, Any] | None = None,
        attention_layers: Selection = None,
        img_size: int | tuple[int, int] = 224,
        **kwargs: Any,
    ) -> None:
        super().__init__(**({"img_size": img_size} if self.takes_img_size else {}), **kwargs)
        model = cast(nn.Module, self)
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        example = torch.zeros(1, kwargs.get("in_chans", 3), height, width)
        convert(model, attention, layers=attention_layers, example=example, **(attention_config or {}))
        # The constructor's arguments describe the conversion, so no record is needed.
        delattr(model, RECORD)


def carry_pretrained(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state dict of timm's original model with our names; what only the mechanism has is as in `model`.

    timm calls this for `pretrained=True`. Hash functions stay as they are.
    """
    state = dict(state_dict)
    for name, layer in model.named_modules():
        if not isinstance(layer, Adapter) or f"{name}.proj.weight" not in state:
            continue
        held = {key: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        attention = layer.attention
        source = _projections(attention.num_heads, {k[len(name) + 1 :]: v for k, v in held.items()})
        with torch.no_grad():
            carry_over(source, attention)
            if attention.projects_to_codes:  # by hyperplanes on these queries and keys
                settings = {key: value for key, value in attention._settings.items() if key != "out_proj"}
                drawn = type(attention).from_projections(source, **settings)
                attention.qk.load_state_dict(drawn.qk.state_dict())
        state |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
    return state


def _projections(num_heads: int, held: dict[str, Tensor]) -> Projections:
    for kind in ("weight", "bias"):
        if f"q.{kind}" in held:
            held[f"qkv.{kind}"] = torch.cat([held[f"q.{kind}"], held[f"kv.{kind}"]])
    q, k, v = held["qkv.weight"].chunk(3)
    q_bias, k_bias, v_bias = held["qkv.bias"].chunk(3) if "qkv.bias" in held else (None, None, None)
    biases = (q_bias, k_bias, v_bias, held.get("proj.bias"))
    return Projections(num_heads, q, k, v, held["proj.weight"], *biases)


def default_cfgs_of(original: ModuleType, variants: dict[str, Any]) -> Any:
    """timm's settings of the original variants, with their weights, for ours."""
    settings = {variant: original.default_cfgs[variant].default.to_dict() for variant in variants}
    return generate_default_cfgs(
        {f"ecoformer_{v}.in1k": cfg | {"hf_hub_id": f"timm/{v}.in1k"} for v, cfg in settings.items()}
    )


def register_variants(
    module: str,
    model_class: type[nn.Module],
    variants: dict[str, dict[str, Any]],
    filter_fn: Callable[..., dict[str, Tensor]],
    feature_cfg: dict[str, Any],
) -> None:
    """Register `ecoformer_<variant>` with timm for every variant, as functions of `module`."""
    for variant in variants:

        def create(pretrained: bool = False, variant: str = variant, **kwargs: Any) -> nn.Module:
            indices = kwargs.pop("out_indices", feature_cfg["out_indices"])
            model: nn.Module = build_model_with_cfg(
                model_class,
                f"ecoformer_{variant}",
                pretrained,
                pretrained_filter_fn=filter_fn,
                feature_cfg=feature_cfg | {"out_indices": indices},
                **variants[variant] | kwargs,
            )
            return model

        create.__name__ = create.__qualname__ = f"ecoformer_{variant}"
        create.__module__ = module
        create.__doc__ = f"timm's `{variant}` with another mechanism; see `{model_class.__name__}`."
        setattr(sys.modules[module], create.__name__, register_model(create))
