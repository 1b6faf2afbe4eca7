"""Tokens of a sample split over ranks: whose they are, who can work on them, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecoformer.functional import sum_over_ranks

__all__ = ["SharesTokens", "check_split", "split_tokens", "stretch", "with_neighbours"]


class SharesTokens:
    """A module that knows that it may hold a stretch of a sample's tokens only; `split_tokens` tells it."""

    token_group: dist.ProcessGroup | None = None
    """Ranks that hold a sample together, in rank order; None where all tokens are here."""

    def why_whole(self) -> str | None:
        """Why the tokens of a sample cannot be split over ranks; None where they can."""
        return None

    def fewest_tokens(self) -> int:
        """How many tokens of a sample every rank must hold."""
        return 1


@contextmanager
def split_tokens(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Within the context, the ranks of `group` share every sample, each with a stretch of its tokens.

    All ranks call the model alike and in step, backward passes too. Gradients are those of the sum of all
    ranks' losses. DDP averages over ranks: it learns from the mean of their losses, as without splitting.
    """
    sharing = [module for module in model.modules() if isinstance(module, SharesTokens)]
    for module in sharing:
        module.token_group = group
    try:
        yield
    finally:
        for module in sharing:
            del module.token_group


def check_split(model: nn.Module, tokens: int, ranks: int) -> None:
    """Refuse a model that needs all tokens of a sample, or more than so many ranks leave each other."""
    for name, module in model.named_modules():
        if not isinstance(module, SharesTokens):
            continue
        where, why = name or "the model", module.why_whole()
        if why is not None:
            raise ValueError(f"{where} cannot work on a stretch of the tokens: {why}")
        if tokens // ranks < module.fewest_tokens():
            raise ValueError(
                f"{tokens} tokens over {ranks} ranks leave {tokens // ranks} to some, but {where} needs "
                f"{module.fewest_tokens()}: split them over fewer ranks"
            )


def stretch(tokens: int, group: dist.ProcessGroup) -> slice:
    """This rank's part of so many tokens; where they do not divide, the first ranks have one more."""
    share, more = divmod(tokens, dist.get_world_size(group))
    rank = dist.get_rank(group)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))


def with_neighbours(v: Tensor, before: int, after: int, group: dist.ProcessGroup) -> Tensor:
    """Tokens (B, N, C) between the last `before` of the rank below and the first `after` of the one above.

    Zeros stand at both ends of the sequence.
    """
    rank, ranks, n = dist.get_rank(group), dist.get_world_size(group), v.shape[1]
    border = torch.cat([v[:, n - before :], v[:, :after]], dim=1)
    # Every rank fills its own slot, so one sum hands all borders to all ranks.
    slots = [border if r == rank else torch.zeros_like(border) for r in range(ranks)]
    borders = sum_over_ranks(torch.stack(slots), group)
    nothing = torch.zeros_like(border)
    below = borders[rank - 1] if rank > 0 else nothing
    above = borders[rank + 1] if rank + 1 < ranks else nothing
    return torch.cat([below[:, :before], v, above[:, before:]], dim=1)
