"""Whether the fused backends are right on this machine: its compiler, driver and device are part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ecoformer.attention import HashedAttention
from ecoformer.benchmarking.attention import checked, draw_inputs
from ecoformer.benchmarking.operators import Setting, build_layer, operators_of
from ecoformer.benchmarking.results import Row


class Sizes(NamedTuple):
    """Heads and hash functions."""

    shape: tuple[int, int, int, int]
    bits: int
    support: int
    is_causal: bool = False


SIZES = (
    Sizes((4, 5, 196, 64), 16, 25),
    Sizes((4, 1, 3136, 32), 16, 25),
    Sizes((4, 2, 1024, 32), 32, 48),
    Sizes((2, 2, 300, 96), 8, 10),
    Sizes((2, 2, 700, 64), 16, 25, is_causal=True),
)
"""Short heads and long ones, common hash functions and large ones."""
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


def check_backends(
    device: torch.device, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """Rows without times: each fused backend against the reference, forward and, where it can, backward.

    Args:
        device: whose backends are checked.
        progress: told what is being done.
    """
    for sizes in SIZES:
        for dtype in _DTYPES.get(device.type, (torch.float32,)):
            setting = Setting(sizes.shape, dtype, device, sizes.is_causal)
            layer = build_layer("eco", setting, bits=sizes.bits, support=sizes.support)
            if not isinstance(layer, HashedAttention):
                raise TypeError("eco is no hashed attention: another mechanism was registered by that name")
            for backward in (False, True):
                for row in _check(layer, replace(setting, backward=backward), progress):
                    yield replace(row, setting=row.setting | {"bits": sizes.bits, "support": sizes.support})


def _check(layer: HashedAttention, setting: Setting, progress: Callable[[str], None]) -> Iterator[Row]:
    fused = [operator for operator in operators_of(layer, setting) if operator.backend != "eager"]
    if not fused:
        return
    inputs = draw_inputs(setting, [layer.hasher])
    for operator in fused:
        progress(f"{operator.backend}: {setting.shape} in {setting.dtype}, {layer.hasher.bits} bits")
        yield checked(operator, inputs, setting)
