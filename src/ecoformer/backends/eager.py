"""Hashed attention in plain PyTorch: differentiable, vmappable, and the same on every device.

All sums of a head live in one matrix of (b + 1) x (D + 1) numbers, the *state*: with h' = [h, 1] and
v' = [v, 1] it is the sum of h' v'^T over the keys, so its last row holds the values' sum and its last
column the codes' sum, and their corner is the number of keys.

Codes are ±1 tensors (..., N, b) or packed integers (..., N). `operators.py` registers these functions with
`torch.library` and gives them backwards that keep memory linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 64
"""Tokens of a causal block: in-block work grows with it, the number of stored states shrinks."""
_SPAN_ELEMENTS = 1 << 22
"""Largest in-block affinity tensor that the causal product holds at a time."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tokens of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_packed(codes: Tensor, v: Tensor) -> bool:
    """Packed codes are integers and lack the trailing bit axis."""
    return codes.ndim == v.ndim - 1


def unpack(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Packed integers (...) as ±1 of `dtype` (..., bits); bit r of the integer is bit r of the code."""
    shifts = torch.arange(bits, device=packed.device)
    ones = (packed.to(torch.int64).unsqueeze(-1) >> shifts) & 1
    return (2 * ones - 1).to(dtype)


def signs(codes: Tensor, packed: bool, bits: int, dtype: torch.dtype) -> Tensor:
    """Codes of either form as ±1 of `dtype`."""
    return unpack(codes, bits, dtype) if packed else codes.to(dtype)


def without(mask: Tensor | None, x: Tensor) -> Tensor:
    """`x` (..., N, D) with masked tokens at zero, whatever they held (NaN included)."""
    return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Sums over tokens stay in fp32 under autocast too."""
    if device.type == "meta":  # autocast knows no such device, and nothing is rounded there
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def sums(codes: Tensor, v: Tensor, mask: Tensor | None, bits: int) -> Tensor:
    """State (..., b + 1, D + 1) from keys' codes and values (..., N, D); `mask` (..., N) marks padding."""
    with full_precision(v.device):
        dtype = accumulator(v.dtype)
        h = without(mask, signs(codes, is_packed(codes, v), bits, dtype))
        values = without(mask, v.to(dtype))
        count = values.new_full((*v.shape[:-2], 1, 1), v.shape[-2])
        if mask is not None:
            count = count - mask.sum(dim=-1)[..., None, None]
        top = torch.cat([h.mT @ values, h.sum(dim=-2).unsqueeze(-1)], dim=-1)
        last = torch.cat([values.sum(dim=-2, keepdim=True), count], dim=-1)
        return torch.cat([top, last], dim=-2)


def ratio(top: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators over the denominator in the last column, and that denominator.

    A query that sees no key (`count` 0) reads zero.
    """
    denominator = torch.where(count == 0, 1, top[..., -1:])
    return top[..., :-1] / denominator, denominator


def read(
    codes: Tensor, state: Tensor, own: Tensor | None, bits: int, beta: float, dtype: torch.dtype
) -> Tensor:
    """What queries' codes read from a state. `own` (..., N, D) replaces the values' sum (released code)."""
    with full_precision(state.device):
        h = signs(codes, is_packed(codes, state), bits, state.dtype)
        return ratio(read_top(h, state, own, beta), state[..., -1:, -1:])[0].to(dtype)


def read_top(h: Tensor, state: Tensor, own: Tensor | None, beta: float) -> Tensor:
    """Numerators and, in the last column, the denominator of every query."""
    return h @ state[..., :-1, :] + beta * bias_row(state, own, h.shape[-2])


def bias_row(state: Tensor, own: Tensor | None, n: int) -> Tensor:
    """What the bias multiplies: the sum of [v, 1] over the keys, or the token's own value and their count."""
    row = state[..., -1:, :]
    if own is None:
        return row
    own = torch.where(row[..., -1:] == 0, 0, own)  # where no key is seen, nothing is read
    return torch.cat([own.to(state.dtype), row[..., -1:].expand(*row.shape[:-2], n, 1)], dim=-1)


def causal(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    bits: int,
    beta: float,
    own_value: bool,
    product: Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None = None,
) -> Tensor:
    """Every token reads the sums over the tokens up to itself, on top of an earlier `state`."""
    with full_precision(v.device):
        hq, hk, values = causal_inputs(codes_q, codes_k, v, mask, bits)
        top = (product or causal_product)(hq, hk, values, False)
        top = causal_top(top, hq, values, state, beta, own_value)
        return ratio(top, running(values[..., -1:], state))[0].to(v.dtype)


def causal_inputs(
    codes_q: Tensor, codes_k: Tensor, v: Tensor, mask: Tensor | None, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both codes and [v, 1] in the accumulator's dtype, masked keys at zero."""
    dtype = accumulator(v.dtype)
    hq = signs(codes_q, is_packed(codes_q, v), bits, dtype)
    hk = without(mask, signs(codes_k, is_packed(codes_k, v), bits, dtype))
    values = torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], dim=-1)
    return hq, hk, without(mask, values)


def causal_top(
    top: Tensor, hq: Tensor, values: Tensor, state: Tensor | None, beta: float, own_value: bool
) -> Tensor:
    """Numerators and, in the last column, the denominator of every token, from the causal product `top`."""
    if state is not None:
        top = top + hq @ state[..., :-1, :].to(hq.dtype)
    if not own_value:
        return torch.add(top, running(values, state), alpha=beta)
    return top + beta * torch.cat([values[..., :-1], running(values[..., -1:], state)], dim=-1)


def running(values: Tensor, state: Tensor | None) -> Tensor:
    """Inclusive running sum of the trailing columns of [v, 1]."""
    total = values.cumsum(dim=-2)
    return total if state is None else total + state[..., -1:, -values.shape[-1] :].to(values.dtype)


def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t (s >= t if `reverse`), block by block.

    Its three derivatives are causal products themselves.
    """
    pieces = [piece for _, piece in causal_spans(a, b, c, reverse)]
    if not pieces:
        return torch.zeros_like(c)
    return torch.cat(pieces[::-1] if reverse else pieces, dim=-2)


def causal_spans(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Iterator[tuple[int, Tensor]]:
    """The causal product stretch by stretch: where each begins, and its tokens' outputs."""
    n = a.shape[-2]
    rows = max(1, a[..., 0, 0].numel()) if n else 1
    span = max(_CHUNK, _SPAN_ELEMENTS // (rows * _CHUNK) // _CHUNK * _CHUNK)
    carry = c.new_zeros(*c.shape[:-2], 1, a.shape[-1], c.shape[-1])
    starts = range(0, n, span)
    for start in reversed(starts) if reverse else starts:
        length = min(span, n - start)
        part_a, part_b, part_c = (x.narrow(-2, start, length) for x in (a, b, c))
        piece, carry = _causal_span(part_a, part_b, part_c, carry, reverse)
        yield start, piece


def _causal_span(a: Tensor, b: Tensor, c: Tensor, carry: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """One stretch of the causal product, all its blocks at once; `carry` is the sum before and after it."""
    n = a.shape[-2]
    a, b, c = (_blocks(x) for x in (a, b, c))
    sums_of_blocks = b.mT @ c
    if reverse:
        sums_of_blocks = sums_of_blocks.flip(-3)
    states = torch.cat([carry, sums_of_blocks], dim=-3).cumsum(dim=-3)
    before = states[..., :-1, :, :].flip(-3) if reverse else states[..., :-1, :, :]
    products = a @ b.mT
    out = (products.triu() if reverse else products.tril()) @ c + a @ before
    return out.flatten(-3, -2).narrow(-2, 0, n), states[..., -1:, :, :]


def _blocks(x: Tensor) -> Tensor:
    """(..., N, D) padded with zeros to (..., blocks, _CHUNK, D)."""
    padded = F.pad(x, (0, 0, 0, -x.shape[-2] % _CHUNK))
    return padded.reshape(*x.shape[:-2], padded.shape[-2] // _CHUNK, _CHUNK, x.shape[-1])
