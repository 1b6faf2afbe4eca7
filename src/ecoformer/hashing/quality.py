"""How well codes preserve what attention needs: the paper's objective, and recall of nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.hashing.pairs import Pairs, SparseLabels, find_pairs, own_scores, row_blocks


@dataclass(frozen=True)
class HashQuality:
    """Quality of codes on some tokens.

    Attributes:
        objective: |H H^T - b Y|^2, mean over samples and heads.
        recall: share of softmax's top-l neighbours among the l nearest codes, mean over tokens. Codes tie
            often; this is the expectation when ties are broken at random.
        correlation: of the codes' products with the tokens' cosines over all pairs, mean over samples and
            heads. The objective wants 0 for every pair that is neither among the most nor the least similar,
            so codes can have a low objective and still lose the similarities in between.
        objective_per_head: (H,).
        recall_per_head: (H,).
        neighbours: l.
    """

    objective: float
    recall: float
    correlation: float
    objective_per_head: Tensor
    recall_per_head: Tensor
    neighbours: int


def hash_quality(
    codes: Tensor, tokens: Tensor, neighbours: int = 10, valid: Tensor | None = None
) -> HashQuality:
    """Quality of codes (B, H, N, b) for tokens (B, H, N, D); `valid` (B, N) is False for padding."""
    if neighbours < 1:
        raise ValueError(f"neighbours must be at least 1, got {neighbours}")
    everywhere = None if valid is None else valid.unsqueeze(1)
    pairs = find_pairs(tokens, neighbours, everywhere)
    codes = codes.to(tokens.dtype)
    if valid is not None:
        codes = codes.masked_fill(~valid[:, None, :, None], 0)
    objective = _objective(codes, pairs).mean(dim=0)
    recall = _recall(codes, pairs, everywhere)
    correlation = _correlation(codes, tokens, valid)
    means = float(objective.mean()), float(recall.mean()), float(correlation.mean())
    return HashQuality(*means, objective, recall, pairs.similar.shape[-1])


def _objective(codes: Tensor, pairs: Pairs) -> Tensor:
    """|H H^T|^2 - 2 b <H H^T, Y> + b^2 |Y|^2 of every sample and head, without an N x N matrix."""
    bits = codes.shape[-1]
    gram = codes.mT @ codes
    agreement = (codes * (SparseLabels(pairs) @ codes)).sum(dim=(-2, -1))
    labels = 2 * pairs.counts.sum(dim=(-2, -1))
    return gram.square().sum(dim=(-2, -1)) - 2 * bits * agreement + bits**2 * labels


def _correlation(codes: Tensor, tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Correlation of h_i . h_j with the cosine of tokens i and j over all pairs, from small products."""
    unit = F.normalize(tokens, dim=-1)
    present = tokens.new_tensor(tokens.shape[-2])
    if valid is not None:
        unit = unit.masked_fill(~valid[:, None, :, None], 0)
        present = valid.sum(dim=-1).to(tokens.dtype).clamp_min(1).unsqueeze(-1)
    pairs = present.square()

    def moment(a: Tensor, b: Tensor) -> Tensor:
        """Covariance of the entries of a a^T with those of b b^T."""
        both = (a.mT @ b).square().sum(dim=(-2, -1)) / pairs
        alone = [x.sum(dim=-2).square().sum(dim=-1) / pairs for x in (a, b)]
        return both - alone[0] * alone[1]

    spread = moment(codes, codes) * moment(unit, unit)
    return torch.where(spread > 0, moment(codes, unit) / spread.clamp_min(1e-30).sqrt(), 0)


def _recall(codes: Tensor, pairs: Pairs, valid: Tensor | None) -> Tensor:
    """Expected recall of every head (H,), over tokens that have neighbours."""
    wanted = pairs.counts.sum(dim=-1)
    found = torch.empty_like(wanted)
    for block in row_blocks(codes):
        found[..., block] = _found(codes, pairs, valid, block)
    share = found / wanted.clamp_min(1)
    return share.sum(dim=(0, 2)) / (wanted > 0).sum(dim=(0, 2)).clamp_min(1)


def _found(codes: Tensor, pairs: Pairs, valid: Tensor | None, block: slice) -> Tensor:
    """Expected number of neighbours that the tokens of a row block find among their nearest codes."""
    affinity = codes[..., block, :] @ codes.mT
    if valid is not None:
        affinity = affinity.masked_fill(~valid.unsqueeze(-2), -torch.inf)
    affinity = own_scores(affinity, block, -torch.inf)
    counts = pairs.counts[..., block, :]
    wanted = counts.sum(dim=-1, keepdim=True)
    width = max(1, pairs.similar.shape[-1])
    nearest = affinity.topk(min(width, affinity.shape[-1]), dim=-1).values
    cut = nearest.gather(-1, (wanted.long() - 1).clamp_min(0))
    above, level = affinity > cut, affinity == cut
    chance = (wanted - above.sum(dim=-1, keepdim=True)) / level.sum(dim=-1, keepdim=True)
    hits = affinity.gather(-1, pairs.similar[..., block, :])
    return (((hits > cut) + (hits == cut) * chance) * counts).sum(dim=-1)
