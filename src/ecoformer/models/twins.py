"""Twins-SVT-S, -B and -L with any mechanism in the first three stages, registered with timm.

`ecoformer_twins_svt_small` is timm's `twins_svt_small`, converted: windowed and global layers alike get the
mechanism. What `ecoformer.convert` makes of timm's model has the same names in its state dict.
"""

from __future__ import annotations

from typing import Any

from timm.models import twins as original

from ecoformer.models.vision import WithMechanism, carry_pretrained, default_cfgs_of, register_variants


class EcoTwins(WithMechanism, original.Twins):
    """timm's `Twins` with another mechanism instead of windows and spatial reduction.

    Arguments are those of `WithMechanism` and of timm's class.
    """

    takes_img_size = True


SIZES: dict[str, dict[str, Any]] = {
    "twins_svt_small": {
        "embed_dims": (64, 128, 256, 512),
        "num_heads": (2, 4, 8, 16),
        "depths": (2, 2, 10, 4),
    },
    "twins_svt_base": {
        "embed_dims": (96, 192, 384, 768),
        "num_heads": (3, 6, 12, 24),
        "depths": (2, 2, 18, 2),
    },
    "twins_svt_large": {
        "embed_dims": (128, 256, 512, 1024),
        "num_heads": (4, 8, 16, 32),
        "depths": (2, 2, 18, 2),
    },
}
for _sizes in SIZES.values():
    _sizes |= {"patch_size": 4, "mlp_ratios": (4, 4, 4, 4), "wss": (7, 7, 7, 7), "sr_ratios": (8, 4, 2, 1)}

default_cfgs = default_cfgs_of(original, SIZES)
register_variants(__name__, EcoTwins, SIZES, carry_pretrained, {"out_indices": 4, "feature_cls": "getter"})
