"""Finding the attention layers of a model, and choosing among them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ecoformer.attention import Attention
from ecoformer.attention.weights import Projections, projections_of, unread_parameters
from ecoformer.conversion.rules import DECODER, Adapter, Rule, rule_for

Selection = str | Iterable[str] | Callable[[str, nn.Module], bool] | None

_ATTENTION_NAME = re.compile(r"(Attention|Attn)")
_POSITION_BIAS = re.compile(
    r"relative_(position|coord|attention)|rel_pos|position_bias|attention_biases|bias_table|rpb"
)
_ROTARY = re.compile(r"rope|rotary|freqs_cis|position_embeddings")


def mechanism_in(layer: nn.Module) -> nn.Module:
    """The mechanism inside an adapter, or the layer itself."""
    return layer.attention if isinstance(layer, Adapter) else layer


def kind_of(module: nn.Module) -> str:
    """The mechanism's name, or the class of any other module."""
    return module.name if isinstance(module, Attention) else type(module).__name__


@dataclass(frozen=True)
class Found:
    """An attention layer of a model: `source` is what can be carried over, `refusal` why nothing can."""

    name: str
    layer: nn.Module
    rule: Rule | None = None
    source: Projections | None = None
    refusal: str | None = None

    @property
    def inner(self) -> nn.Module:
        """The layer without the adapter around it."""
        return mechanism_in(self.layer)

    @property
    def ours(self) -> bool:
        """Whether it is one of our mechanisms already."""
        return isinstance(self.layer, (Attention, Adapter))

    @property
    def known(self) -> bool:
        """Whether its class is supported, even if this layer is not."""
        return self.source is not None or self.rule is not None

    @property
    def kind(self) -> str:
        """The mechanism's name, or the class of another library's layer."""
        return kind_of(self.inner)

    @property
    def left_behind(self) -> list[str]:
        """Submodules whose weights another mechanism does not have."""
        if self.source is None:
            return []
        names = unread_parameters(self.inner, self.source, ("local",))
        return list(dict.fromkeys(name.split(".")[0] for name in names))

    @property
    def local(self) -> nn.Module | None:
        """The local branch of one of our mechanisms."""
        return self.inner.local if isinstance(self.inner, Attention) else None


def find_layers(model: nn.Module) -> list[Found]:
    """All attention layers of `model`, in its order: convertible, refused and unknown ones."""
    found: list[Found] = []
    inside = "\0"
    # Their class has a rule, but their keys come from another sequence.
    crossing = {m.multihead_attn for m in model.modules() if isinstance(m, nn.TransformerDecoderLayer)}
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        layer = examine(name, module)
        if module in crossing:
            layer = Found(name, module, refusal="it attends to another sequence")
        if layer is not None:
            found.append(layer)
            if layer.known:
                inside = f"{name}." if name else ""
    # An unknown class that holds other attention layers is a wrapper with "attention" in its name.
    starts = {f.name: f"{f.name}." if f.name else "" for f in found}
    outer = {f.name for f in found for g in found if g is not f and g.name.startswith(starts[f.name])}
    return [f for f in found if f.known or f.name not in outer]


def examine(name: str, module: nn.Module) -> Found | None:
    """What is known of a module, None if it is no attention layer."""
    if isinstance(module, (Adapter, Attention)):
        rule, ours = (module.rule, module.attention) if isinstance(module, Adapter) else (None, module)
        try:
            return Found(name, module, rule, projections_of(ours))
        except (ValueError, TypeError) as error:  # such as integer projections
            return Found(name, module, rule, refusal=str(error))
    rule = rule_for(module)
    if rule is not None:
        source = _read(module, rule)
        if isinstance(source, str):
            return Found(name, module, rule, refusal=source)
        return Found(name, module, rule, source)
    if _ATTENTION_NAME.search(type(module).__name__) and any(True for _ in module.parameters()):
        return Found(name, module, refusal=_why_unknown(module))
    return None


