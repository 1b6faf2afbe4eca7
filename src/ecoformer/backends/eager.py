"""Hashed attention in plain PyTorch: differentiable, vmappable, and the same on every device.

It is linear attention over features of codes (`affinity.py`). All sums of a head are one matrix of (F + 1)
x (D + 1) numbers, the *state*: with f' = [f, 1] and v' = [v, 1] it is the sum of f' v'^T over the keys. Its
last row holds the values' sum, its last column the features' sum, and their corner the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.affinity import FLOOR, Affinity, mixing
from ecoformer.arguments import EXACT_WIDTHS

_CHUNK = 64
"""Tokens of a causal block: in-block work grows with it, the number of stored states shrinks."""
_SPAN_ELEMENTS = 1 << 22
"""Largest in-block affinity tensor that the causal product holds at a time."""

Product = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Weights(NamedTuple):
    """What the rows of a state count when it is read."""

    mix: Tensor | None
    """(..., G, 2^s, 2^s): rows of a group are mixed by this; None where every row counts 1."""
    constant: float
    """Weight of the last row."""
    floor: Tensor | float | None
    """Denominators are at least this times the number of keys; None where they are larger anyway."""

    @classmethod
    def of(cls, affinity: Affinity, bits: int, v: Tensor) -> Weights:
        """The weights of an affinity for values `v`."""
        constant = affinity.constant(bits)
        if constant is not None:
            return cls(None, constant, FLOOR * constant if affinity.needs_floor(bits) else None)
        like = v.new_empty(0, dtype=accumulator(v.dtype))
        mix = mixing(*affinity.levels(bits, like), affinity.size(bits))
        floor = FLOOR * affinity.total(like).view(-1, 1, 1)
        return cls(mix[0], 0.0, floor[0]) if v.ndim == 2 else cls(mix, 0.0, floor)

    def mixed(self, rows: Tensor) -> Tensor:
        """Rows (..., F, D) of a state as they are read."""
        if self.mix is None:
            return rows
        groups, values = self.mix.shape[-3:-1]
        grouped = rows.reshape(*rows.shape[:-2], groups, values, rows.shape[-1])
        return (self.mix @ grouped).flatten(-3, -2)

    def divide(self, top: Tensor, count: Tensor) -> Tensor:
        """Numerators over the denominators in the last column; zero for a query that sees no key."""
        below = top[..., -1:]
        if self.floor is not None:
            below = torch.maximum(below, self.floor * count)
        return top[..., :-1] / torch.where(count == 0, 1, below)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tokens of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in the dtype in which sums over it are kept."""
    return x.to(accumulator(x.dtype))


