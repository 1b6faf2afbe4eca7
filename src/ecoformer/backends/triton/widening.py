"""Where half precision takes the kernels of fp32.

On Hopper GPUs a product of 64 rows or more goes on reading its left side from registers while the program
continues, and assemblers before CUDA 13.3 may hand these registers out too early: a kernel is then wrong
whenever it runs. On an H200 kernels for half precision were right for the sizes below; for 32 bits they gave
wrong gradients or met a misaligned address. Those of fp32 were right for larger sizes too.
"""

from __future__ import annotations

import torch

from ecoformer.backends.fused import Call, HashFunctions

_CHANNELS, _SUPPORT, _BITS = 64, 32, 16
"""Most that kernels for half precision are used for."""


def widened(call: Call) -> Call:
    """The call as the kernels get it."""
    q, k, v, _, functions, *_ = call
    if q.dtype == v.dtype == torch.float32 or _compared(q.shape[-1], v.shape[-1], functions):
        return call
    return call._replace(q=q.float(), k=None if k is None else k.float(), v=v.float())


def _compared(dim: int, value_dim: int, functions: object) -> bool:
    if not isinstance(functions, HashFunctions):
        return True
    support, bits = functions.weight.shape[-2:]
    return max(dim, value_dim) <= _CHANNELS and support <= _SUPPORT and bits <= _BITS
