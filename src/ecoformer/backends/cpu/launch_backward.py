"""A call of the compiled backward, and gradients made of what it writes."""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecoformer.backends.cpu.kernels_backward import work
from ecoformer.backends.cpu.launch import Launch, rows_of
from ecoformer.backends.cpu.problem import Gradients, padded
from ecoformer.backends.fused import FusedCall, Grads, Needs


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs) -> Grads:
    """Gradients of `DIFFERENTIABLE`; None where not needed."""
    launch, new = Launch(call, backward=True), partial(call.v.new_empty, dtype=torch.float32)
    inputs = call.differentiable()
    parts, bits = launch.heads * launch.plan.pieces, padded(call.bits)
    wanted = [x if needed else None for x, needed in zip(inputs, needs, strict=True)]
    q, k, v, key_weight = [None if x is None else new(x.shape) for x in wanted[:4]]
    # Queries and keys may have their own tokens and the same hash functions, to whose gradient both add.
    times = 2 if call.k is not None and call.key_functions is None else 1
    weight, key_hash = [
        None if x is None else new((count * parts, x.shape[1], bits))
        for x, count in zip(wanted[4:6], (times, 1), strict=True)
    ]
    levels = new((parts, 2, call.groups), dtype=torch.float64) if needs[6] or needs[7] else None
    shared = new((launch.heads, call.v.shape[2], bits)) if call.shared_codes else None
    codes = saved[2] if call.shared_codes and not call.causal else None
    tensors = (q, q if call.k is None else k, v, key_weight, weight, key_hash, levels, shared)
    addresses = array("q", Gradients(*[0 if x is None else x.data_ptr() for x in tensors]))
    launch.run(work, rows_of(grad), codes, saved[:2], addresses.buffer_info()[0])
    scale, ratio = (None, None) if levels is None else _levels(levels, call.bits, *inputs[6:])
    weights = _weights(call, weight, times), _weights(call, key_hash, 1)
    return [
        None if x is None or given is None else x if x.dtype == given.dtype else x.to(given.dtype)
        for x, given in zip((q, k, v, key_weight, *weights, scale, ratio), wanted, strict=True)
    ]


def _weights(call: FusedCall, parts: Tensor | None, times: int) -> Tensor | None:
    """The gradient of hash functions (H, m or D, b), summed over samples and parts of heads."""
    if parts is None:
        return None
    heads = call.v.shape[1]
    return parts.view(times, heads, -1, *parts.shape[1:]).sum(dim=(0, 2))[..., : call.bits].contiguous()


def _levels(parts: Tensor, bits: int, scale: Any, ratio: Any) -> tuple[Tensor, Tensor]:
    """Gradients of scale and ratio (H, G).

    What a group's value reads is scale times a matrix whose factor for each bit is [[1, ratio], [ratio, 1]].
    The derivative by ratio replaces one factor after the other by [[0, 1], [1, 0]], which is
    (X - ratio) / (1 - ratio^2) times the factor itself, where X flips the bit. Of what is read with the bit
    flipped the kernels write the difference to what is read: twice the bit times its gradient.
    """
    heads, groups = scale.shape
    same, products = parts.view(heads, -1, 2, groups).sum(dim=1).unbind(1)
    ratio = ratio.double()
    return same / scale, (bits // groups * (1 - ratio) * same - 2 * products) / (1 - ratio * ratio)
