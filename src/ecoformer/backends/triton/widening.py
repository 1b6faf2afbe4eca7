"""Where half precision takes the kernels of fp32.

On an H200 kernels for half precision were right wherever they were compared within the sizes below. With 32
bits they gave wrong gradients or met a misaligned address, and those of fp32 were right: docs/kernels_gpu.md.
"""

from __future__ import annotations

import torch

from ecoformer.backends.fused import Call, HashFunctions

_CHANNELS, _SUPPORT, _BITS = 64, 32, 16
"""Most that kernels for half precision are used for."""


def widened(call: Call) -> Call:
    """The call as the kernels get it."""
    q, k, v, _, functions, *_ = call
    all_wide = all(x is None or x.dtype == torch.float32 for x in (q, k, v))
    if all_wide or _within(q.shape[-1], v.shape[-1], functions):
        return call
    return call._replace(q=q.float(), k=None if k is None else k.float(), v=v.float())


def _within(dim: int, value_dim: int, functions: object) -> bool:
    if not isinstance(functions, HashFunctions):
        return True
    support, bits = functions.weight.shape[-2:]
    return max(dim, value_dim) <= _CHANNELS and support <= _SUPPORT and bits <= _BITS
