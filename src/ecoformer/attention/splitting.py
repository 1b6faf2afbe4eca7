"""Sequence parallelism: the ranks of a group share every sample, each with a slice of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecoformer.functional import sum_over_ranks


class SharesTokens:
    """A module that can work on a slice of a sample's tokens; `split_tokens` sets its group."""

    token_group: dist.ProcessGroup | None = None
    """Ranks that hold a sample together, in rank order; None if all tokens are here."""

    def split_problem(self) -> str | None:
        """Why the tokens of a sample cannot be split over ranks; None if they can."""
        return None

    def min_tokens(self) -> int:
        """How many tokens of a sample every rank must hold."""
        return 1


@contextmanager
def split_tokens(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Within the context, the ranks of `group` share every sample, each with a slice of its tokens.

    All ranks must call the model in the same order, backward passes included. Gradients are those of the sum
    of all ranks' losses. DDP averages over ranks, so it learns from the mean loss, as without splitting.
    """
    modules = [module for module in model.modules() if isinstance(module, SharesTokens)]
    for module in modules:
        module.token_group = group
    try:
        yield
    finally:
        for module in modules:
            del module.token_group


def check_split(model: nn.Module, tokens: int, ranks: int) -> None:
    """Refuse a model that needs all tokens of a sample, or more tokens than each rank would get."""
    for name, module in model.named_modules():
        if not isinstance(module, SharesTokens):
            continue
        where, problem = name or "the model", module.split_problem()
        if problem is not None:
            raise ValueError(f"{where} cannot split tokens over ranks: {problem}")
        if tokens // ranks < module.min_tokens():
            raise ValueError(
                f"{tokens} tokens over {ranks} ranks leave {tokens // ranks} to some, but {where} needs "
                f"{module.min_tokens()}: use fewer ranks"
            )


def token_slice(tokens: int, group: dist.ProcessGroup) -> slice:
    """This rank's part of `tokens` tokens; if they do not divide evenly, the first ranks get one more."""
    share, more = divmod(tokens, dist.get_world_size(group))
    rank = dist.get_rank(group)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))


def exchange_halo(v: Tensor, before: int, after: int, group: dist.ProcessGroup) -> Tensor:
    """Tokens (B, N, C) between the previous rank's last `before` and the next rank's first `after` tokens.

    Both ends of the sequence are padded with zeros.
    """
    rank, ranks, n = dist.get_rank(group), dist.get_world_size(group), v.shape[1]
    border = torch.cat([v[:, n - before :], v[:, :after]], dim=1)
    # Every rank fills its own slot, so one sum gives all borders to all ranks.
    slots = [border if r == rank else torch.zeros_like(border) for r in range(ranks)]
    borders = sum_over_ranks(torch.stack(slots), group)
    nothing = torch.zeros_like(border)
    previous = borders[rank - 1] if rank > 0 else nothing
    following = borders[rank + 1] if rank + 1 < ranks else nothing
    return torch.cat([previous[:, :before], v, following[:, before:]], dim=1)
