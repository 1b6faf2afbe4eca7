"""Reformer: attention within chunks of tokens that random rotations hash alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.attention.base import Attention
from ecoformer.attention.registry import register_attention
from ecoformer.operations import Operations, Product, mac
from ecoformer.ops.eager import accumulator, full_precision, widened, without
from ecoformer.randomness import seeded

_SELF = -5e4
"""Logit of a token's own key: it counts only if no other key is visible."""


@register_attention("reformer")
class ReformerAttention(Attention):
    """Kitaev et al., ICLR 2020: LSH attention, queries and keys being one projection.

    Every round sorts the tokens by hash and cuts them into chunks of `bucket_size`. A chunk attends to itself
    and to the previous chunk; for the first chunk of a round that is the last chunk of the previous round.
    Rounds are merged by their log-sum-exp. This is reformer-pytorch's `LSHAttention` with its default flags,
    except that rotations are drawn once, not in every call, and that padding is sorted behind all tokens, so
    its content does not matter. The sequence is padded in the same way to complete pairs of chunks.

    In causal order no token reads a later one's key or value. Which earlier tokens share a chunk depends on
    the hashes of later ones, as in the original.

    Args:
        dim: channels of a token.
        num_heads: heads.
        bucket_size: tokens of a chunk.
        rounds: independent hashes of every token.
        max_buckets: most hash values per round; there are as many as chunks, up to this number. Even.
        seed: of the rotations; None follows `torch.manual_seed`. The rotations are a buffer: they are saved.
        kwargs: those of `Attention`.
    """

    shared_qk = True
    has_weights = True
    own = ("local", "rotations")
    rotations: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bucket_size: int = 64,
        rounds: int = 2,
        max_buckets: int = 512,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1, got {bucket_size}")
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}")
        if max_buckets < 2 or max_buckets % 2:
            raise ValueError(f"max_buckets must be even and at least 2, got {max_buckets}")
        self.bucket_size, self.rounds, self.max_buckets = bucket_size, rounds, max_buckets
        shape = (self.head_dim, rounds, max_buckets // 2)
        weight = next(self.parameters())
        if weight.is_meta:  # draw nothing, however much is asked for
            rotations = torch.empty(shape, device="meta")
        else:
            rotations = torch.randn(shape, generator=seeded(seed), dtype=torch.float32, device="cpu")
        self.register_buffer("rotations", rotations.to(weight))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Every round's attention within chunks, merged by the rounds' log-sum-exp."""
        n = q.shape[-2]
        short = -n % (2 * self.bucket_size)
        padding = q.new_zeros(q.shape[0], 1, n, dtype=torch.bool)
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None]
        qk, values = (F.pad(without(padding, x), (0, 0, 0, short)) for x in (q, v))
        padding = F.pad(padding, (0, short), value=True).expand(qk.shape[:-1])

        order = self._order(qk, padding)
        out, mass = self._chunks(qk, values, padding, order, is_causal)
        back = order.argsort(dim=-1)
        out, mass = _take(out, back), _take(mass, back)
        merged = (out * mass.softmax(dim=2)).sum(dim=2)
        return merged[..., :n, :].to(v.dtype)

    def _order(self, qk: Tensor, padding: Tensor) -> Tensor:
        """Token numbers (B, H, rounds, N), sorted by hash and position, padding last."""
        buckets = min(qk.shape[-2] // self.bucket_size, self.max_buckets)
        with torch.no_grad(), full_precision(qk.device):
            dtype = accumulator(qk.dtype)
            rotations = self.rotations[..., : buckets // 2].to(dtype)
            rotated = torch.einsum("bhnd,drc->bhrnc", qk.to(dtype), rotations)
            hashes = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)
            hashes = hashes.masked_fill(padding.unsqueeze(2), buckets)
            return hashes.sort(dim=-1, stable=True).indices

    def _chunks(
        self, qk: Tensor, v: Tensor, padding: Tensor, order: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, H, rounds, N, D) and their log-sum-exp (B, H, rounds, N, 1), in sorted order."""
        everything = (qk, v, padding.unsqueeze(-1))
        q, values, padded = (self._cut(_take(_per_round(x, order), order)) for x in everything)
        tokens = self._cut(order.unsqueeze(-1))
        # The epsilon that protects zero vectors underflows in fp16.
        unit = F.normalize(widened(q), dim=-1).to(q.dtype)
        keys, values, padded, others = (_with_previous(x) for x in (unit, values, padded, tokens))

        hidden = padded.mT
        if is_causal:
            hidden = hidden | (tokens < others.mT)
        logits = (q @ keys.mT).to(accumulator(v.dtype)) / math.sqrt(self.head_dim)
        logits = logits.masked_fill(tokens == others.mT, _SELF)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        mass = logits.logsumexp(dim=-1, keepdim=True)
        # Not exp(logits - mass): next to the logit of the token itself, fp32 has no digits left for it.
        weights = logits.softmax(dim=-1).masked_fill(hidden, 0)
        weights = F.dropout(weights, self.attn_drop, self.training)
        out = (weights.to(v.dtype) @ values).to(logits.dtype)
        return out.reshape(*order.shape, v.shape[-1]), mass.reshape(*order.shape, 1)

    def _cut(self, x: Tensor) -> Tensor:
        """(B, H, rounds, N, D) as (B, H, chunks of all rounds, bucket_size, D)."""
        chunks = x.shape[2] * x.shape[3] // self.bucket_size
        return x.reshape(*x.shape[:2], chunks, self.bucket_size, x.shape[-1])

    def operations(self, batch: int, tokens: int) -> Operations:
        """In each round: rotations, attention of chunks to two chunks, unit keys and scaled queries (2 D).

        Padding to complete pairs of chunks costs what tokens cost; sorting is free. With chunks of 64 tokens
        and 2 rounds the counts fit the paper's figures for the Long Range Arena.
        """
        size, d, groups = self.bucket_size, self.head_dim, batch * self.num_heads
        padded = tokens + -tokens % (2 * size)
        rotations = self.rounds * (min(padded // size, self.max_buckets) // 2)
        rows, chunks = groups * padded, groups * self.rounds * padded // size
        return [
            Product(rows, d, rotations, right="weight"),
            Product(size, d, 2 * size, chunks),
            Product(size, 2 * size, d, chunks),
            mac(2 * d * self.rounds * rows),
        ]

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, bucket_size={self.bucket_size}, rounds={self.rounds}"


def _per_round(x: Tensor, order: Tensor) -> Tensor:
    """(B, H, N, D) as (B, H, rounds, N, D)."""
    # Gathering from a view per round reads every row once, so the backward adds in a fixed order.
    return x.unsqueeze(2).expand(*order.shape, x.shape[-1])


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of `x` (..., N, D) in the given order (..., N)."""
    return x.gather(-2, order.unsqueeze(-1).expand(*order.shape, x.shape[-1]))


def _with_previous(x: Tensor) -> Tensor:
    """Every chunk of (B, H, chunks, size, D), followed by the previous chunk."""
    return torch.cat([x, x.roll(1, dims=2)], dim=3)
