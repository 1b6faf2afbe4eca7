"""PVTv2-B0 to B5 with any mechanism in the first three stages, registered with timm.

`ecoformer_pvt_v2_b0` is timm's `pvt_v2_b0`, converted: what `ecoformer.convert` makes of that has the same
names in its state dict.
"""

from __future__ import annotations

from typing import Any

from timm.models import pvt_v2 as original
from torch import nn

from ecoformer.models.vision import WithMechanism, carry_pretrained, default_cfgs_of, register_variants


class EcoPyramidVisionTransformerV2(WithMechanism, original.PyramidVisionTransformerV2):
    """timm's `PyramidVisionTransformerV2` with another mechanism instead of spatial reduction.

    Arguments are those of `WithMechanism` and of timm's class.
    """


def _carry(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    renamed = original.checkpoint_filter_fn(state_dict, model)  # type: ignore[no-untyped-call]
    return carry_pretrained(renamed, model)


SIZES: dict[str, dict[str, Any]] = {
    "pvt_v2_b0": {"depths": (2, 2, 2, 2), "embed_dims": (32, 64, 160, 256)},
    "pvt_v2_b1": {"depths": (2, 2, 2, 2)},
    "pvt_v2_b2": {"depths": (3, 4, 6, 3)},
    "pvt_v2_b3": {"depths": (3, 4, 18, 3)},
    "pvt_v2_b4": {"depths": (3, 8, 27, 3)},
    "pvt_v2_b5": {"depths": (3, 6, 40, 3), "mlp_ratios": (4, 4, 4, 4)},
}
for _sizes in SIZES.values():
    _sizes.setdefault("embed_dims", (64, 128, 320, 512))
    _sizes["num_heads"] = (1, 2, 5, 8)

default_cfgs = default_cfgs_of(original, SIZES)
register_variants(
    __name__,
    EcoPyramidVisionTransformerV2,
    SIZES,
    _carry,
    {"flatten_sequential": True, "out_indices": (0, 1, 2, 3)},
)
