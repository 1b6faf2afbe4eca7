"""Kernels in C (`cpu.c`), in fp32, on PyTorch's own threads; other dtypes are converted."""

from __future__ import annotations

import ctypes
import os
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecoformer.affinity import group_size
from ecoformer.ops.eager import NEGATIVE, Gradients, to_affinity

LITTLE = 300_000
"""Numbers of a call that one thread computes before others could have started."""
_BACKWARD, _CAUSAL = 1, 2
_LANES = 16
_forked = False


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@cache
def library() -> Any:
    """The compiled kernels; None where they were not built."""
    try:
        return ctypes.CDLL(str(Path(__file__).with_name("_cpu.so")))
    except OSError:
        return None


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device."""
    if device.type != "cpu":
        return f"they are for the CPU, not for {device}"
    if library() is None:
        return "they were not built: install a C compiler, then ecoformer again"
    return None


def call(function: str, *numbers: int) -> int:
    """Call a C function with these numbers and addresses; it shares its work by OpenMP."""
    given = array("q", numbers)
    result: int = getattr(library(), function)(ctypes.c_void_p(given.buffer_info()[0]), _parallel())
    return result


def threads(numbers: int) -> int:
    """How many threads to share so much work: little work runs on one."""
    return 1 if _forked or numbers < LITTLE else torch.get_num_threads()


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
    given = (q, k, v, f, weight, state)
    _run(_CAUSAL if is_causal else 0, given, bits, {"out": out, "own": own, "below": below})
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
    wanted = {"dq": q, "dk": k, "dv": v, "dstate": state}
    floats = {name: x for name, x in wanted.items() if x is not None and x.is_floating_point()}
    new = {name: torch.empty(x.shape) for name, x in floats.items()}
    if weight is not None:
        new["dw"] = torch.empty(v.shape[:3])
    more: dict[str, Tensor | None] = {
        "grad": _plain(grad),
        "grad_own": grad_own,
        "out": _plain(out),
        "own": own,
        "below": below,
    }
    given = (q, k, v, f, weight, state)
    pairs = _run(_BACKWARD | (_CAUSAL if is_causal else 0), given, bits, {**more, **new})
    found = {name: new[name].to(x.dtype) for name, x in floats.items()}
    dw = None if weight is None else new["dw"].sum_to_size(weight.shape).to(weight.dtype)
    return found.get("dq"), found.get("dk"), found["dv"], to_affinity(pairs, f), dw, found.get("dstate")


def hash_forward(
    x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool
) -> Tensor:
    """As `eager.hash_forward`."""
    codes = x.shape[:3] if packed else (*x.shape[:3], weight.shape[2])
    out = torch.empty(codes, dtype=torch.int64 if packed else torch.float32)
    _hash(x, (support, mean, sigma, weight), **{"codes" if packed else "y": out})
    return out


def hash_backward(
    grad: Tensor, x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """As `eager.hash_backward`."""
    dx, dweight = torch.empty(x.shape), torch.zeros(x.shape[0], *weight.shape)
    grad = grad.float().contiguous()
    _hash(x, (support, mean, sigma, weight), grad=grad, dx=dx, dweight=dweight)
    return dx.to(x.dtype), dweight.sum(0).to(weight.dtype)


@cache
def _parallel() -> ctypes.c_void_p | None:
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError):
        return None


def _run(task: int, given: tuple[Tensor | None, ...], bits: int, more: dict[str, Tensor | None]) -> Tensor:
    """Fill what `more` holds; in the backward, returns the gradient of pairs of a group's values."""
    q, k, v, weight = (None if x is None else _plain(x) for x in (*given[:3], given[4]))
    f, state = (None if x is None else x.float().contiguous() for x in (given[3], given[5]))
    assert q is not None  # noqa: S101
    assert v is not None  # noqa: S101
    assert f is not None  # noqa: S101
    more = {name: _plain(x) if name == "grad_own" and x is not None else x for name, x in more.items()}
    (batch, heads, nk, d), nq, (groups, size) = v.shape, q.shape[2], (f.shape[1], group_size(f))
    rows, values = batch * heads, 1 << size
    members = threads(rows * max(nq, nk) * d * (3 if task & _BACKWARD else 1))
    pieces = members if rows < 4 * members and rows % members else 1
    table = groups * values * -(-d // _LANES) * _LANES + -(-groups * values // _LANES) * _LANES
    partial = torch.empty(rows * 2 * pieces * table if pieces > 1 or task & _BACKWARD else 0)
    mixing = torch.empty(f.shape[0] * (groups * values * values + 1))
    # In full order the first piece of a row knows the sums of all.
    pairs = torch.zeros(batch, heads, pieces if task & _BACKWARD else 0, groups, values, values)
    pairs_or_none, get = (pairs if pairs.numel() else None), more.get
    numbers = [
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
        int(f.ndim == 4),
        pieces,
        members,
    ]
    float_q, float_k = (
        q if q.is_floating_point() else None,
        k if k is not None and k.is_floating_point() else None,
    )
    inputs = (float_q, float_k, v, f, weight, q if float_q is None else None, k if float_k is None else None)
    outputs = (get("out"), get("own"), get("below"), get("dq"), get("dk"), get("dv"), pairs_or_none)
    tensors = (*inputs, state, get("grad"), get("grad_own"), *outputs, get("dw"), get("dstate"))
    numbers += [0 if x is None else x.data_ptr() for x in tensors]
    for x in (q, k, v, get("out"), get("grad")):
        numbers += (0, 0, 0) if x is None else x.stride()[:3]
    numbers += (0, 0) if weight is None else (weight.stride(0), weight.stride(1) * (weight.shape[1] > 1))
    refused = call("ecoformer_run", *numbers, partial.data_ptr(), mixing.data_ptr(), 0, 0)
    if refused:
        raise ValueError(NEGATIVE.format(tuple(f.shape)))
    return pairs.sum((0, 2))


def _hash(x: Tensor, functions: tuple[Tensor, ...], **more: Tensor) -> None:
    x, functions = _plain(x), tuple(p.float().contiguous() for p in functions)
    (batch, heads, n, d), (samples, bits) = x.shape, functions[3].shape[1:]
    members = threads(batch * heads * n * (d + bits) * samples // 20)
    numbers = [heads, batch * heads, n, d, samples, bits, members, x.data_ptr()]
    tensors = (*functions, *(more.get(name) for name in ("grad", "y", "dx", "dweight", "codes")))
    numbers += [0 if x is None else x.data_ptr() for x in tensors]
    call("ecoformer_hash", *numbers, *x.stride()[:3], 0, 0, 0, 0)


def _plain(x: Tensor) -> Tensor:
    """fp32 with its last dimension side by side; packed codes as int64."""
    if not x.is_floating_point():
        return x.to(torch.int64)
    x = x.float()
    return x if x.stride(-1) == 1 or x.ndim < 2 else x.contiguous()
