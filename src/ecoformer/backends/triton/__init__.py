"""Hashed attention in Triton, from tokens to output: two passes over the tokens, in causal order or without.

docs/kernels.md describes the kernels. Where `TRITON_INTERPRET=1` was set before Triton was imported they run
on the CPU, slowly, for tests.
"""

from __future__ import annotations

import torch

from ecoformer.backends.fused import DTYPES, FusedCall, HashFunctions
from ecoformer.backends.triton.configs import capability
from ecoformer.backends.triton.hashing import INTERPRETED, VERSION
from ecoformer.backends.triton.launch import forward, kept
from ecoformer.backends.triton.launch_backward import backward

__all__ = ["backward", "cannot", "forward", "kept"]

_WIDEST, _MOST = 128, 64
_LONGEST = 1 << 30
"""Tokens whose places in what a backward keeps fit 32 bits."""


def cannot(call: FusedCall, *, needs_grad: bool) -> str | None:
    """Why the kernels cannot run, in a few words; None where they can."""
    q, k, v, functions = call.q, call.k, call.v, call.functions
    if VERSION < (3, 3):
        # The compiler of 3.2 does not fail on some backward kernels, it aborts the process.
        return "it needs Triton 3.3"
    if not isinstance(functions, HashFunctions):
        return "it has no kernel for hash functions by hyperplanes"
    if call.scale is not None or call.key_functions is not None or call.key_weight is not None:
        return "it has no kernel for groups of bits, keys' own hash functions or weights"
    if call.causal and k is not None:
        return "it has no kernel for causal order with keys of their own"
    if q.dtype not in DTYPES or v.dtype not in DTYPES:
        return "it takes fp32, bf16 and fp16"
    if max(q.shape[-1], v.shape[-1]) > _WIDEST:
        return f"it takes heads of at most {_WIDEST} channels"
    if max(functions.weight.shape[-2:]) > _MOST:
        return f"it takes at most {_MOST} bits and {_MOST} support samples"
    if needs_grad and q.shape[2] > _LONGEST:
        return "it has no gradient for so many tokens"
    return _no_device(v.device)


def _no_device(device: torch.device) -> str | None:
    if INTERPRETED.value:
        return None if device.type == "cpu" else "Triton's interpreter runs on the CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs a CUDA device"
    if capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None
