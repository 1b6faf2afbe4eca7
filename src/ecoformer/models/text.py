"""Text encoders of the Long Range Arena: bytes in, classes out, for one text or for a pair of them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecoformer.arguments import shape
from ecoformer.attention import Attention, attention_class, create_attention
from ecoformer.checkpoints.hub import HubMixin
from ecoformer.data.texts import PAD, byte_tokens

__all__ = ["PAD", "TextEncoder", "TwoTowerEncoder", "byte_tokens"]


class Block(nn.Module):
    """A pre-LN layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, attn: Attention, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(attn.dim)
        self.attn = attn
        self.norm2 = nn.LayerNorm(attn.dim)
        self.mlp = nn.Sequential(
            _linear(attn.dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            _linear(hidden, attn.dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Tokens (B, N, dim) to tokens (B, N, dim); the mask (B, N) is True for padding."""
        x = x + self.attn(self.norm1(x), key_padding_mask=key_padding_mask)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class TextEncoder(HubMixin, nn.Module):
    """Encoder of one text: token ids (B, N) to logits (B, classes), with any registered mechanism.

    Embeddings with learned positions, `depth` pre-LN layers, a final LayerNorm, the mean over the tokens of
    the text, and a head of two linear layers with a ReLU between them. With `pool="none"` the head reads
    each token instead of the mean, and returns logits (B, N, classes). The defaults are those of the Long
    Range Arena's text classifier.

    Padding enters neither attention nor the mean, and gets no gradient. The amount of padding changes the
    logits by rounding only, with two exceptions: `combiner` chooses its blocks by N, unless
    `attention_config` sets `block`; `reformer` chooses its number of buckets by N rounded up to
    2 `bucket_size`.

    Hash functions start random; `ecoformer.fit_hashers(model, [tokens])` learns them.

    Args:
        attention: name of a mechanism, see `ecoformer.list_attentions`.
        attention_config: keyword arguments of the mechanism. They override those that the encoder sets:
            `attn_drop`, `proj_drop` and, for mechanisms sized by the number of tokens, `seq_len=length`.
        vocabulary: number of token ids.
        length: maximum number of tokens of a text, padding included.
        dim: channels of a token.
        depth: layers.
        num_heads: heads of a layer.
        hidden: channels within the feed-forward part of a layer and within the head.
        classes: number of logits; 0 omits the head, and the encoder returns what the head would read: the
            mean (B, dim), or each token (B, N, dim).
        dropout: after the embedding, after attention, and in the feed-forward part.
        attn_drop: dropout of attention weights, for mechanisms that have such weights (`has_weights`);
            hashed attention has none.
        pool: "mean" to classify the text, "none" to classify each token (outputs at padding are arbitrary).
    """

    def __init__(
        self,
        *,
        attention: str = "eco",
        attention_config: dict[str, Any] | None = None,
        vocabulary: int = 512,
        length: int = 4096,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        hidden: int = 128,
        classes: int = 2,
        dropout: float = 0.1,
        attn_drop: float = 0.1,
        pool: Literal["mean", "none"] = "mean",
    ) -> None:
        super().__init__()
        if pool not in ("mean", "none"):
            raise ValueError(f'pool must be "mean" or "none", got {pool!r}')
        self.length, self.dim, self.hidden = length, dim, hidden
        self.pooling = pool
        cls = attention_class(attention)
        if not cls.supports_padding:
            raise ValueError(f"{attention} takes no key_padding_mask, but texts of a batch differ in length")
        config: dict[str, Any] = {"proj_drop": dropout}
        config |= {"attn_drop": attn_drop} if cls.has_weights else {}
        config |= {"seq_len": length} if cls.sized_by_tokens else {}
        config |= attention_config or {}
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(length, dim))
        self.drop = nn.Dropout(dropout)
        layers = (create_attention(attention, dim, num_heads, **config) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(layer, hidden, dropout) for layer in layers)
        self.norm = nn.LayerNorm(dim)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.reset_classifier(classes)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Token ids (B, N) to logits (B, classes), or (B, N, classes) with `pool="none"`.

        `key_padding_mask` (B, N) is True where a token is padding; without it, tokens equal to `PAD` are. A
        text of padding only has a mean of zeros.
        """
        mask = self._padding("tokens", tokens, "key_padding_mask", key_padding_mask)
        encode = self._encode if self.pooling == "mean" else self._features
        logits: Tensor = self.head(encode(tokens, mask))
        return logits

    def forward_features(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Token ids (B, N) to features (B, N, dim) after the final LayerNorm; arbitrary at padding."""
        mask = self._padding("tokens", tokens, "key_padding_mask", key_padding_mask)
        return self._features(tokens, mask)

    def pool(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Mean (B, dim) of features (B, N, dim) over the tokens that are not padding; zero where all are."""
        # Half precision has too few digits for a sum of thousands of tokens.
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.masked_fill(key_padding_mask.unsqueeze(-1), 0).sum(dim=1, dtype=wide)
        count = (~key_padding_mask).sum(dim=1, keepdim=True)
        return (total / count.clamp_min(1)).to(x.dtype)

    def reset_classifier(self, classes: int) -> None:
        """Replace the head; 0 classes for none."""
        self.head = _head(self.dim, self.hidden, classes).to(self.positions)
        self.classes = classes

    def _padding(self, name: str, tokens: Tensor, mask_name: str, mask: Tensor | None) -> Tensor:
        """Check both arguments; return the mask, or the one that `PAD` makes."""
        _check_tokens(name, tokens, self.length, self.embedding.num_embeddings)
        if mask is None:
            return tokens == PAD
        if mask.dtype != torch.bool or mask.shape != tokens.shape or mask.device != tokens.device:
            raise ValueError(
                f"{mask_name} must be bool {shape(tokens)} on {tokens.device} like {name}, True at "
                f"padding, got {mask.dtype} {shape(mask)} on {mask.device}"
            )
        return mask

    def _encode(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.pool(self._features(tokens, mask), mask)

    def _features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        features: Tensor = self.norm(x)
        return features


class TwoTowerEncoder(HubMixin, nn.Module):
    """Encoder of a pair of texts, for retrieval: one `TextEncoder` reads both, a head compares them.

    The head has two linear layers with a ReLU between them, on [a, b, a * b, a - b] of the two means.

    `ecoformer.fit_hashers(model, [{"first": ..., "second": ...}])` learns from the first texts, because the
    shared layers meet them first; `fit_hashers(model.encoder, [first, second])` learns from both.

    Args:
        classes: logits.
        kwargs: those of `TextEncoder`, without `pool`.
    """

    def __init__(self, *, classes: int = 2, **kwargs: Any) -> None:
        super().__init__()
        self.encoder = TextEncoder(classes=0, **kwargs)
        self.reset_classifier(classes)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_padding_mask: Tensor | None = None,
        second_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, N) and (B, M) to logits (B, classes); masks as `TextEncoder` takes them."""
        encoder = self.encoder
        first_mask = encoder._padding("first", first, "first_padding_mask", first_padding_mask)
        second_mask = encoder._padding("second", second, "second_padding_mask", second_padding_mask)
        if len(first) != len(second):
            raise ValueError(
                f"first {shape(first)} and second {shape(second)} must hold as many texts: they are compared "
                "in pairs"
            )
        a, b = encoder._encode(first, first_mask), encoder._encode(second, second_mask)
        logits: Tensor = self.head(torch.cat([a, b, a * b, a - b], dim=-1))
        return logits

    def reset_classifier(self, classes: int) -> None:
        """Replace the head; 0 classes for none."""
        encoder = self.encoder
        self.head = _head(4 * encoder.dim, encoder.hidden, classes).to(encoder.positions)
        self.classes = classes


def _head(width: int, hidden: int, classes: int) -> nn.Module:
    if not classes:
        return nn.Identity()
    return nn.Sequential(_linear(width, hidden), nn.ReLU(), _linear(hidden, classes))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    # Not the 0.02 of wide models: with it, eco at 64 channels was slow to start learning on some seeds.
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _check_tokens(name: str, tokens: Tensor, length: int, vocabulary: int) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{name} must be token ids (B, N) of int64, as byte_tokens makes them, got {got}")
    if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= length:
        raise ValueError(
            f"{name} must be (B, N) with N from 1 to length={length}, got {shape(tokens)}: truncate texts "
            "or raise length"
        )
    # On a GPU this would wait for it.
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if tokens.device.type == "cpu" and tokens.numel() and type(tokens) is Tensor and not traced:
        low, high = torch.stack(tokens.aminmax()).tolist()
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"{name} {shape(tokens)} holds ids from {low} to {high}: they must be within 0 to "
                f"{vocabulary - 1}, or build the model with a larger vocabulary"
            )
