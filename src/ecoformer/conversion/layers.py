"""Finding the attention layers of a model, and choosing among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ecoformer.attention import Attention
from ecoformer.attention.weights import Projections, projections_of, unread_parameters
from ecoformer.conversion.rules import Adapter, Rule, rule_for

Selection = str | Iterable[str] | Callable[[str, nn.Module], bool] | None

_ATTENTION_NAME = re.compile(r"(Attention|Attn)")
_POSITION_BIAS = re.compile(r"relative_position|rel_pos|relative_attention|attention_biases|bias_table|rpb")


def mechanism_in(layer: nn.Module) -> nn.Module:
    """What attends: the mechanism in an adapter, or the layer itself."""
    return layer.attention if isinstance(layer, Adapter) else layer


@dataclass(frozen=True)
class Found:
    """An attention layer of a model: `source` is what can be carried over, `refusal` why nothing can be."""

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
    def kind(self) -> str:
        """The mechanism's name, or the class of a layer that is not ours."""
        return self.inner.name if isinstance(self.inner, Attention) else type(self.inner).__name__

    @property
    def left_behind(self) -> list[str]:
        """Submodules whose weights no other mechanism has a place for."""
        if self.source is None:
            return []
        names = unread_parameters(self.inner, self.source, ("local",))
        return list(dict.fromkeys(name.split(".")[0] for name in names))

    @property
    def local(self) -> nn.Module | None:
        """The local branch of one of our mechanisms."""
        return self.inner.local if isinstance(self.inner, Attention) else None


def find_layers(model: nn.Module) -> list[Found]:
    """All attention layers of `model`, in its order: convertible ones, refused ones, and those unknown."""
    found: list[Found] = []
    inside: tuple[str, ...] = ()
    crossing = _attending_elsewhere(model)
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        layer = _examine(name, module)
        if module in crossing:
            layer = Found(name, module, refusal="it attends to another sequence")
        if layer is not None:
            found.append(layer)
            if layer.source is not None or layer.rule is not None:
                inside = (f"{name}.",) if name else ("",)
    known = [layer for layer in found if layer.source is not None or layer.rule is not None]
    return [f for f in found if f in known or not _holds(f, found)]


def _attending_elsewhere(model: nn.Module) -> set[nn.Module]:
    """Layers of a class that has a rule, but whose keys come from another sequence."""
    return {m.multihead_attn for m in model.modules() if isinstance(m, nn.TransformerDecoderLayer)}


def _holds(outer: Found, all_found: list[Found]) -> bool:
    """A wrapper whose name merely sounds like attention: what matters is inside."""
    return any(
        f is not outer and f.name.startswith(f"{outer.name}." if outer.name else "") for f in all_found
    )


def _examine(name: str, module: nn.Module) -> Found | None:
    if isinstance(module, Adapter):
        return Found(name, module, module.rule, projections_of(module.attention))
    if isinstance(module, Attention):
        return Found(name, module, source=projections_of(module))
    rule = rule_for(module)
    if rule is not None:
        return _by_rule(name, module, rule)
    if _ATTENTION_NAME.search(type(module).__name__) and any(True for _ in module.parameters()):
        return Found(name, module, refusal=_why_unknown(module))
    return None


def _by_rule(name: str, layer: nn.Module, rule: Rule) -> Found:
    refusal = rule.refuse(layer) if rule.refuse is not None else None
    if refusal is None:
        try:
            source = rule.projections(layer)
            source.check(type(layer).__name__)
        except (ValueError, TypeError) as error:
            refusal = str(error)
        except (AttributeError, LookupError) as error:
            refusal = f"its rule cannot read it ({type(error).__name__}: {error})"
        else:
            more = unread_parameters(layer, source, rule.drops)
            refusal = f"it also holds {', '.join(more)}, which cannot be carried over" if more else None
            refusal = refusal or _other_scale(layer, source) or _hidden_behaviour(layer, rule.drops)
            if refusal is None:
                return Found(name, layer, rule, source)
    return Found(name, layer, rule, refusal=refusal)


def _other_scale(layer: nn.Module, source: Projections) -> str | None:
    """Mechanisms here scale scores by one over the root of a head's channels, as nearly everybody does."""
    usual = (source.dim // source.num_heads) ** -0.5
    for name in ("scale", "scaling"):
        value = getattr(layer, name, usual)
        if isinstance(value, (int, float)) and abs(value - usual) > 1e-6:
            return f"it scales scores by {name}={value:g} instead of {usual:g}"
    return None


def _hidden_behaviour(layer: nn.Module, known: tuple[str, ...]) -> str | None:
    """What a layer does that its parameters do not show, and that a new layer would not do."""
    for name, module in layer.named_modules():
        where = f" of {name}" if name else ""
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return f"hooks{where} would be lost: remove them, and register them again afterwards"
        if "forward" in vars(module):
            return f"forward{where} was replaced on the object, and would be lost"
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            return f"{name} is a {type(module).__name__}, which computes something else than nn.Linear"
    buffers = [name for name, _ in layer.named_buffers() if name.split(".")[0] not in known]
    if buffers:
        return f"it also holds the buffer {buffers[0]}, which cannot be carried over"
    if getattr(layer, "is_causal", False) is True:
        return "it is causal by itself, and the new layer would not know"
    return None


def _why_unknown(layer: nn.Module) -> str:
    names = [name for name, _ in layer.named_parameters()] + [name for name, _ in layer.named_buffers()]
    biases = [name for name in names if _POSITION_BIAS.search(name)]
    if biases:
        return f"it adds a relative position bias ({biases[0]}) to scores, and codes have no scores to add to"
    return "no rule is known for its class: see ecoformer.register_conversion"


def choose(found: list[Found], layers: Selection) -> dict[str, str | None]:
    """Why each layer is left as it is, or None where it is to be converted.

    By default the last stage of a pyramid stays as it is, as in the paper, and so does what is unknown.
    """
    if layers is None:
        return {f.name: _left_by_default(f, found) for f in found}
    if callable(layers):
        return {f.name: None if layers(f.name, f.layer) else "not chosen" for f in found}
    if not isinstance(layers, (str, Iterable)):
        raise TypeError(f"layers must be a pattern, several, or a function, got {type(layers).__name__}")
    patterns = [layers] if isinstance(layers, str) else list(layers)
    patterns = ["*" if pattern == "all" else pattern for pattern in patterns]
    for pattern in patterns:
        if not any(fnmatchcase(f.name, pattern) for f in found):
            raise ValueError(
                f"layers={pattern!r} matches no attention layer; there are {', '.join(_names(found))}"
            )
    return {f.name: None if any(fnmatchcase(f.name, p) for p in patterns) else "not chosen" for f in found}


def _left_by_default(layer: Found, found: list[Found]) -> str | None:
    if layer.source is None:
        return None if layer.rule is not None else layer.refusal
    widths = [f.source.dim for f in found if f.source is not None]
    is_pyramid = widths == sorted(widths) and widths[0] < widths[-1]
    if is_pyramid and layer.source.dim == widths[-1]:
        return f"last stage ({widths[-1]} channels)"
    return None


def _names(found: list[Found]) -> list[str]:
    names = [f.name or "the model itself" for f in found]
    return [*names[:3], f"... ({len(names)} in all)"] if len(names) > 4 else names or ["none"]
