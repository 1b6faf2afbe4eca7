"""Rules for the attention classes of timm, Hugging Face's transformers and PyTorch itself.

Classes are known by their dotted names, so that none of these libraries is imported here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ecoformer.attention.weights import Projections, projections_of, rate_of
from ecoformer.conversion.masks import is_causal_mask, key_padding, padding_of_tokens, unseen
from ecoformer.conversion.rules import Call, Image, register_conversion


def call_with_size(attention: Call, x: Tensor, size: Any) -> Any:
    """PVTv2's and Twins' layers are told the size of the feature map."""
    height, width = size
    return attention(x, grid=(int(height), int(width)))


def call_timm(attention: Call, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    """timm's plain attention; versions differ in which of the optional arguments there are."""
    return attention(x, key_padding_mask=key_padding(attn_mask, x), is_causal=is_causal)


_REFUSED = (
    "encoder_hidden_states",
    "past_key_values",
    "past_key_value",
    "head_mask",
    "output_attentions",
    "position_embeddings",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "is_causal",
)
"""What would change the result of attention, and cannot here."""


def call_transformers(
    attention: Call, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[Any, None]:
    """Hugging Face's encoders; there are no attention weights to return."""
    # Other keyword arguments pass through every layer on their way to one that wants them.
    asked = [name for name in _REFUSED if _given(kwargs.get(name))]
    if asked or any(_given(value) for value in args):
        names = ", ".join(asked) or "further arguments"
        raise ValueError(f"a converted attention layer was called with {names}, which it cannot honour")
    padding = padding_of_tokens(attention_mask, hidden_states)
    return attention(hidden_states, key_padding_mask=padding), None


def call_multihead(
    attention: Call,
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
        raise ValueError("a converted nn.MultiheadAttention attends to itself only: pass one batch thrice")
    x = query if batch_first else query.transpose(0, 1)
    if attn_mask is not None:  # is_causal is only a hint there
        is_causal = attn_mask.ndim == 2 and is_causal_mask(attn_mask, x.shape[1])
        if not is_causal:
            raise ValueError("attn_mask must be None or the causal mask: linear attention knows no other")
    if key_padding_mask is not None and key_padding_mask.is_floating_point():
        key_padding_mask = unseen(key_padding_mask)
    out = attention(x, key_padding_mask=key_padding_mask, is_causal=is_causal)
    return (out if batch_first else out.transpose(0, 1)), None


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _query_and_pair(layer: Any) -> Projections:
    """Separate `q`, and `kv` side by side, as in PVT and Twins."""
    k, v = layer.kv.weight.chunk(2)
    k_bias, v_bias = (None, None) if layer.kv.bias is None else layer.kv.bias.chunk(2)
    biases = (layer.q.bias, k_bias, v_bias, layer.proj.bias)
    drops = (rate_of(layer, "attn_drop"), rate_of(layer, "proj_drop"))
    return Projections(layer.num_heads, layer.q.weight, k, v, layer.proj.weight, *biases, *drops)


def _separate(layer: Any) -> Projections:
    """Hugging Face's names: query, key, value without output; q_proj to o_proj; q_lin to out_lin."""
    if hasattr(layer, "query"):
        linears, drop = (layer.query, layer.key, layer.value, None), rate_of(layer, "dropout")
        return Projections.of_linears(layer.num_attention_heads, *linears, attn_drop=drop)
    if hasattr(layer, "q_lin"):
        linears, drop = (layer.q_lin, layer.k_lin, layer.v_lin, layer.out_lin), rate_of(layer, "dropout")
        return Projections.of_linears(layer.n_heads, *linears, attn_drop=drop)
    linears, drop = (
        (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj),
        rate_of(layer, "attention_dropout"),
    )
    return Projections.of_linears(layer.num_attention_heads, *linears, attn_drop=drop)


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
        return f"it uses relative position embeddings ({kind}), and codes have no scores to add them to"
    if getattr(layer, "is_decoder", False):
        return "it belongs to a decoder, which keeps keys and values of earlier tokens"
    return None


def _batch_first(layer: nn.MultiheadAttention) -> dict[str, Any]:
    return {"batch_first": layer.batch_first}


def _timm_image(model: Any) -> Image | None:
    """Only ViT is known to keep one grid throughout."""
    is_vit = any(cls.__name__ == "VisionTransformer" for cls in type(model).__mro__)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not is_vit or grid is None or getattr(model, "dynamic_img_size", False):
        return None
    return Image((int(grid[0]), int(grid[1])), int(getattr(model, "num_prefix_tokens", 0)))


def _transformers_image(model: Any) -> Image | None:
    config = getattr(model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not isinstance(size, int) or not isinstance(patch, int):
        return None
    prefix = 2 if "deit" in str(getattr(config, "model_type", "")) else 1
    return Image((size // patch, size // patch), prefix)


for _name in ("timm.models.pvt_v2.Attention", "timm.models.twins.GlobalSubSampleAttn"):
    register_conversion(
        _name, projections=_query_and_pair, call=call_with_size, drops=("sr", "norm"), passes_grid=True
    )
register_conversion(
    "timm.models.twins.LocallyGroupedAttn",
    projections=projections_of,
    call=call_with_size,
    passes_grid=True,
)
for _name in ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"):
    register_conversion(
        _name, projections=projections_of, call=call_timm, refuse=_refuse_timm, image=_timm_image
    )


_TRANSFORMERS_TEXT = {
    "bert.modeling_bert": "BertSelfAttention",
    "camembert.modeling_camembert": "CamembertSelfAttention",
    "data2vec.modeling_data2vec_text": "Data2VecTextSelfAttention",
    "distilbert.modeling_distilbert": "DistilBertSelfAttention",
    "electra.modeling_electra": "ElectraSelfAttention",
    "ernie.modeling_ernie": "ErnieSelfAttention",
    "roberta.modeling_roberta": "RobertaSelfAttention",
    "xlm_roberta.modeling_xlm_roberta": "XLMRobertaSelfAttention",
}
_TRANSFORMERS_VISION = {
    "deit.modeling_deit": "DeiTAttention",
    "dinov2.modeling_dinov2": "Dinov2Attention",
    "vit.modeling_vit": "ViTAttention",
    "vit_msn.modeling_vit_msn": "ViTMSNAttention",
}
_ONE_GRID = ("DeiTAttention", "ViTAttention", "ViTMSNAttention")
"""Dinov2 takes images of any shape, so that its config does not tell the grid."""
for _module, _class in (_TRANSFORMERS_TEXT | _TRANSFORMERS_VISION).items():
    register_conversion(
        f"transformers.models.{_module}.{_class}",
        projections=_separate,
        call=call_transformers,
        refuse=_refuse_transformers,
        image=_transformers_image if _class in _ONE_GRID else None,
    )
register_conversion(
    nn.MultiheadAttention,
    projections=projections_of,
    call=call_multihead,
    bind=_batch_first,
)
