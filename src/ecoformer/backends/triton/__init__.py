"""Hashed attention in Triton, from tokens to output: two passes over the tokens, in causal order or without.

docs/kernels.md describes the kernels. If `TRITON_INTERPRET=1` is set before Triton is imported they run
on the CPU, slowly, for tests.
"""

from __future__ import annotations

import torch

from ecoformer.backends.fused import DTYPES, FusedCall
from ecoformer.backends.hashing import Functions, HashFunctions
from ecoformer.backends.triton.configs import HEAVY, capability
from ecoformer.backends.triton.hashing import INTERPRETED, VERSION
from ecoformer.backends.triton.launch import forward, kept, sizes_of
from ecoformer.backends.triton.launch_backward import backward

__all__ = ["backward", "cannot", "forward", "kept"]

_WIDEST, _MOST, _FEATURES, _CAUSAL_FEATURES = 128, 64, 128, 64
_LONGEST = 1 << 30
"""Tokens whose offsets in the memory of a backward fit 32 bits."""


def cannot(call: FusedCall, *, needs_grad: bool) -> str | None:
    """Why the kernels cannot run, in a few words; None where they can."""
    q, k, v = call.q, call.k, call.v
    if VERSION < (3, 3):
        # The compiler of 3.2 does not fail on some backward kernels, it aborts the process.
        return "it needs Triton 3.3"
    if any(x.dtype not in DTYPES for x in (q, v)):
        return "it takes fp32, bf16 and fp16"
    if call.key_weight is not None and call.key_weight.dtype not in DTYPES:
        return "it takes weights of keys in fp32, bf16 and fp16"
    if max(q.shape[-1], v.shape[-1]) > _WIDEST:
        return f"it takes heads of at most {_WIDEST} channels"
    if call.bits > _MOST or any(_samples(x) > _MOST for x in (call.functions, call.key_functions)):
        return f"it takes at most {_MOST} bits and {_MOST} support samples"
    if call.scale is not None:
        features = call.groups << call.group
        if features > (_CAUSAL_FEATURES if call.causal else _FEATURES):
            return "its states do not hold so many values of groups of bits"
        if call.causal and sizes_of(call).bulk > HEAVY:
            return "in causal order groups of bits of such wide heads do not fit on the chip"
    if call.causal and k is not None and k.shape[2] != q.shape[2]:
        return "in causal order it takes as many keys as queries"
    if needs_grad and q.shape[2] > _LONGEST:
        return "it has no gradient for so many tokens"
    return _no_device(v.device)


def _samples(functions: Functions | None) -> int:
    return functions.weight.shape[1] if isinstance(functions, HashFunctions) else 0


def _no_device(device: torch.device) -> str | None:
    if INTERPRETED.value:
        return None if device.type == "cpu" else "Triton's interpreter runs on the CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs a CUDA device"
    if capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None
