"""Conversions of Hugging Face models survive `save_pretrained` and `from_pretrained`.

`convert` records what it did in the model's config. transformers builds a model from its config and then
loads the weights. A quantisation method may change the model in between, so a conversion is registered as
one: `quant_method="ecoformer"`. Where it is not registered, transformers warns of an unknown method and then
refuses the weights (`rules.Replaced`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ecoformer.conversion.rules import Replaced

METHOD = "ecoformer"
LOAD_WITH = (
    "ecoformer.load(folder); or ecoformer.conversion.register_with_transformers(), then from_pretrained"
)
"""For those who look into config.json after transformers has refused the weights."""


def record_in_config(model: nn.Module, record: dict[str, Any]) -> list[str]:
    """Write a conversion of `model` into the configs of the Hugging Face models in it; returns notes."""
    notes = []
    for prefix, part in _pretrained_models(model):
        layers = {n[len(prefix) :]: s for n, s in record["layers"].items() if n.startswith(prefix)}
        if not layers:
            continue
        before: Any = getattr(part.config, "quantization_config", None) or {}
        before = before if isinstance(before, dict) else before.to_dict()
        if before.get("quant_method", METHOD) != METHOD:
            notes.append(
                f"the config of {type(part).__name__} describes another quantisation: save_pretrained would "
                "lose the conversion, use ecoformer.save"
            )
            continue
        records = [*before.get("conversions", []), {"mechanism": record["mechanism"], "layers": layers}]
        described = {"quant_method": METHOD, "load_with": LOAD_WITH, "conversions": records}
        part.config.quantization_config = described
        try:
            register_with_transformers()
        except (ImportError, AttributeError) as error:  # a version without this extension point
            notes.append(f"from_pretrained cannot load the converted model ({error}): use ecoformer.save")
    return notes


def _pretrained_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost Hugging Face models in `model`, with the prefix of their layers' names."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, library.PreTrainedModel) and not (inside and prefix.startswith(inside)):
            inside = (*inside, prefix)
            yield prefix, module


def register_with_transformers() -> None:
    """Let `from_pretrained` of transformers load converted models.

    `convert`, `load` and, if transformers is imported already, `import ecoformer` call this.
    """
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return

    class ConversionConfig(QuantizationConfigMixin):
        """What `convert` did to a model."""

        def __init__(self, conversions: list[dict[str, Any]], **kwargs: Any) -> None:
            self.quant_method: Any = METHOD
            self.load_with, self.conversions = LOAD_WITH, conversions

    class ConversionLoader(HfQuantizer):
        """Converts a model before transformers loads its weights."""

        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            reconvert(model, self.quantization_config)
            self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
            for name, layer in model.named_modules():
                if isinstance(layer, Replaced) and (problem := layer.problem(layer.weight)):
                    raise ValueError(
                        f"by quantization_config in config.json, {name} is {problem}: do two models share a "
                        "config? Remove it to load weights that are not converted"
                    )
            # transformers does not compare shapes where a quantiser is at work.
            for name, tensor in model.state_dict().items():
                shape = self.shapes[name]
                if tensor.shape != shape:
                    raise ValueError(
                        f"{name} is {tuple(tensor.shape)} in the checkpoint, {tuple(shape)} in the config: "
                        "load it as it was saved and change it afterwards"
                    )
            # Nothing is quantised: the model can be cast and trained like any other.
            model.is_quantized = model.config._is_quantized = False
            del model.hf_quantizer, model.quantization_method

    auto.register_quantization_config(METHOD)(ConversionConfig)
    auto.register_quantizer(METHOD)(ConversionLoader)


def reconvert(model: Any, described: Any) -> None:
    """Convert an original model as a `quantization_config` describes it."""
    from ecoformer.conversion.convert import reapply

    records = described["conversions"] if isinstance(described, dict) else described.conversions
    for record in records:
        layers = {_name_in(model, name): settings for name, settings in record["layers"].items()}
        reapply(model, record["mechanism"], layers)


def _name_in(model: Any, layer: str) -> str:
    """A layer's name in `model`; in a model with a head, names of the base model have a prefix."""
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_modules()}
    return next((n for n in (layer, prefix + layer, layer.removeprefix(prefix)) if n in names), layer)


if "transformers" in sys.modules:
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):  # from_pretrained would fail as well
        register_with_transformers()
