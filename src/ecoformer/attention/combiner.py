"""Combiner: direct attention within a block, and attention to summaries of the other blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.attention.base import Attention
from ecoformer.attention.registry import register_attention
from ecoformer.operations import Operations, Product, mac
from ecoformer.ops.eager import widened, without


@register_attention("combiner")
class CombinerAttention(Attention):
    """Combiner-Fixed of Ren et al., NeurIPS 2021 (arXiv 2107.05768): full attention at cost N sqrt(N).

    Token i takes one softmax over the keys of its own block (in causal order those up to i) and over one
    summary key of every other block (every earlier block). A summary's value is the block's local
    expectation: the mean of its values by softmax of the summary query with the block's keys. Summary query
    and key are the maximum over the block's queries and keys, channel by channel, and all products are
    scaled by d^-0.5, as in the released `sqrt_fixed_full` with "identity-max".

    Differences from the released code:
    - without causal order a token does not see the summary of its own block, so there is one path from every
      token to every other and the weights are a distribution over tokens, as in the paper's factorisation;
    - `attn_drop` applies to the joint weights of tokens and summaries, not separately within the block and
      within summaries;
    - padding enters neither maxima nor sums, a block of padding only has no summary, and any N works.

    Args:
        dim: channels of a token.
        num_heads: heads.
        block: tokens of a block; None for ceil(sqrt(N)). Memory grows with N (block + N / block).
            `torch.export` needs a fixed N.
        kwargs: those of `Attention`.
    """

    has_weights = True

    def __init__(self, dim: int, num_heads: int, *, block: int | None = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if block is not None and block < 1:
            raise ValueError(f"block must be at least 1 or None, got {block}")
        self.block = block

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """One softmax over the tokens of the block and the summaries of the others."""
        n = q.shape[-2]
        size, blocks = self._blocks(n)
        padding = q.new_zeros(q.shape[0], 1, n, dtype=torch.bool)
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None]
        missing = blocks * size - n
        if q.dtype == torch.float16:  # products of large queries and keys overflow it
            q, k = q.float(), k.float()
        k, v = without(padding, k), without(padding, v)
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q / math.sqrt(self.head_dim), k, v))
        q, k, v = (x.reshape(*x.shape[:2], blocks, size, x.shape[-1]) for x in (q, k, v))
        padding = F.pad(padding, (0, missing), value=True).reshape(-1, 1, blocks, size)

        keys, values = _summaries(q, k, v, padding)
        to_tokens, to_blocks = q @ k.mT, q.flatten(2, 3) @ keys.mT
        products = torch.cat([to_tokens, to_blocks.reshape(*q.shape[:-1], blocks)], dim=-1)
        weights = _softmax(products, _hidden(padding, is_causal))
        weights = F.dropout(weights, self.attn_drop, self.training).to(v.dtype)
        of_tokens, of_blocks = weights[..., :size] @ v, weights[..., size:].flatten(2, 3) @ values
        return (of_tokens.flatten(2, 3) + of_blocks)[..., :n, :].to(v.dtype)

    def operations(self, batch: int, tokens: int) -> Operations:
        """Attention within blocks, to summaries, and within each block for its summary; queries are scaled.

        Tokens are padded to complete blocks. The paper's figures for this mechanism have not been derived.
        """
        size, blocks = self._blocks(tokens)
        groups, d = batch * self.num_heads, self.head_dim
        each, padded = groups * blocks, size * blocks
        return [
            mac(groups * padded * d),
            *(Product(size, d, size, each), Product(size, size, d, each)),
            *(Product(1, d, size, each), Product(1, size, d, each)),
            *(Product(padded, d, blocks, groups), Product(padded, blocks, d, groups)),
        ]

    def _blocks(self, tokens: int) -> tuple[int, int]:
        """Tokens of a block, and blocks."""
        size = self.block or math.isqrt(tokens - 1) + 1
        return size, -(-tokens // size)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, block={self.block}"


def _summaries(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value (B, H, blocks, D) of every block."""
    query, key = _highest(q, padding), _highest(k, padding)
    weights = _softmax(query.unsqueeze(-2) @ k.mT, padding.unsqueeze(-2)).to(v.dtype)
    return key, (weights @ v).squeeze(-2)


def _softmax(logits: Tensor, hidden: Tensor) -> Tensor:
    """Weights, in full precision, of what is not hidden; all zero if everything is."""
    logits = widened(logits)
    floor = torch.finfo(logits.dtype).min
    return logits.masked_fill(hidden, floor).softmax(dim=-1).masked_fill(hidden, 0)


def _highest(x: Tensor, padding: Tensor) -> Tensor:
    """Maximum of each channel over each block's tokens; zero for a block of padding only."""
    # Not `amax`: its gradient searches the maximum again. Compiled code keeps more digits of half precision
    # than it stores, and may not find it.
    highest = x.masked_fill(padding.unsqueeze(-1), -math.inf).max(dim=-2).values
    return highest.masked_fill(padding.all(dim=-1, keepdim=True), 0)


def _hidden(padding: Tensor, is_causal: bool) -> Tensor:
    """What tokens may not see (B, 1, blocks, size, size + blocks), from padding (B, 1, blocks, size)."""
    blocks, size = padding.shape[-2:]
    tokens = padding.unsqueeze(-2).expand(-1, -1, -1, size, -1)
    barred = torch.eye(blocks, dtype=torch.bool, device=padding.device)
    if is_causal:
        tokens = tokens | padding.new_ones(size, size).triu(1)
        barred = padding.new_ones(blocks, blocks).triu()
    summaries = padding.all(dim=-1)[..., None, None, :] | barred.unsqueeze(-2)
    return torch.cat([tokens, summaries.expand(-1, -1, -1, size, -1)], dim=-1)
