"""Models that are small enough to be counted often, and counts of what really runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ecoformer.accounting.exact import count_operators
from ecoformer.models.pvt_v2 import EcoPyramidVisionTransformerV2
from ecoformer.operations import Counts


def pvt(attention: str = "eco", **config: Any) -> nn.Module:
    return EcoPyramidVisionTransformerV2(
        attention,
        config,
        img_size=64,
        depths=(1, 2, 1, 1),
        embed_dims=(8, 16, 24, 32),
        num_heads=(1, 2, 3, 4),
        mlp_ratios=(2, 2, 2, 2),
        num_classes=10,
    )


def executed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Counts, tuple[str, ...]]:
    """What a function or a module executes without gradients, and operators that have no rule."""
    with torch.no_grad(), count_operators() as counting:
        counting.enter("")
        function(*args, **kwargs)
    total = sum(counting.counts.values(), Counts())
    return total, tuple(dict.fromkeys(name for _, name in counting.uncounted))
