"""Rules for the attention classes of timm, Hugging Face's transformers and PyTorch itself, and their masks.

Classes are known by their dotted names, so none of these libraries is imported here. Masks become key padding
masks, the only kind that linear attention supports.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.arguments import shape
from ecoformer.attention.weights import Projections, dropout_of, projections_of
from ecoformer.conversion.rules import DECODER, AnyCall, ImageGrid, register_conversion


def key_padding(mask: Any, x: Tensor) -> Tensor | None:
    """A mask of `scaled_dot_product_attention` over tokens `x` (B, N, C) as (B, N), True where padding.

    `mask` is None or broadcasts to (B, heads, N, N): boolean, true where a key is seen, or added to the
    scores (0, or a very low number). Every query must see the same keys.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    batch, n = x.shape[:2]
    given = shape(mask)
    if mask.ndim == 2:
        mask = mask[None, None]
    if mask.ndim != 4 or mask.shape[3] != n or mask.shape[2] not in (1, n) or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention_mask must broadcast to (B, heads, N, N) with B = {batch} and N = {n}, got {given}"
        )
    row = mask[:, 0, 0]
    if any(mask.shape[d] > 1 and mask.stride(d) != 0 for d in (1, 2)):  # else there is one row for all
        _require(
            (mask == row[:, None, None]).all(),
            f"attention_mask {given} differs between queries or heads: linear attention supports padding of "
            "keys only",
        )
    return hidden_keys(row).expand(batch, n)


def padding_of_tokens(mask: Any, x: Tensor) -> Tensor | None:
    """Like `key_padding`, for a mask that may also be (B, N) with true or 1 where a token counts."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == x.shape[:2]:
        return ~mask.bool()
    return key_padding(mask, x)


def hidden_keys(row: Tensor) -> Tensor:
    """Which keys a mask hides: false, or a very low number if the mask is added to the scores."""
    if not row.is_floating_point():
        return ~row.bool()
    # Older code writes -1e4 for minus infinity; in half precision, scores can be that low.
    lowest = -1e4 if row.dtype in (torch.float32, torch.float64) else torch.finfo(row.dtype).min / 2
    low = row <= lowest
    _require(
        (low | (row == 0)).all(),
        f"attention_mask {shape(row)} adds numbers to the scores, which codes do not have: pass a mask of 0 "
        "and minus infinity",
    )
    return low


def is_causal_mask(mask: Tensor, n: int) -> bool:
    """Whether an (N, N) mask of `nn.MultiheadAttention` (true or minus infinity: hidden) is causal."""
    if mask.shape != (n, n):
        return False
    causal = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool:
        causal = torch.zeros_like(mask).masked_fill(causal, -torch.inf)
    if not torch.compiler.is_compiling():
        return torch.equal(mask, causal)
    _require((mask == causal).all(), "attn_mask must be the causal mask: linear attention supports no other")
    return True


def _require(condition: Tensor, message: str) -> None:
    """Raise unless the condition holds; in a compiled graph, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)


def call_with_size(attention: AnyCall, x: Tensor, size: Any) -> Any:
    """Layers of PVTv2 and Twins get the size of the feature map."""
    return attention(x, grid=tuple(size))


