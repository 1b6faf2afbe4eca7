"""Rules: how to read another library's attention class, and how its model calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.attention import Attention
from ecoformer.attention.weights import Projections

AnyCall = Callable[..., Any]

DECODER = (
    "decoders are not supported, because they cache the keys and values of earlier tokens; a model of your "
    "own can use a mechanism with is_causal=True"
)


@dataclass(eq=False)
class ImageGrid:
    """How tokens lie in an image: `prefix` tokens, then the grid row by row.

    Attributes:
        prefix: how many tokens stand before the image, such as class token and registers.
        grid: (height, width). May be omitted if `patches` is known.
        patches: the convolution that cuts images into patches. The grid is that of its last output, so images
            may have any size.
    """

    prefix: int
    grid: tuple[int, int] | None = None
    patches: nn.Module | None = None

    def follow(self) -> None:
        """From now on, the grid is that of the last image."""
        if self.patches is not None and self not in self.patches._forward_hooks.values():
            self.patches.register_forward_hook(self)

    def __call__(self, patches: nn.Module, args: Any, out: Tensor) -> None:
        """The forward hook of `patches`."""
        self.grid = (out.shape[-2], out.shape[-1])


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
        image: says how the model's tokens lie in an image, where `call` is not given the grid.
        bind: reads from the layer what `call` needs, as keyword arguments: plain values only.
        guard: names a linear layer in it, for libraries that load weights without `strict`; see `Replaced`.
    """

    projections: Callable[[nn.Module], Projections]
    call: AnyCall
    drops: tuple[str, ...] = ()
    refuse: Callable[[nn.Module], str | None] | None = None
    passes_grid: bool = False
    image: Callable[[nn.Module], ImageGrid | None] | None = None
    bind: Callable[[Any], dict[str, Any]] | None = None
    guard: Callable[[Any], str] | None = None


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


class Replaced(nn.Module):
    """Stands where a linear layer was; its `weight` is the mechanism's name, as bytes.

    transformers loads state dicts without `strict`, but neither it nor PyTorch accepts a weight of another
    shape. So weights of a converted model cannot end up in an unconverted one, nor the other way round.
    """

    weight: Tensor

    def __init__(self, mechanism: str, device: torch.device) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.register_buffer("weight", torch.tensor([*mechanism.encode()], dtype=torch.uint8, device=device))

    def problem(self, weight: Tensor) -> str | None:
        """Why a `weight` that was loaded is that of another layer."""
        is_name = weight.dtype == torch.uint8 and weight.ndim == 1
        given = bytes(weight.tolist()).decode(errors="replace") if is_name else None
        was = "not converted" if given is None else f"converted to {given}"
        problem = f"converted to {self.mechanism}, but the weights are {was}"
        return None if given == self.mechanism else problem

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, unexpected, errors = args
        given, problem = state_dict.get(f"{prefix}weight"), None
        if isinstance(given, Tensor) and not given.is_meta:
            problem = self.problem(given)
        elif given is None and unexpected:
            # A Trainer loads files in which transformers has renamed the weights, and only warns.
            problem = f"missing, but there is {unexpected[0]}: load a folder with ecoformer.load"
        if problem is None:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            errors.append(f"{prefix[:-1]} is {problem}")


class Adapter(nn.Module):
    """A mechanism in place of a model's own attention, with the same arguments and results."""

    def __init__(
        self,
        attention: Attention,
        rule: Rule,
        image: ImageGrid | None = None,
        bound: dict[str, Any] | None = None,
        guard: str | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.guard = attention, guard
        if guard is not None:
            self.add_module(guard, Replaced(attention.name, next(attention.parameters()).device))
        self.rule, self.image, self.bound = rule, image, bound or {}
        # nn.TransformerEncoderLayer asks for this before it takes its fast path past the layer.
        self.batch_first = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called like the layer that was replaced."""
        attend: AnyCall = self.attention
        if self.image is not None:
            attend = partial(attend, grid=self.image.grid, prefix=self.image.prefix)
        return self.rule.call(attend, *args, **kwargs, **self.bound)
