"""Rules: how to read another library's attention class, and how its model calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ecoformer.attention import Attention
from ecoformer.attention.weights import Projections

AnyCall = Callable[..., Any]


class ImageGrid(NamedTuple):
    """How tokens lie in an image: `prefix` tokens, then the grid row by row."""

    grid: tuple[int, int]
    prefix: int


@dataclass(frozen=True)
class Rule:
    """How one attention class is converted.

    Attributes:
        projections: reads a layer: `lambda layer: Projections.of_linears(layer.heads, layer.q, ...)`.
        call: replaces the layer's `forward`. Its first argument is the mechanism, called as
            `attention(x, key_padding_mask=..., is_causal=..., grid=...)`; the others are the layer's own.
        drops: names of submodules and parameters that may be left behind. A layer with any other parameter
            that `projections` does not read is refused, so that nothing is lost silently.
        refuse: returns why a layer of this class cannot be converted, or None.
        passes_grid: whether `call` passes `grid` to the mechanism, so that `local=(3, 3)` is possible.
        image: reads the grid from the model, if it is fixed and layers do not get it.
        bind: reads from the layer what `call` needs, as keyword arguments: plain values only.
    """

    projections: Callable[[nn.Module], Projections]
    call: AnyCall
    drops: tuple[str, ...] = ()
    refuse: Callable[[nn.Module], str | None] | None = None
    passes_grid: bool = False
    image: Callable[[nn.Module], ImageGrid | None] | None = None
    bind: Callable[[Any], dict[str, Any]] | None = None


_RULES: dict[str, Rule] = {}


def register_conversion(layer_class: type[nn.Module] | str, **rule: Any) -> None:
    """Add an attention class to those that `convert` supports, or replace its rule.

    Args:
        layer_class: the class, or its dotted name. Subclasses need their own rules: they may compute
            something else.
        rule: the attributes of `Rule`; `projections` and `call` are required.

    >>> register_conversion(
    ...     MyAttention,
    ...     projections=lambda layer: Projections.of_fused(layer.heads, layer.to_qkv, layer.to_out),
    ...     call=lambda attention, x, mask=None: attention(x, key_padding_mask=mask),
    ... )
    """
    name = layer_class if isinstance(layer_class, str) else _dotted_name(layer_class)
    if isinstance(rule.get("drops"), str):
        rule["drops"] = (rule["drops"],)
    _RULES[name] = Rule(**rule)


def _dotted_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of exactly the layer's class."""
    return _RULES.get(_dotted_name(type(layer)))


def known_modules() -> set[str]:
    """Python modules whose classes have rules."""
    return {name.rpartition(".")[0] for name in _RULES}


class Adapter(nn.Module):
    """A mechanism in place of a model's own attention, with the same arguments and results."""

    def __init__(
        self,
        attention: Attention,
        rule: Rule,
        image: ImageGrid | None = None,
        bound: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.rule, self.image, self.bound = rule, image, bound or {}
        # nn.TransformerEncoderLayer asks for this before it takes its fast path past the layer.
        self.batch_first = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called like the layer that was replaced."""
        attend: AnyCall = self.attention
        if self.image is not None:
            attend = partial(attend, grid=self.image.grid, prefix=self.image.prefix)
        return self.rule.call(attend, *args, **kwargs, **self.bound)
