"""`convert`: gives a model's attention layers another mechanism, in place."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecoformer.attention import Attention, HashedAttention, attention_class
from ecoformer.attention.registry import constructor_error
from ecoformer.attention.weights import Projections, shared_parts
from ecoformer.conversion.huggingface import record_in_config
from ecoformer.conversion.layers import Found, Selection, choose, find_layers, mechanism_in
from ecoformer.conversion.rules import Adapter, ImageGrid, Rule
from ecoformer.hashing.base import NOT_FITTED
from ecoformer.hashing.fitting import move, run
from ecoformer.running import eval_mode

RECORD = "ecoformer_conversions"
"""Attribute of a converted model: what was done to it, so that a checkpoint can do it again."""

RANDOM_PLANES = "codes come from random hyperplanes on queries and keys: transfer and distill, or fine-tune"


@dataclass(frozen=True)
class ReplacedLayer:
    """A layer that has a new mechanism."""

    name: str
    was: str
    dim: int
    num_heads: int
    left_behind: tuple[str, ...]


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that stayed as it was."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True)
class Conversion:
    """What `convert` replaced, what it left and why, and what remains to be done."""

    model: str
    mechanism: str
    config: dict[str, Any]
    replaced: tuple[ReplacedLayer, ...]
    left: tuple[SkippedLayer, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.config.items())
        total = len(self.replaced) + len(self.left)
        to = f"{self.mechanism} ({settings})" if settings else self.mechanism
        lines = [f"{self.model}: {len(self.replaced)} of {total} attention layers converted to {to}"]
        width = max(map(len, [r.name for r in self.replaced] + [s.name for s in self.left]))
        for layer in self.replaced:
            heads = "1 head" if layer.num_heads == 1 else f"{layer.num_heads} heads"
            behind = f"; without {', '.join(layer.left_behind)}" if layer.left_behind else ""
            lines.append(f"  {layer.name:<{width}}  was {layer.was}, {layer.dim} channels, {heads}{behind}")
        if self.left:
            lines.append("not converted")
        lines += [f"  {kept.name:<{width}}  {kept.kind}: {kept.why}" for kept in self.left]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


@torch.inference_mode(mode=False)  # else new parameters could not learn
def convert(
    model: nn.Module, mechanism: str, *, layers: Selection = None, example: Any = None, **config: Any
) -> Conversion:
    """Give attention layers of `model` another mechanism, in place, and report what was done.

    Weights are carried over, from separate or fused q, k and v. A spatial reduction is left behind. Where the
    mechanism shares queries and keys, both get the queries' weights. A layer that has the mechanism already
    keeps its settings, except those in `config`, and its hash functions if their shapes match. Device, dtype
    and mode are kept. Either every chosen layer is converted or, with an error that says why, none.

    Parameters of converted layers are new: build the optimiser, and wrap the model for several processes,
    afterwards.

    Supported are the attention of timm's PVTv2, Twins, ViT and DeiT, of Hugging Face's BERT- and ViT-like
    encoders, `nn.MultiheadAttention` as self-attention, and our own mechanisms. `register_conversion` adds
    others.

    Args:
        model: any module.
        mechanism: one of `list_attentions()`.
        layers: which layers: None for all but the last stage of a pyramid (all, if every layer has the same
            width), "all", a pattern such as "stages.2.*" or several, or a function of name and layer.
        example: an input of the model, for mechanisms that are sized by the number of tokens (linformer).
            Not needed with `seq_len`, nor for timm models, whose input size is known.
        config: the mechanism's arguments. `local=` adds a depth-wise convolution of the values, which hashed
            attention needs in models without convolutions; `seed` increases by one per layer.
    """
    cls = attention_class(mechanism)
    model = unwrapped(model)
    found = find_layers(model)
    why_left = choose(found, layers)
    chosen = [f for f in found if why_left[f.name] is None]
    _check_chosen(model, found, chosen)
    _check_config(chosen, config)
    settings = _settings(model, cls, chosen, example, config)
    left = tuple(SkippedLayer(f.name, f.kind, why) for f in found if (why := why_left[f.name]) is not None)
    replaced, notes = _replace(model, cls, chosen, settings)
    return Conversion(type(model).__name__, mechanism, dict(config), tuple(replaced), left, tuple(notes))


def reapply(model: nn.Module, mechanism: str, layers: dict[str, dict[str, Any]]) -> None:
    """Repeat a recorded conversion: layers by name, each with its settings."""
    found = {f.name: f for f in find_layers(model)}
    missing = [name for name in layers if name not in found]
    if missing or not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer {missing[0] if missing else ''!r}")
    chosen = [found[name] for name in layers]
    _check_chosen(model, list(found.values()), chosen)
    # JSON has no tuples.
    settings = [{k: tuple(x) if isinstance(x, list) else x for k, x in s.items()} for s in layers.values()]
    _replace(model, attention_class(mechanism), chosen, settings)


def unwrapped(model: nn.Module, *, parallel: bool = False) -> nn.Module:
    """The model inside `torch.compile`'s wrapper, and with `parallel` inside `DistributedDataParallel`.

    Without `parallel`, wrappers for several processes are refused.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if "_orig_mod" in model._modules:  # torch.compile's
        return unwrapped(model.get_submodule("_orig_mod"), parallel=parallel)
    wrapper = type(model).__name__
    if parallel:
        is_wrapper = isinstance(model, nn.parallel.DistributedDataParallel)
        return unwrapped(model.get_submodule("module"), parallel=True) if is_wrapper else model
    if "DataParallel" in wrapper or "FSDP" in wrapper:
        raise ValueError(f"model is wrapped in {wrapper}: pass model.module, and wrap it afterwards")
    return model


