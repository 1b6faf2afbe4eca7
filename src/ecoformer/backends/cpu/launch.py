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
    state_rows,
)
from ecoformer.backends.cpu.threads import run_team, scratch
from ecoformer.backends.fused import FusedCall, empty_out
from ecoformer.backends.hashing import HashFunctions

_LEAST = 256
"""Tokens that are worth a thread of their own."""
_SHARES = 4
"""Into how many shares a thread's part is cut, lest all wait for one that was held up."""


class Plan(NamedTuple):
    """What depends on a call's sizes alone."""

    digit: int
    pieces: int
    size: int
    """Bytes of a thread's scratch memory."""
    layout: array[int]
    """`Places`, as the kernels read them."""


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
    threads: int,
) -> Plan:
    pieces = 1
    if heads < threads:
        pieces = max(1, min(-(-threads // heads), max(keys, queries) // _LEAST))
    digit = digit_of(bits, channels, keys, group or 1)
    at = places(dim, channels, samples, bits, digit, keys, group, apart)
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
    key_tensors = [] if call.key_functions is None else [x.contiguous() for x in call.key_functions]
    samples = functions.support.shape[1] if isinstance(functions, HashFunctions) else 0
    bits, group = call.bits, 0 if call.scale is None else call.bits // call.groups
    threads, rows = torch.get_num_threads(), batch * heads
    sizes = (dim, channels, samples, bits, group, bool(key_tensors))
    plan = _plan(rows, n_queries, n_keys, *sizes, 1 if call.causal else threads)
    shared = None
    if plan.pieces > 1:
        shared = _shared(rows, n_keys, channels, state_rows(bits, group), plan.pieces)
    constant = array("d", [call.constant])
    levels = [None if x is None else x.contiguous() for x in (call.scale, call.ratio, call.floor)]
    key_weight = None if call.key_weight is None else call.key_weight.float()
    numbers = [batch, heads, n_queries, n_keys, dim, channels, samples, bits, plan.digit, plan.pieces]
    numbers += [constant.buffer_info()[0], group, *(0 if x is None else x.data_ptr() for x in levels)]
    numbers += [*_place(q), *_place(keys), *_place(v), *_place(out)]
    numbers += [0, 0, 0] if mask is None else [mask.data_ptr(), *mask.stride()]
    numbers += [0, 0, 0, 0] if key_weight is None else [key_weight.data_ptr(), *key_weight.stride()]
    for each in (tensors, key_tensors):
        numbers += [0] * (4 - len(each)) + [x.data_ptr() for x in each]
    numbers += [0, 0, 0] if shared is None else [x.data_ptr() for x in shared]
    problem = array("q", numbers)
    if call.shared_codes:
        problem[KEYS] = 0
    elif shared is not None:
        problem[CODES] = 0
    parts, job = rows * plan.pieces, CAUSAL if call.causal else WHOLE if shared is None else GATHER
    members = min(threads, parts)
    shares = min(parts, _SHARES * members if members > 1 else 1)
    memory = scratch(members * plan.size)
    addresses = (problem.buffer_info()[0], plan.layout.buffer_info()[0])
    team = array("q", Team(0, 0, 0, job, parts, shares, memory, plan.size, *addresses))
    run_team(work.address, team.buffer_info()[0], members)
    return out if call.v.dtype == torch.float32 else out.to(call.v.dtype)


def _shared(heads: int, keys: int, channels: int, rows: int, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what lies between two passes: codes, and the parts' sums and tallies."""
    codes = torch.empty(heads * keys * 9, dtype=torch.uint8)
    sums = torch.empty(heads * pieces * rows * padded(channels))
    return codes, sums, torch.empty(heads * pieces * (rows + 1), dtype=torch.float64)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch, head, token
