"""A call of the compiled kernels: how it is split, and what they are told."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ecoformer.backends.cpu.kernels import work
from ecoformer.backends.cpu.problem import (
    CAUSAL,
    CODES,
    GATHER,
    KEYS,
    WHOLE,
    Team,
    digit_of,
    padded,
    places,
)
from ecoformer.backends.cpu.threads import run_team, scratch
from ecoformer.backends.fused import FusedCall, empty_out
from ecoformer.backends.hashing import HashFunctions

_LEAST = 256
"""Tokens that are worth a thread of their own."""
_SHARES = 4
"""Into how many shares a thread's part is cut, lest all wait for one that was held up."""


class Plan(NamedTuple):
    """What hangs on a call's sizes alone."""

    digit: int
    pieces: int
    size: int
    """Bytes of a thread's scratch memory."""
    layout: array[int]
    """`Places`, as the kernels read them."""


@lru_cache(maxsize=256)
def _plan(
    groups: int, queries: int, keys: int, dim: int, channels: int, samples: int, bits: int, threads: int
) -> Plan:
    pieces = 1
    if groups < threads:
        pieces = max(1, min(-(-threads // groups), max(keys, queries) // _LEAST))
    digit = digit_of(bits, channels, keys)
    at = places(dim, channels, samples, bits, digit, keys)
    return Plan(digit, pieces, padded(at.end), array("q", at))


def _rows(x: Tensor) -> Tensor:
    """fp32 with channels next to each other."""
    if x.dtype != torch.float32:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(call: FusedCall) -> Tensor:
    """Attention by as many threads as PyTorch would use."""
    mask, functions = call.mask, call.functions
    q, v = _rows(call.q), _rows(call.v)
    keys = q if call.k is None else _rows(call.k)
    out = empty_out(q, v)
    batch, heads, n_queries, dim = q.shape
    n_keys, channels = v.shape[2:]
    tensors = [x.contiguous() for x in functions]
    samples = functions.support.shape[1] if isinstance(functions, HashFunctions) else 0
    bits = functions.weight.shape[-1]
    threads, groups = torch.get_num_threads(), batch * heads
    plan = _plan(groups, n_queries, n_keys, dim, channels, samples, bits, 1 if call.causal else threads)
    shared = _shared(groups, n_keys, channels, bits, plan.pieces) if plan.pieces > 1 else None
    numbers = [batch, heads, n_queries, n_keys, dim, channels, samples, bits, plan.digit, plan.pieces]
    numbers += [int(call.constant), *_place(q), *_place(keys), *_place(v), *_place(out)]
    numbers += [0, 0, 0] if mask is None else [mask.data_ptr(), *mask.stride()]
    numbers += ([] if samples else [0, 0, 0]) + [x.data_ptr() for x in tensors]
    numbers += [0, 0, 0] if shared is None else [x.data_ptr() for x in shared]
    problem = array("q", numbers)
    if call.k is None:
        problem[KEYS] = 0
    elif shared is not None:
        problem[CODES] = 0
    parts, job = groups * plan.pieces, CAUSAL if call.causal else WHOLE if shared is None else GATHER
    members = min(threads, parts)
    shares = min(parts, _SHARES * members if members > 1 else 1)
    room, addresses = scratch(members * plan.size), (problem.buffer_info()[0], plan.layout.buffer_info()[0])
    team = array("q", Team(0, 0, 0, job, parts, shares, room, plan.size, *addresses))
    run_team(work.address, team.buffer_info()[0], members)
    return out if call.v.dtype == torch.float32 else out.to(call.v.dtype)


def _shared(groups: int, keys: int, channels: int, bits: int, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what lies between two passes: codes, and the parts' sums and tallies."""
    codes = torch.empty(groups * keys * 9, dtype=torch.uint8)
    sums = torch.empty(groups * pieces * (bits + 1) * padded(channels))
    return codes, sums, torch.empty(groups * pieces * (bits + 2), dtype=torch.int64)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch, head, token
