"""Hash functions that come out the same on every rank, and for every number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def same_order(tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Samples (B, H, N, D), zero where they are padding, in an order that hangs on their content alone.

    Ranks hold the samples of a batch in another order than one process does; random draws must not notice.
    """
    _, heads, n, dim = tokens.shape
    place = torch.arange(n, dtype=torch.float64, device=tokens.device).cos()
    channel = torch.arange(heads * dim, dtype=torch.float64, device=tokens.device).cos().view(heads, dim)
    order = torch.einsum("bhnd,n,hd->b", tokens.double(), place, channel).argsort(stable=True)
    return tokens[order], None if valid is None else valid[order]


def gather_tokens(
    tokens: Tensor, valid: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """All ranks' samples (B, H, N, D), padded to the longest; ranks may differ in B and in N."""
    world = dist.get_world_size(group)
    batch, _, n, _ = tokens.shape
    mine = torch.tensor([batch, n, int(valid is not None)], device=tokens.device)
    sizes = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(sizes, mine, group=group)
    most, longest, masked = torch.stack(sizes).amax(dim=0).tolist()
    if valid is None:
        valid = tokens.new_ones(batch, n, dtype=torch.bool)
    tokens = F.pad(tokens, (0, 0, 0, longest - n, 0, 0, 0, most - batch)).contiguous()
    present = F.pad(valid.to(torch.uint8), (0, longest - n, 0, most - batch)).contiguous()
    all_tokens = [torch.empty_like(tokens) for _ in range(world)]
    all_present = [torch.empty_like(present) for _ in range(world)]
    dist.all_gather(all_tokens, tokens, group=group)
    dist.all_gather(all_present, present, group=group)
    counts = [int(size[0]) for size in sizes]
    tokens = torch.cat([x[:count] for x, count in zip(all_tokens, counts, strict=True)])
    whole = torch.cat([x[:count] for x, count in zip(all_present, counts, strict=True)]).bool()
    ragged = bool(masked) or any(int(size[1]) != longest for size in sizes)
    return tokens, whole if ragged else None


def broadcast_state(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Every tensor of `module` as the group's first rank has it.

    All ranks have learned from the same tokens; this removes what their devices may have rounded apart.
    """
    first = dist.get_global_rank(group, 0)
    for tensor in module.state_dict().values():
        if tensor.dtype == torch.bool:
            continue
        dist.broadcast(tensor, src=first, group=group)