def weights_of(layer: nn.Module) -> Projections | None:
    """A layer's projections, if they can be read, even if it cannot be converted."""
    rule = rule_for(layer)
    try:
        if isinstance(layer, (Adapter, Attention)):
            return projections_of(mechanism_in(layer))
        source = None if rule is None else rule.projections(layer)
        if source is not None:
            source.check(type(layer).__name__)
    except (ValueError, TypeError, AttributeError, LookupError):
        return None
    return source


def _read(layer: nn.Module, rule: Rule) -> Projections | str:
    """A layer's projections, or why it cannot be converted."""
    refusal = rule.refuse(layer) if rule.refuse is not None else None
    if refusal is not None:
        return refusal
    try:
        source = rule.projections(layer)
        source.check(type(layer).__name__)
    except (ValueError, TypeError) as error:
        return str(error)
    except (AttributeError, LookupError) as error:
        return f"its rule cannot read it ({type(error).__name__}: {error})"
    more = unread_parameters(layer, source, rule.drops)
    if more:
        return f"it also holds {', '.join(more)}, which cannot be carried over"
    return _hidden_behaviour(layer, source, rule.drops) or source


def _hidden_behaviour(layer: nn.Module, source: Projections, known: tuple[str, ...]) -> str | None:
    """What a layer does besides what its parameters show, and a new layer would not do."""
    usual = (source.dim // source.num_heads) ** -0.5
    for name in ("scale", "scaling"):
        value = getattr(layer, name, usual)
        if isinstance(value, (int, float)) and abs(value - usual) > 1e-6:
            return f"it scales scores by {name}={value:g} instead of {usual:g}"
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            return f"{name} is a {type(module).__name__}, which does not compute what nn.Linear does"
    buffers = [name for name, _ in layer.named_buffers() if name.split(".")[0] not in known]
    if buffers:
        return f"it also holds the buffer {buffers[0]}, which cannot be carried over"
    return DECODER if getattr(layer, "is_causal", False) is True else None


def _why_unknown(layer: nn.Module) -> str:
    if any(getattr(layer, name, False) is True for name in ("is_causal", "is_decoder")):
        return DECODER
    names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    biases = [name for name in names if _POSITION_BIAS.search(name)]
    if biases:
        return f"it adds a relative position bias ({biases[0]}) to scores, which codes do not have"
    rotary = [name for name in inspect.signature(layer.forward).parameters if _ROTARY.search(name)]
    if rotary:
        return f"it takes rotary position embeddings ({rotary[0]}), which the mechanisms here do not"
    if "Window" in type(layer).__name__:
        return "it attends within windows, which its model cuts out and joins again"
    return "its class has no rule: see ecoformer.register_conversion"


def choose(found: list[Found], layers: Selection) -> dict[str, str | None]:
    """For each layer the reason to skip it, or None to convert it.

    By default the last stage of a pyramid is skipped, as in the paper, and so are unknown classes.
    """
    if layers is None:
        return {f.name: _skipped_by_default(f, found) for f in found}
    if callable(layers):
        return {f.name: None if layers(f.name, f.layer) else "not chosen" for f in found}
    patterns = [layers] if isinstance(layers, str) else list(layers)
    patterns = ["*" if pattern == "all" else pattern for pattern in patterns]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"layers must hold patterns such as 'blocks.1.*', got {pattern!r}")
        if not any(fnmatchcase(f.name, pattern) for f in found):
            names = ", ".join([f.name for f in found[:4]] + ["..."] * (len(found) > 4))
            raise ValueError(f"layers={pattern!r} matches no attention layer; there are {names or 'none'}")
    return {f.name: None if any(fnmatchcase(f.name, p) for p in patterns) else "not chosen" for f in found}


def _skipped_by_default(layer: Found, found: list[Found]) -> str | None:
    if layer.source is None:
        return None if layer.rule is not None else layer.refusal
    widths = [f.source.dim for f in found if f.source is not None]
    is_pyramid = widths == sorted(widths) and widths[0] < widths[-1]
    if is_pyramid and layer.source.dim == widths[-1]:
        return f"last stage ({widths[-1]} channels)"
    return None