def _check_chosen(model: nn.Module, found: list[Found], chosen: list[Found]) -> None:
    """Raise before anything is changed if a chosen layer cannot be converted, or none was chosen."""
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no supported attention layer; add its class with "
            "ecoformer.register_conversion"
        )
    bad = [f for f in chosen or found if f.source is None]
    if not chosen and not bad:
        raise ValueError(f"layers chooses no attention layer of {type(model).__name__}")
    if any(not f.name for f in chosen):
        raise ValueError("model is itself an attention layer: use create_attention or from_softmax")
    if bad:
        name = bad[0].name or type(model).__name__
        raise ValueError(f"{name} ({bad[0].kind}) cannot be converted: {bad[0].refusal}")


def _check_config(chosen: list[Found], config: dict[str, Any]) -> None:
    """Refuse arguments that only a layer of its own can have."""
    for name in ("dim", "num_heads", "out_proj"):
        if name in config:
            raise TypeError(f"{name}={config[name]!r}: convert reads {name} from each layer, leave it out")
    sources = {f.name: f.source for f in chosen if f.source is not None}
    biased = [n for n, s in sources.items() if any(b is not None for b in (s.q_bias, s.k_bias, s.v_bias))]
    if biased and not config.get("qkv_bias", True):
        raise ValueError(f"qkv_bias=False would lose the biases of {biased[0]}: leave it out")


def _replace(
    model: nn.Module, cls: type[Attention], chosen: list[Found], settings: list[dict[str, Any]]
) -> tuple[list[ReplacedLayer], list[str]]:
    """Build all new layers before any is put in place, so that an error leaves the model as it was."""
    images: dict[Rule, ImageGrid | None] = {}
    new = [_new_layer(model, cls, f, s, images) for f, s in zip(chosen, settings, strict=True)]
    pairs = [(f, cast(Attention, mechanism_in(layer))) for f, layer in zip(chosen, new, strict=True)]
    replaced, notes = [], _notes(model, pairs)
    for f, attention in pairs:
        kept = shared_parts(f.inner, attention) if isinstance(f.inner, Attention) else []
        left_behind = tuple(name for name in f.left_behind if name not in kept)
        replaced.append(ReplacedLayer(f.name, f.kind, attention.dim, attention.num_heads, left_behind))
    for f, layer in zip(chosen, new, strict=True):
        put(model, f.layer, layer)
        if isinstance(layer, Adapter) and layer.image is not None:
            layer.image.follow()
    if (timm := sys.modules.get("timm.models")) is not None:
        # timm's torch.fx tracing takes a layer as one node: mechanisms check shapes, which it does not know.
        timm.register_notrace_module(Adapter)
    layers = {f.name: s for f, s in zip(chosen, settings, strict=True)}
    record = {"mechanism": cls.name, "layers": layers}
    setattr(model, RECORD, [*getattr(model, RECORD, []), record])
    return replaced, notes + record_in_config(model, record)


def _settings(
    model: nn.Module, cls: type[Attention], chosen: list[Found], example: Any, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """The mechanism's arguments for each layer."""
    settings = [_own_settings(f.inner, cls) | config for f in chosen]
    if config.get("seed") is not None:
        for index, layer in enumerate(settings):
            layer["seed"] = config["seed"] + index
    known = "seq_len" in config or (example is None and all("seq_len" in layer for layer in settings))
    if cls.sized_by_tokens and not known:
        tokens = _count_tokens(model, [f.layer for f in chosen], _example(model, cls, example))
        for f, layer in zip(chosen, settings, strict=True):
            if f.layer not in tokens:
                raise ValueError(f"example does not reach {f.name}: pass seq_len= instead")
            layer["seq_len"] = tokens[f.layer]
    return settings


def _own_settings(layer: nn.Module, cls: type[Attention]) -> dict[str, Any]:
    """The settings of a layer that has the mechanism already, except for those that its weights show."""
    if not isinstance(layer, Attention) or type(layer) is not cls:
        return {}
    shown = {"qkv_bias", "out_proj", "attn_drop", "proj_drop", "local", "seed"}
    return {key: value for key, value in layer._settings.items() if key not in shown}


def _example(model: nn.Module, cls: type[Attention], example: Any) -> Any:
    if example is not None:
        return example
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size is None:
        raise ValueError(
            f"{cls.name} is sized by the number of tokens: pass seq_len= (in a shell --set seq_len=128), or "
            "example= an input of the model"
        )
    height, width = getattr(getattr(model, "patch_embed", None), "img_size", None) or size[1:]
    return torch.zeros(1, getattr(model, "in_chans", size[0]), height, width)


@torch.no_grad()
def _count_tokens(model: nn.Module, layers: list[nn.Module], example: Any) -> dict[nn.Module, int]:
    """How many tokens each layer sees when the model runs on `example`."""
    tokens: dict[nn.Module, int] = {}

    def listen(layer: nn.Module) -> Any:
        inner = mechanism_in(layer)
        sequence_first = isinstance(inner, nn.MultiheadAttention) and not inner.batch_first

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
            tokens[layer] = x.shape[0 if sequence_first else 1]

        return inner.register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [listen(layer) for layer in layers]
    tensors = [*model.parameters(), *model.buffers()]
    device = next((t.device for t in tensors), torch.device("cpu"))
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)
    example = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, example)
    try:
        with eval_mode(model):
            run(model, move(example, device))
    finally:
        for handle in hooks:
            handle.remove()
    return tokens


