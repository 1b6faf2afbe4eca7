"""Rules: how to read an attention class that is not ours, and how its model calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ecoformer.attention import Attention
from ecoformer.attention.weights import Projections

Call = Callable[..., Any]


class Image(NamedTuple):
    """How tokens lie in an image: `prefix` tokens, then the grid row by row."""

    grid: tuple[int, int]
    prefix: int


@dataclass(frozen=True)
class Rule:
    """How one attention class is converted; see `register_conversion`."""

    projections: Callable[[nn.Module], Projections]
    call: Call
    drops: tuple[str, ...] = ()
    refuse: Callable[[nn.Module], str | None] | None = None
    passes_grid: bool = False
    image: Callable[[nn.Module], Image | None] | None = None
    bind: Callable[[Any], dict[str, Any]] | None = None


_RULES: dict[str, Rule] = {}


def dotted_name(cls: type) -> str:
    """The name under which a class has its rule."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_conversion(
    layer_class: type[nn.Module] | str,
    *,
    projections: Callable[[nn.Module], Projections],
    call: Call,
    drops: tuple[str, ...] = (),
    refuse: Callable[[nn.Module], str | None] | None = None,
    passes_grid: bool = False,
    image: Callable[[nn.Module], Image | None] | None = None,
    bind: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """Teach `convert` an attention class. A later rule for the same class takes the place of an earlier.

    Args:
        layer_class: the class, or its dotted name. Subclasses need rules of their own: they may compute
            something else.
        projections: reads a layer: `lambda layer: Projections.of_linears(layer.heads, layer.q, ...)`.
        call: stands in for the layer's `forward`. Its first argument is the mechanism, to be called as
            `attention(x, key_padding_mask=..., is_causal=..., grid=...)`; the others are the layer's own.
        drops: names of submodules and parameters that are left behind knowingly. A layer that holds anything
            else that `projections` did not read is refused, so that nothing is lost in silence.
        refuse: says why a layer of this class cannot be converted, or None.
        passes_grid: whether `call` gives the mechanism its `grid`, so that `local=(3, 3)` is possible.
        image: reads the grid from the model where it is fixed and layers are not told.
        bind: reads from the layer what `call` must know of it, as keyword arguments: plain values only.

    >>> register_conversion(
    ...     MyAttention,
    ...     projections=lambda layer: Projections.of_fused(layer.heads, layer.to_qkv, layer.to_out),
    ...     call=lambda attention, x, mask=None: attention(x, key_padding_mask=mask),
    ... )
    """
    name = layer_class if isinstance(layer_class, str) else dotted_name(layer_class)
    drops = (drops,) if isinstance(drops, str) else tuple(drops)
    _RULES[name] = Rule(projections, call, drops, refuse, passes_grid, image, bind)


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of the layer's very class."""
    return _RULES.get(dotted_name(type(layer)))


def known_modules() -> set[str]:
    """Python modules whose classes have rules."""
    return {name.rpartition(".")[0] for name in _RULES}


class Adapter(nn.Module):
    """A mechanism in the place of a model's own attention: called as that was, returning what that did."""

    def __init__(
        self,
        attention: Attention,
        rule: Rule,
        image: Image | None = None,
        bound: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.rule, self.image, self.bound = rule, image, bound or {}
        # nn.TransformerEncoderLayer asks before it takes a short cut past the layer.
        self.batch_first = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer that was replaced."""
        attend: Callable[..., Any] = self.attention
        if self.image is not None:
            attend = partial(attend, grid=self.image.grid, prefix=self.image.prefix)
        return self.rule.call(attend, *args, **kwargs, **self.bound)