def unpack(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Packed integers (...) as ±1 of `dtype` (..., bits); bit r of the integer is bit r of the code."""
    shifts = torch.arange(bits, device=packed.device)
    ones = (packed.to(torch.int64).unsqueeze(-1) >> shifts) & 1
    return (2 * ones - 1).to(dtype)


def pack(ones: Tensor) -> Tensor:
    """Bits (..., b), True or False, as one integer each (...): the inverse of `unpack`.

    The top bit of an int64 is its sign: the sum wraps around to it, as two's complement requires.
    """
    bits = ones.shape[-1]
    powers = torch.ones(bits, dtype=torch.int64, device=ones.device) << torch.arange(bits, device=ones.device)
    return (ones.to(torch.int64) * powers).sum(dim=-1).to(EXACT_WIDTHS.get(bits, torch.int64))


def features(codes: Tensor, affinity: Affinity, bits: int, v: Tensor) -> Tensor:
    """The affinity's features of codes, ±1 or packed, in the dtype of sums over `v`."""
    dtype = accumulator(v.dtype)
    signs = unpack(codes, bits, dtype) if codes.ndim == v.ndim - 1 else codes.to(dtype)
    return affinity.features(signs)


def without(mask: Tensor | None, x: Tensor) -> Tensor:
    """`x` (..., N, D) with masked tokens at zero, whatever they held (NaN included)."""
    return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Sums over tokens stay in fp32 under autocast too."""
    if device.type == "meta":  # autocast does not know it, and nothing is rounded there
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def sums(f: Tensor, v: Tensor, mask: Tensor | None, key_weight: Tensor | None) -> Tensor:
    """State (..., F + 1, D + 1) from keys' features and values (..., N, D).

    `mask` and `key_weight` are (..., N).
    """
    f, values = without(mask, f), without(mask, v.to(f.dtype))
    if key_weight is None:
        count = values.new_full((*v.shape[:-2], 1, 1), v.shape[-2])
        if mask is not None:
            count = count - mask.sum(dim=-1)[..., None, None]
        ones = f.sum(dim=-2).unsqueeze(-1)
    else:
        weight = without(mask, key_weight.to(f.dtype).unsqueeze(-1))
        values, count, ones = values * weight, weight.sum(dim=-2, keepdim=True), f.mT @ weight
    top = torch.cat([f.mT @ values, ones], dim=-1)
    last = torch.cat([values.sum(dim=-2, keepdim=True), count], dim=-1)
    return torch.cat([top, last], dim=-2)


def read(f: Tensor, state: Tensor, weights: Weights) -> Tensor:
    """What queries' features read from a state."""
    last = state[..., -1:, :]
    count = last[..., -1:]
    top = f @ weights.mixed(state[..., :-1, :])
    if weights.constant:
        top = top + weights.constant * last
    return weights.divide(top, count)


def causal(
    f_q: Tensor,
    f_k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_weight: Tensor | None,
    state: Tensor | None,
    weights: Weights,
    product: Product,
) -> Tensor:
    """Every token reads the sums over the tokens up to itself, on top of an earlier `state`."""
    f_q, f_k = weights.mixed(f_q.mT).mT, without(mask, f_k)
    values = torch.cat([v.to(f_q.dtype), v.new_ones(*v.shape[:-1], 1, dtype=f_q.dtype)], dim=-1)
    if key_weight is not None:
        values = values * key_weight.unsqueeze(-1)
    values = without(mask, values)
    top = product(f_q, f_k, values, False)
    if state is not None:
        top = top + f_q @ state[..., :-1, :].to(f_q.dtype)
    count = _running(values[..., -1:], state)
    if weights.constant:
        top = torch.add(top, _running(values, state), alpha=weights.constant)
    return weights.divide(top, count)


def _running(values: Tensor, state: Tensor | None) -> Tensor:
    """Inclusive running sum of the trailing columns of [v, 1]."""
    total = values.cumsum(dim=-2)
    return total if state is None else total + state[..., -1:, -values.shape[-1] :].to(values.dtype)


def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t (s >= t if `reverse`), block by block.

    Its three derivatives are causal products themselves.
    """
    pieces = [piece for _, piece in _spans(a, b, c, reverse)]
    if not pieces:
        return torch.zeros_like(c)
    return torch.cat(pieces[::-1] if reverse else pieces, dim=-2)


def _spans(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Iterator[tuple[int, Tensor]]:
    """The causal product span by span: where each begins, and its tokens' outputs."""
    n = a.shape[-2]
    rows = max(1, a[..., 0, 0].numel()) if n else 1
    span = max(_CHUNK, _SPAN_ELEMENTS // (rows * _CHUNK) // _CHUNK * _CHUNK)
    carry = c.new_zeros(*c.shape[:-2], 1, a.shape[-1], c.shape[-1])
    starts = range(0, n, span)
    for start in reversed(starts) if reverse else starts:
        length = min(span, n - start)
        part_a, part_b, part_c = (x.narrow(-2, start, length) for x in (a, b, c))
        piece, carry = _span(part_a, part_b, part_c, carry, reverse)
        yield start, piece


def _span(a: Tensor, b: Tensor, c: Tensor, carry: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """One span of the causal product, all its blocks at once; `carry` is the sum before and after it."""
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


@torch.library.custom_op(
    "ecoformer::causal_product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor c, bool reverse) -> Tensor",
)
def registered_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Tensor:
    """`causal_product` as an operator: its loop stays out of compiled graphs, its backward linear in memory.

    Written into one tensor: joining the spans would hold them twice.
    """
    out = torch.empty(c.shape, dtype=c.dtype, device=c.device)
    for start, piece in _spans(a, b, c, reverse):
        out.narrow(-2, start, piece.shape[-2]).copy_(piece)
    return out


@registered_product.register_fake
def _(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Tensor:
    return c.new_empty(c.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, c = ctx.saved_tensors
    to_a, to_b, to_c = ctx.needs_input_grad[:3]
    return (
        registered_product(grad, c, b, ctx.reverse) if to_a else None,
        registered_product(c, grad, a, not ctx.reverse) if to_b else None,
        registered_product(b, a, grad, not ctx.reverse) if to_c else None,
        None,
    )


registered_product.register_autograd(_backward, setup_context=_setup)
