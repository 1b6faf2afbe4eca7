"""Kernels in C (`cpu.c`), on PyTorch's own threads."""

from __future__ import annotations

import ctypes
import os
from array import array
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ecoformer.affinity import group_size
from ecoformer.ops.eager import NEGATIVE, Gradients, to_affinity

LITTLE = 300_000
"""Numbers of a call that one thread computes before others could have started."""
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_forked = False
BACKWARD, CAUSAL = 1, 2


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@cache
def _library() -> tuple[Any, Any] | str:
    """The compiled function and OpenMP's, which runs a C function on PyTorch's threads; or what is missing."""
    try:
        library = ctypes.CDLL("/tmp/libcpu.so")
    except OSError as error:
        return f"its kernels were not built: {error}"
    run, hash_ = library.ecoformer_run, library.ecoformer_hash
    run.argtypes = hash_.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    try:
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        parallel = None
    return run, parallel, hash_


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device."""
    library = _library()
    if isinstance(library, str):
        return library
    return None if device.type == "cpu" else f"it is for the CPU, not for {device}"


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    bits: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `eager.forward`."""
    (batch, heads, n), d = q.shape[:3], v.shape[3]
    out = torch.empty(batch, n, heads, d).transpose(1, 2)
    own = torch.empty(batch, heads, f.shape[1] << group_size(f), d + 1)
    below = torch.empty(batch, heads, n)
    _run(CAUSAL if is_causal else 0, q, k, v, f, weight, state, bits, out=out, own=own, below=below)
    return out.to(v.dtype), own, below


def backward(
    grad: Tensor,
    grad_own: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    out: Tensor,
    own: Tensor,
    below: Tensor,
    bits: int,
    is_causal: bool,
) -> Gradients:
    """As `eager.backward`."""
    new = {"dv": torch.empty(v.shape)}
    if q.is_floating_point():
        new["dq"] = torch.empty(q.shape)
    if k is not None and k.is_floating_point():
        new["dk"] = torch.empty(k.shape)
    if weight is not None:
        new["dw"] = torch.empty(v.shape[:3])
    if state is not None:
        new["dstate"] = torch.empty(state.shape)
    df = _run(
        (CAUSAL if is_causal else 0) | BACKWARD,
        q,
        k,
        v,
        f,
        weight,
        state,
        bits,
        grad=grad,
        grad_own=grad_own,
        out=out,
        own=own,
        below=below,
        df=True,
        **new,
    )
    given = {"dq": q, "dk": k, "dv": v, "dw": weight, "dstate": state}
    for name, x in given.items():
        if name in new and name != "dw":
            new[name] = new[name].to(x.dtype)
    if weight is not None:
        new["dw"] = new["dw"].sum_to_size(weight.shape).to(weight.dtype)
    return new.get("dq"), new.get("dk"), new["dv"], df, new.get("dw"), new.get("dstate")


