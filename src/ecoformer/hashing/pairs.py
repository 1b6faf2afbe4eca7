"""Similar and dissimilar tokens: the pairs with the largest and smallest attention scores, block by block.

Queries and keys are one projection of unit length here, so attention scores grow with the cosine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK_ELEMENTS = 1 << 22
"""Most scores in memory at a time."""


class Pairs(NamedTuple):
    """Indices (..., N, l) of every token's similar and dissimilar tokens, and which entries count (1.0)."""

    similar: Tensor
    dissimilar: Tensor
    counts: Tensor


def row_blocks(tokens: Tensor) -> Iterator[slice]:
    """Slices of the rows of `tokens` (..., N, D) whose scores against all tokens stay small."""
    n = tokens.shape[-2]
    rows_at_once = max(1, _BLOCK_ELEMENTS // max(1, tokens[..., 0].numel()))
    for start in range(0, n, rows_at_once):
        yield slice(start, min(start + rows_at_once, n))


def own_scores(scores: Tensor, block: slice, value: float) -> Tensor:
    """`scores` (..., rows, N) of a row block, with every token's score with itself set to `value`."""
    own = torch.arange(block.start, block.stop, device=scores.device).unsqueeze(-1)
    return scores.scatter(-1, own.expand(*scores.shape[:-1], 1), value)


def find_pairs(tokens: Tensor, l: int, valid: Tensor | None = None) -> Pairs:  # noqa: E741
    """The l most and least similar tokens of each token of `tokens` (..., N, D), itself excluded.

    `valid` (..., N) is False for padding, which is in no pair. With fewer than 2 l other tokens, both lists
    are shortened so that no pair is in both.
    """
    n = tokens.shape[-2]
    width = min(l, max(0, (n - 1) // 2))
    unit = F.normalize(tokens, dim=-1)
    kept = unit.new_ones(1, width, dtype=torch.bool)
    if valid is not None:
        limit = (valid.sum(dim=-1) - 1) // 2
        kept = torch.arange(width, device=unit.device) < limit[..., None, None]
    # Filled in place: tensors allocated between blocks of scores would fragment the heap.
    similar = torch.empty(*tokens.shape[:-1], width, dtype=torch.int64, device=unit.device)
    dissimilar = torch.empty_like(similar)
    for block in row_blocks(unit):
        near = far = unit[..., block, :] @ unit.mT
        if valid is not None:
            hidden = ~valid.unsqueeze(-2)
            near, far = near.masked_fill(hidden, -torch.inf), far.masked_fill(hidden, torch.inf)
        alike = similar[..., block, :]
        alike.copy_(own_scores(near, block, -torch.inf).topk(width, dim=-1).indices)
        far = own_scores(far, block, torch.inf)
        # Scores tie: a token among the similar ones must not be among the dissimilar ones too.
        far = far.scatter(-1, alike, far.gather(-1, alike).masked_fill(kept, torch.inf))
        dissimilar[..., block, :] = far.topk(width, dim=-1, largest=False).indices
    counts = (kept if valid is None else kept & valid.unsqueeze(-1)).to(unit.dtype)
    counts = counts.expand(*tokens.shape[:-1], width)
    return Pairs(similar, dissimilar, counts)


class SparseLabels:
    """The label matrices Y of all samples and heads, made symmetric: (Y + Y^T) / 2, about 4 l numbers a row.

    h^T Y h does not change, and the gradient of the symmetric form needs no transpose.
    """

    def __init__(self, pairs: Pairs) -> None:
        n, width = pairs.similar.shape[-2:]
        device = pairs.similar.device
        matrices = pairs.similar.shape[:-2].numel()
        similar, dissimilar, counts = (x.reshape(matrices, n, width) for x in pairs)
        matrix = torch.arange(len(similar), device=device).view(-1, 1, 1) * n
        rows = (matrix + torch.arange(n, device=device).view(n, 1)).expand_as(similar)
        rows = torch.cat([rows.flatten(), rows.flatten()])
        columns = torch.cat([(matrix + similar).flatten(), (matrix + dissimilar).flatten()])
        values = torch.cat([counts.flatten(), -counts.flatten()])
        keep = values != 0
        rows, columns, values = rows[keep], columns[keep], values[keep]
        both = torch.cat([rows, columns])
        order = both.argsort(stable=True)
        self._columns = torch.cat([columns, rows])[order]
        self._values = torch.cat([values, values])[order] / 2
        self._starts = torch.searchsorted(both[order], torch.arange(len(similar) * n, device=device))

    def __matmul__(self, x: Tensor) -> Tensor:
        """Y times x (..., N, p): every row is a weighted sum of a few rows of x."""
        if not len(self._columns):
            return torch.zeros_like(x)
        rows = F.embedding_bag(
            self._columns,
            x.reshape(-1, x.shape[-1]),
            self._starts,
            mode="sum",
            per_sample_weights=self._values.to(x.dtype),
        )
        return rows.view_as(x)
