"""What a process works on: which samples of a batch, and which of their tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ecoformer.attention.splitting import check_split, split_tokens
from ecoformer.data.splits import Splits
from ecoformer.training.recipe import Recipe


class Division:
    """How processes divide the work; `split_tokens` neighbouring processes have the same samples.

    Attributes:
        rank: of the sets of processes that have different samples, the one that this process is in.
        ranks: how many such sets there are.
        group: the processes that have the same samples, in the order of their tokens; None where each has
            samples of its own.
    """

    group: dist.ProcessGroup | None

    def __init__(self, recipe: Recipe, splits: Splits, accelerator: Any) -> None:
        split, processes = recipe.split_tokens, accelerator.num_processes
        if processes % split:
            raise ValueError(
                f"split_tokens={split} must divide the number of processes, {processes}: start {split} or a "
                "multiple of that, or set split_tokens=1"
            )
        if split == 1:
            self.rank, self.ranks, self.group = accelerator.process_index, processes, None
            return
        if splits.kind == "images":
            raise ValueError(
                f"split_tokens={split} is for texts, but {recipe.data.name} holds images: set split_tokens=1"
            )
        shape, names = (processes // split, split), ("data", "tokens")
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        self.rank, self.ranks, self.group = mesh.get_local_rank("data"), shape[0], mesh.get_group("tokens")

    def splitting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which a model computes this process's tokens; outside it computes all of them."""
        return nullcontext() if self.group is None else split_tokens(model, self.group)


def check_model(model: nn.Module, recipe: Recipe, splits: Splits) -> None:
    """Refuse a model whose tokens cannot be split as the recipe wants, before anything is trained."""
    from ecoformer.models.text import TextEncoder, TwoTowerEncoder

    split = recipe.split_tokens
    if split == 1:
        return
    if not isinstance(model, (TextEncoder, TwoTowerEncoder)):
        raise ValueError(
            f"split_tokens={split} is for our text encoders, but start holds a {type(model).__name__}: "
            "set split_tokens=1"
        )
    try:
        check_split(model, splits.length, split)
    except ValueError as error:
        raise ValueError(f"split_tokens={split}: {error}; or set split_tokens=1") from None