def _run(task, q, k, v, f, weight, state, bits, *, df=None, **more):
    def plain(x):
        if x is None:
            return None
        x = x.to(torch.int64) if x.dtype in _WHOLE else x.float()
        return x if x.stride(-1) == 1 or x.shape[-1] <= 1 or x.dtype == torch.int64 else x.contiguous()

    q, k, v, weight, f = plain(q), plain(k), plain(v), plain(weight), f.float().contiguous()
    for name in ("grad", "out"):
        if name in more:
            more[name] = plain(more[name])
    state = None if state is None else state.float().contiguous()
    for name in ("own", "grad_own"):
        if more.get(name) is not None:
            more[name] = more[name].float().contiguous()
    (batch, heads, nk, d), nq = v.shape, q.shape[2]
    groups, size = f.shape[1], group_size(f)
    rows = batch * heads
    threads = (
        1
        if _forked or rows * max(nq, nk) * d * (3 if task & BACKWARD else 1) < LITTLE
        else torch.get_num_threads()
    )
    pieces = threads if rows < 4 * threads and rows % threads else 1
    table = (groups << size) * (-(-d // 16) * 16) + -(-(groups << size) // 16) * 16
    partial = torch.empty(rows * 2 * pieces * table) if pieces > 1 or task & BACKWARD else None
    square = groups << 2 * size
    mixing = torch.empty(f.shape[0] * (square + 1))
    pairs = None
    if df:
        pairs = (torch.zeros if pieces > 1 and not task & CAUSAL else torch.empty)(
            batch, heads, pieces, groups, 1 << size, 1 << size
        )
    packed_q, packed_k = q.dtype == torch.int64, k is not None and k.dtype == torch.int64
    at = lambda x: 0 if x is None else x.data_ptr()
    get = more.get
    strides = lambda x: (0, 0, 0) if x is None else x.stride()[:3]
    call = array(
        "q",
        (
            task,
            heads,
            rows,
            nq,
            nk,
            bits,
            groups,
            size,
            d,
            f.shape[0],
            f.ndim == 4,
            pieces,
            threads,
            0 if packed_q else at(q),
            0 if packed_k else at(k),
            at(v),
            at(f),
            at(weight),
            at(q) if packed_q else 0,
            at(k) if packed_k else 0,
            at(state),
            at(get("grad")),
            at(get("grad_own")),
            at(get("out")),
            at(get("own")),
            at(get("below")),
            at(get("dq")),
            at(get("dk")),
            at(get("dv")),
            at(pairs),
            at(get("dw")),
            at(get("dstate")),
            *strides(q),
            *strides(k),
            *strides(v),
            *strides(get("out")),
            *strides(get("grad")),
            *(
                (0, 0)
                if weight is None
                else (weight.stride(0), 0 if weight.shape[1] == 1 else weight.stride(1))
            ),
            at(partial),
            at(mixing),
            0,
            0,
        ),
    )
    run, parallel, _ = _library()
    if run(call.buffer_info()[0], parallel):
        raise ValueError(NEGATIVE.format(tuple(f.shape)))
    if df:
        return to_affinity(pairs.sum((0, 2)), f)
    return None


def hash_forward(
    x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool
) -> Tensor:
    """As `eager.hash_forward`."""
    out = (
        torch.empty(x.shape[:3], dtype=torch.int64) if packed else torch.empty(*x.shape[:3], weight.shape[2])
    )
    _hash(x, support, mean, sigma, weight, **{"codes" if packed else "y": out})
    return out


def hash_backward(
    grad: Tensor, x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """As `eager.hash_backward`."""
    dx, dweight = torch.empty(x.shape), torch.zeros(x.shape[0], *weight.shape)
    _hash(x, support, mean, sigma, weight, grad=grad.float().contiguous(), dx=dx, dweight=dweight)
    return dx.to(x.dtype), dweight.sum(0).to(weight.dtype)


def _hash(x, support, mean, sigma, weight, **more):
    x = x.float()
    if x.stride(-1) != 1:
        x = x.contiguous()
    (batch, heads, n, d), (samples, bits) = x.shape, weight.shape[1:]
    functions = [t.float().contiguous() for t in (support, mean, sigma, weight)]
    threads = (
        1 if _forked or batch * heads * n * (d + bits) * samples < 20 * LITTLE else torch.get_num_threads()
    )
    pointers = [t.data_ptr() for t in functions]
    outputs = [
        0 if more.get(name) is None else more[name].data_ptr()
        for name in ("grad", "y", "dx", "dweight", "codes")
    ]
    call = array(
        "q",
        (
            heads,
            batch * heads,
            n,
            d,
            samples,
            bits,
            threads,
            x.data_ptr(),
            *pointers,
            *outputs,
            *x.stride()[:3],
            0,
            0,
            0,
            0,
        ),
    )
    _, parallel, hash_ = _library()
    hash_(call.buffer_info()[0], parallel)
