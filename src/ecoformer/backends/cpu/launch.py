"""A call of the compiled kernels: how it is split, and the numbers that they read."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecoformer.backends.cpu.kernels import work
from ecoformer.backends.cpu.problem import (
    CAUSAL,
    FULL,
    GATHER,
    digit_of,
    empty_codes,
    keep_for,
    layout,
    padded,
    pieces_of,
    state_rows,
)
from ecoformer.backends.cpu.threads import run_parts
from ecoformer.backends.fused import FusedCall, empty_out
from ecoformer.backends.hashing import HashFunctions


class Plan(NamedTuple):
    """What depends on a call's sizes alone."""

    digit: int
    pieces: int
    rows: int
    """Of a state."""
    size: int
    """Bytes of a thread's scratch memory."""
    layout: array[int]
    """`Layout`, as the kernels read it."""


@lru_cache(maxsize=256)
def _plan(
    heads: int,
    queries: int,
    keys: int,
    dim: int,
    channels: int,
    samples: int,
    bits: int,
    group: int,
    apart: bool,
    causal: bool,
    backward: bool,
    threads: int,
) -> Plan:
    pieces = 1 if causal else pieces_of(heads, max(keys, queries), threads)
    digit = digit_of(bits, channels, keys, group or 1)
    at = layout(dim, channels, samples, bits, digit, keys, group, apart, causal, backward)
    return Plan(digit, pieces, state_rows(bits, group), padded(at["end"]), array("q", at.values()))


class Launch:
    """One call's numbers, and the tensors that they are addresses of."""

    def __init__(self, call: FusedCall, backward: bool = False) -> None:
        functions, mask, weight = call.functions, call.mask, call.key_weight
        self.q, self.v = q, v = rows_of(call.q), rows_of(call.v)
        k = q if call.k is None else rows_of(call.k)
        batch, heads, queries, dim = q.shape
        keys, channels = v.shape[2:]
        key_functions = call.key_functions or ()
        samples = functions.support.shape[1] if isinstance(functions, HashFunctions) else 0
        bits, group = call.bits, call.group
        self.heads, self.threads, self.causal = batch * heads, torch.get_num_threads(), call.causal
        self.plan = plan = _plan(
            *(self.heads, queries, keys, dim, channels, samples, bits, group),
            *(bool(key_functions), call.causal, backward, self.threads),
        )
        constant = array("d", [call.constant])
        weight = None if weight is None else weight.float()
        levels = () if call.scale is None else (call.scale, call.ratio, call.floor)
        tensors = [x.contiguous() for x in (*functions, *key_functions, *levels)]
        self.held: Any = k, constant, weight, tensors
        pointers = [x.data_ptr() for x in tensors]
        own, apart = len(functions), len(key_functions)
        self.numbers = [batch, heads, queries, keys, dim, channels, samples, bits, plan.digit, plan.pieces]
        self.numbers += [constant.buffer_info()[0], group, *(pointers[own + apart :] or (0, 0, 0)), *place(q)]
        self.numbers += place(k)
        if call.shared_codes:
            self.numbers[-4] = 0
        self.numbers += place(v)
        self.rest = [0, 0, 0] if mask is None else [mask.data_ptr(), *mask.stride()]
        self.rest += [0, 0, 0, 0] if weight is None else [weight.data_ptr(), *weight.stride()]
        self.rest += [0] * (4 - own) + pointers[:own] + [0] * (4 - apart) + pointers[own : own + apart]

    def states(self, count: int) -> list[Tensor]:
        """Memory for states: their rows, and their tallies."""
        rows, new = self.plan.rows, self.v.new_empty
        return [new((count, rows, padded(self.v.shape[-1]))), new((count, rows + 1), dtype=torch.float64)]

    def run(
        self, function: Any, out: Tensor, codes: Tensor | None, kept: list[Tensor], gradients: int = 0
    ) -> None:
        """Call a compiled function on as many threads as PyTorch would use."""
        plan, parts = self.plan, self.heads * self.plan.pieces
        states = self.states(parts) if plan.pieces > 1 or gradients else []
        job = CAUSAL if self.causal else GATHER if plan.pieces > 1 else FULL
        numbers = [*self.numbers, *place(out), *self.rest, 0 if codes is None else codes.data_ptr()]
        numbers += [x.data_ptr() for x in states] or (0, 0)
        numbers += [x.data_ptr() for x in kept] or (0, 0)
        problem = array("q", numbers)
        addresses = (problem.buffer_info()[0], plan.layout.buffer_info()[0], gradients)
        run_parts(function.address, job, parts, self.threads, plan.size, addresses)


def attend(call: FusedCall, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the backward needs."""
    launch = Launch(call)
    out, kept = empty_out(launch.q, launch.v), keep_for(call) if keep else []
    codes = kept[2] if len(kept) > 2 else None
    if codes is None and launch.plan.pieces > 1 and call.shared_codes:
        codes = empty_codes(call)
    launch.run(work, out, codes, kept[:2])
    return out if call.v.dtype == torch.float32 else out.to(call.v.dtype), kept


def rows_of(x: Tensor) -> Tensor:
    """fp32 with channels next to each other."""
    if x.dtype != torch.float32:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def place(x: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of a tensor (B, H, N, C)."""
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch, head, token
