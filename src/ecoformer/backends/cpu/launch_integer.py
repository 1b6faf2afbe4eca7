"""A call of the compiled kernels of integer attention: how it is split, and the numbers that they read."""

from __future__ import annotations

from array import array
from functools import lru_cache

import torch
from torch import Tensor

from ecoformer.backends.cpu.kernels_integer import attend, pack, scratch_of
from ecoformer.backends.cpu.problem import FULL, GATHER, digit_of, pieces_of
from ecoformer.backends.cpu.threads import run_parts
from ecoformer.backends.fused import empty_out
from ecoformer.backends.integer import LEVEL_BITS

_LINE = 64
"""Bytes of a cache line, where each thread's scratch memory begins."""
_LEAST_CODES = 4096
"""Codes that are worth a thread of their own."""


@lru_cache(maxsize=256)
def _plan(
    heads: int, queries: int, keys: int, channels: int, bits: int, group: int, threads: int
) -> tuple[int, int, int, int, array[int]]:
    """Bits of a digit, pieces, numbers of a state, bytes of scratch memory, and its layout."""
    digit = digit_of(bits, channels, keys, group)
    at = scratch_of(channels, bits, group, digit)
    pieces = pieces_of(heads, max(keys, queries), threads)
    return digit, pieces, at.wide - at.sums, -(-at.end // _LINE) * _LINE, array("q", at)


def integer_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    levels: Tensor,
    multiplier: Tensor,
    exponent: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """int8 outputs (B, H, N_q, C), see `backends.integer.integer_attention`."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    levels, multiplier = levels.contiguous(), multiplier.contiguous()
    batch, heads, keys, channels = v.shape
    queries, group = codes_q.shape[2], levels.shape[2] - 1
    bits, threads = levels.shape[1] * group, torch.get_num_threads()
    sizes = (queries, keys, channels, bits, group)
    digit, pieces, state, size, layout = _plan(batch * heads, *sizes, threads)
    out = empty_out(codes_q, v)
    parts = batch * heads * pieces
    states = torch.empty(parts * state if pieces > 1 else 0, dtype=torch.int32)
    numbers = [batch, heads, *sizes, digit, pieces, LEVEL_BITS - (keys - 1).bit_length()]
    numbers += [levels.data_ptr(), multiplier.data_ptr()]
    for codes in (codes_q, codes_k):
        numbers += [codes.data_ptr(), codes.element_size(), *codes.stride()]
    for x in (v, out):
        numbers += [x.data_ptr(), *x.stride()[:3]]
    numbers += [0] * 4 if exponent is None else [exponent.data_ptr(), *exponent.stride()]
    numbers += [0] * 3 if mask is None else [mask.data_ptr(), *mask.stride()]
    problem = array("q", [*numbers, states.data_ptr()])
    addresses = (problem.buffer_info()[0], layout.buffer_info()[0], 0)
    run_parts(attend.address, GATHER if pieces > 1 else FULL, parts, threads, size, addresses)
    return out


def pack_signs(sums: Tensor, least: Tensor, out: Tensor, bits: int) -> Tensor:
    """Packed codes (rows, codes) to `out`, see `backends.integer.pack_signs`."""
    rows, codes = out.shape
    sums = sums if sums.stride(1) == 1 else sums.contiguous()
    least = least.contiguous()
    numbers = [rows, codes, bits, out.element_size(), sums.data_ptr(), sums.stride(0)]
    problem = array("q", [*numbers, least.data_ptr(), out.data_ptr()])
    threads = min(torch.get_num_threads(), max(1, rows * codes // _LEAST_CODES))
    run_parts(pack.address, FULL, rows, threads, 0, (problem.buffer_info()[0], 0, 0))
    return out
