"""A call of the compiled kernels: how it is split, and what they are told."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer.backends.cpu.kernels import run
from ecoformer.backends.cpu.problem import CAUSAL, GATHER, SCATTER, WHOLE, Problem, padded, places
from ecoformer.backends.cpu.threads import scratch, spread
from ecoformer.backends.fused import empty_out
from ecoformer.backends.hashing import Functions, HashFunctions

_LEAST = 256
"""Tokens that are worth a thread of their own."""
_BYTES = 1 << 17
"""Most memory for buckets of whole bytes, and as much again for tables; beyond, digits are half a byte."""
_MANY = 512
"""Keys from which buckets of whole bytes pay their folding."""


def digit_of(bits: int, channels: int, keys: int) -> int:
    """Bits of a digit: 8 where there are keys enough and the cache is large enough, else 4."""
    buckets = (bits + 7) // 8 * 256
    return 8 if bits > 4 and keys >= _MANY and buckets * padded(channels) * 4 <= _BYTES else 4


def compile_kernels() -> None:
    """Compile, or read what was compiled before: a run over no heads."""
    nothing = Problem(*(1 for _ in Problem._fields))
    run(WHOLE, 0, 0, scratch(64), nothing, places(nothing))


def _rows(x: Tensor) -> Tensor:
    """fp32 with channels next to each other."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
) -> Tensor:
    """Attention of checked arguments, by as many threads as PyTorch would use."""
    dtype = v.dtype
    q, v = _rows(q.detach()), _rows(v.detach())
    k = q if k is None else _rows(k.detach())
    out = empty_out(q, v)
    batch, heads, queries, dim = q.shape
    keys, channels = v.shape[2:]
    kernel = isinstance(functions, HashFunctions)
    tensors = [x.detach().contiguous() for x in functions]
    bits = functions.weight.shape[-1]
    threads, groups = torch.get_num_threads(), batch * heads
    pieces = 1
    if groups < threads and not causal:
        pieces = max(1, min(-(-threads // groups), max(keys, queries) // _LEAST))
    wide = padded(channels)
    shared: tuple[Tensor, ...] = ()
    if pieces > 1:
        codes = torch.empty(groups * keys * 9, dtype=torch.uint8)
        sums = torch.empty(groups * pieces * (bits + 1) * wide)
        tallies = torch.empty(groups * pieces * (bits + 2), dtype=torch.int64)
        shared = (codes, sums, tallies)
    numbers = [
        batch,
        heads,
        queries,
        keys,
        dim,
        channels,
        tensors[0].shape[1] if kernel else 0,
        bits,
        digit_of(bits, channels, keys),
        pieces,
        int(beta),
        *_place(q),
        0 if k is q else k.data_ptr(),
        *k.stride()[:3],
        *_place(v),
        *_place(out),
        *((0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())),
        *([x.data_ptr() for x in tensors] if kernel else [0, 0, 0, tensors[0].data_ptr()]),
        *_shared(shared, k is q),
    ]
    problem = Problem(*numbers)
    at = places(problem)

    for job in [CAUSAL] if causal else [WHOLE] if pieces == 1 else [GATHER, SCATTER]:

        def work(first: int, last: int, job: int = job) -> None:
            run(job, first, last, scratch(at.end), problem, at)

        spread(work, groups * pieces, threads)
    return out if dtype == torch.float32 else out.to(dtype)


def _shared(tensors: tuple[Tensor, ...], keep_codes: bool) -> tuple[int, int, int]:
    if not tensors:
        return 0, 0, 0
    codes, sums, tallies = (x.data_ptr() for x in tensors)
    return codes if keep_codes else 0, sums, tallies


def _place(x: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return x.data_ptr(), batch, head, token