def call_timm(attention: AnyCall, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    """timm's plain attention; not every version has all of the optional arguments."""
    return attention(x, key_padding_mask=key_padding(attn_mask, x), is_causal=is_causal)


_REFUSED = (
    *("encoder_hidden_states", "past_key_values", "past_key_value", "head_mask", "output_attentions"),
    *("position_embeddings", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "is_causal"),
)
"""Arguments that change the result of attention and have no equivalent here."""


def call_transformers(
    attention: AnyCall, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[Any, None]:
    """Hugging Face's encoders; there are no attention weights to return."""
    # Other keyword arguments are for other layers: transformers passes them through all.
    asked = [name for name in _REFUSED if _is_given(kwargs.get(name))]
    if asked or any(_is_given(value) for value in args):
        names = ", ".join(asked) or "further positional arguments"
        raise ValueError(f"a converted attention layer does not support {names}")
    padding = padding_of_tokens(attention_mask, hidden_states)
    return attention(hidden_states, key_padding_mask=padding), None


def call_multihead(
    attention: AnyCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    batch_first: bool,
) -> tuple[Any, None]:
    """`nn.MultiheadAttention` as self-attention; weights are never returned."""
    if query is not key or query is not value or query.ndim != 3:
        raise ValueError("a converted nn.MultiheadAttention needs one batch as query, key and value")
    x = query if batch_first else query.transpose(0, 1)
    if attn_mask is not None:  # is_causal is only a hint there
        is_causal = attn_mask.ndim == 2 and is_causal_mask(attn_mask, x.shape[1])
        if not is_causal:
            raise ValueError("attn_mask must be None or the causal mask: linear attention supports no other")
    if key_padding_mask is not None and key_padding_mask.is_floating_point():
        key_padding_mask = hidden_keys(key_padding_mask)
    out = attention(x, key_padding_mask=key_padding_mask, is_causal=is_causal)
    return (out if batch_first else out.transpose(0, 1)), None


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _query_and_pair(layer: Any) -> Projections:
    """Separate `q`, and `kv` side by side, as in PVT and Twins."""
    k, v = layer.kv.weight.chunk(2)
    k_bias, v_bias = (None, None) if layer.kv.bias is None else layer.kv.bias.chunk(2)
    biases = (layer.q.bias, k_bias, v_bias, layer.proj.bias)
    drops = (dropout_of(layer, "attn_drop"), dropout_of(layer, "proj_drop"))
    return Projections(layer.num_heads, layer.q.weight, k, v, layer.proj.weight, *biases, *drops)


_HUGGING_FACE_NAMES = (
    (("query", "key", "value", None), "num_attention_heads", "dropout"),
    (("q_lin", "k_lin", "v_lin", "out_lin"), "n_heads", "dropout"),
    (("q_proj", "k_proj", "v_proj", "o_proj"), "num_attention_heads", "attention_dropout"),
)
"""Names of the linear layers (None: the model projects outside the layer), of the heads and the dropout."""


def _names_in(layer: Any) -> tuple[tuple[str | None, ...], str, str]:
    known = (names for names in _HUGGING_FACE_NAMES if hasattr(layer, str(names[0][0])))
    return next(known, _HUGGING_FACE_NAMES[-1])


def _separate(layer: Any) -> Projections:
    linears, heads, drop = _names_in(layer)
    parts: list[Any] = [getattr(layer, name) if name else None for name in linears]
    return Projections.of_linears(getattr(layer, heads), *parts, attn_drop=dropout_of(layer, drop))


def _refuse_timm(layer: Any) -> str | None:
    norms = {name: getattr(layer, name, None) for name in ("q_norm", "k_norm", "norm")}
    normed = [name for name, norm in norms.items() if not isinstance(norm, (nn.Identity, type(None)))]
    if normed:
        return f"it normalises ({', '.join(normed)}), which the mechanisms here do not"
    if getattr(layer, "gate", None) is not None:
        return "its output is gated"
    return None


def _refuse_transformers(layer: Any) -> str | None:
    kind = getattr(layer, "position_embedding_type", "absolute")
    if kind != "absolute" or getattr(layer, "distance_embedding", None) is not None:
        return f"it adds relative position embeddings ({kind}) to scores, which codes do not have"
    if getattr(layer, "is_decoder", False):
        return DECODER
    return None


def _timm_image(model: Any) -> ImageGrid | None:
    """Only ViT is known to keep one grid in all layers."""
    is_vit = any(cls.__name__ == "VisionTransformer" for cls in type(model).__mro__)
    patches = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not is_vit or not isinstance(patches, nn.Conv2d):
        return None
    if not isinstance(getattr(model, "patch_drop", None), (nn.Identity, type(None))):
        raise ValueError(
            "local=(k, k) needs all patches of an image, but patch_drop_rate > 0 drops some in training: "
            "build the model without it, or use local=k over the sequence"
        )
    return ImageGrid(model.num_prefix_tokens, patches=patches)


def _transformers_image(model: Any) -> ImageGrid | None:
    patches = [m for name, m in model.named_modules() if name.endswith("patch_embeddings")]
    if len(patches) != 1 or not isinstance(getattr(patches[0], "projection", None), nn.Conv2d):
        return None
    prefix = 2 if type(patches[0]).__name__.startswith("DeiT") else 1
    return ImageGrid(prefix, patches=patches[0].projection)


_with_size = partial(register_conversion, call=call_with_size, passes_grid=True)
_with_size("timm.models.pvt_v2.Attention", projections=_query_and_pair, drops=("sr", "norm"))
_with_size("timm.models.twins.GlobalSubSampleAttn", projections=_query_and_pair, drops=("sr", "norm"))
_with_size("timm.models.twins.LocallyGroupedAttn", projections=projections_of)
register_conversion(
    "timm.layers.attention.Attention",
    projections=projections_of,
    call=call_timm,
    refuse=_refuse_timm,
    image=_timm_image,
)
_TRANSFORMERS_TEXTS = {
    "bert.modeling_bert": "BertSelfAttention",
    "camembert.modeling_camembert": "CamembertSelfAttention",
    "data2vec.modeling_data2vec_text": "Data2VecTextSelfAttention",
    "distilbert.modeling_distilbert": "DistilBertSelfAttention",
    "electra.modeling_electra": "ElectraSelfAttention",
    "ernie.modeling_ernie": "ErnieSelfAttention",
    "roberta.modeling_roberta": "RobertaSelfAttention",
    "xlm_roberta.modeling_xlm_roberta": "XLMRobertaSelfAttention",
}
_TRANSFORMERS_IMAGES = {
    "deit.modeling_deit": "DeiTAttention",
    "dinov2.modeling_dinov2": "Dinov2Attention",
    "vit.modeling_vit": "ViTAttention",
    "vit_msn.modeling_vit_msn": "ViTMSNAttention",
}
for _module, _class in (_TRANSFORMERS_TEXTS | _TRANSFORMERS_IMAGES).items():
    register_conversion(
        f"transformers.models.{_module}.{_class}",
        projections=_separate,
        call=call_transformers,
        refuse=_refuse_transformers,
        image=_transformers_image if _module in _TRANSFORMERS_IMAGES else None,
        guard=lambda layer: str(_names_in(layer)[0][0]),
    )
register_conversion(
    nn.MultiheadAttention,
    projections=projections_of,
    call=call_multihead,
    bind=lambda layer: {"batch_first": layer.batch_first},
)
