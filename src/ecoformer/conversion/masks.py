"""Other libraries' attention masks as key padding masks, the only kind that linear attention supports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.arguments import shape


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
