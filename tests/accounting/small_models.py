"""Models that are small enough to be counted often."""

from typing import Any

from torch import nn

from ecoformer.models.pvt_v2 import EcoPyramidVisionTransformerV2


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