def _new_layer(
    model: nn.Module,
    cls: type[Attention],
    found: Found,
    settings: dict[str, Any],
    images: dict[Rule, ImageGrid | None],
) -> nn.Module:
    """The mechanism, in an adapter where the model calls its attention in another way."""
    old, rule = found.layer, found.rule
    try:
        if isinstance(found.inner, Attention):
            attention = cls.from_softmax(found.inner, **settings)
        else:
            attention = cls.from_projections(cast(Projections, found.source), **settings)
    except TypeError as error:
        raise constructor_error(cls.name, error) from error
    attention.train(found.inner.training)
    if rule is None:
        return attention
    image = _image(model, found, attention, images)
    if isinstance(old, Adapter):
        bound, guard = old.bound, old.guard
    else:
        bound, guard = rule.bind(old) if rule.bind else {}, rule.guard(old) if rule.guard else None
    return Adapter(attention, rule, image, bound, guard).train(old.training)


def _image(
    model: nn.Module, found: Found, attention: Attention, images: dict[Rule, ImageGrid | None]
) -> ImageGrid | None:
    """How tokens lie in an image, for a two-dimensional local branch; layers share what is in `images`."""
    known = found.layer.image if isinstance(found.layer, Adapter) else None
    local = attention.local
    if local is None or len(local.sizes) == 1:
        return known
    if found.rule is None or found.rule.passes_grid or known is not None:
        return known
    image = images.setdefault(found.rule, found.rule.image(model) if found.rule.image is not None else None)
    if image is None:
        raise ValueError(
            f"local={local.size} needs the image's height and width, which are not known in "
            f"{type(model).__name__}, {found.name}: use local=k over the sequence"
        )
    return image


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Several modules may share the old layer; all of them get the new one."""
    for owner in list(model.modules()):
        if isinstance(owner, nn.TransformerEncoder) and old in owner.modules():
            owner.use_nested_tensor = False  # its fast path reads the weights of nn.MultiheadAttention
        if isinstance(owner, Adapter) and owner.image is not None and owner.image.patches is old:
            owner.image.patches = new
            owner.image.follow()
        for name, child in list(owner._modules.items()):
            if child is old:
                setattr(owner, name, new)


def _notes(model: nn.Module, pairs: list[tuple[Found, Attention]]) -> list[str]:
    notes = []
    if any("sr" in f.left_behind or hasattr(f.layer, "ws") for f, _ in pairs):
        notes.append(
            "spatial reductions and windows are left behind: every token is a key now, so fine-tune the model"
        )
    hashed = [attention for _, attention in pairs if isinstance(attention, HashedAttention)]
    if any(attention.local is None for attention in hashed) and not _has_convolutions(model):
        notes.append(
            "no convolution mixes neighbours in this model, which codes hardly do: consider local=7 (text) "
            "or local=(3, 3) (images), then transfer or distill"
        )
    if any(f.local is not None and (a.local is None or a.local.size != f.local.size) for f, a in pairs):
        notes.append("a local branch of another size is left behind: the new one starts at zero")
    if any(f.source and f.source.attn_drop and not a.has_weights for f, a in pairs):
        notes.append("dropout of attention weights is left behind: there are no weights")
    if not all(attention.hasher.is_fitted for attention in hashed):
        notes.append(NOT_FITTED)
    if any(attention.projects_to_codes for attention in hashed):
        notes.append(RANDOM_PLANES)
    return notes


def _has_convolutions(model: nn.Module) -> bool:
    """Whether any convolution looks at neighbours; one that cuts an image into patches does not."""
    convolutions = (m for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d)))
    return any(
        kernel > stride for m in convolutions for kernel, stride in zip(m.kernel_size, m.stride, strict=True)
    )
