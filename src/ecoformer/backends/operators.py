"""The operators `ecoformer::code_sums`, `code_read` and `causal_read`, registered with `torch.library`.

Each has a fake, so that `torch.compile` and `torch.export` see shapes only, and a backward written by hand:
nothing of size N x b or N x D is kept for it but the inputs, and causal order stays linear in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.backends import eager
from ecoformer.backends.eager import accumulator, is_packed, signs, without

Grads = tuple[Tensor | None, ...]


def _top_grad(grad: Tensor, top: Tensor, count: Tensor) -> Tensor:
    """Gradient of [numerators, denominator] from the gradient of their ratio."""
    out, denominator = eager.ratio(top, count)
    numerators = grad.to(top.dtype) * torch.where(count == 0, 0, 1 / denominator)
    to_denominator = -(numerators * out).sum(dim=-1, keepdim=True)
    return torch.cat([numerators, to_denominator], dim=-1)


def _state_grad(h: Tensor, to_top: Tensor, beta: float, own_value: bool) -> Tensor:
    """Gradient of the state from that of [numerators, denominator] = h S + beta (bias row)."""
    row = beta * to_top.sum(dim=-2, keepdim=True)
    if own_value:
        row = torch.cat([torch.zeros_like(row[..., :-1]), row[..., -1:]], dim=-1)
    return torch.cat([h.mT @ to_top, row], dim=-2)


@torch.library.custom_op(
    "ecoformer::code_sums",
    mutates_args=(),
    schema="(Tensor codes, Tensor v, Tensor? mask, int bits) -> Tensor",
)
def code_sums(codes: Tensor, v: Tensor, mask: Tensor | None, bits: int) -> Tensor:
    """`eager.sums`, registered."""
    return eager.sums(codes, v, mask, bits)


@code_sums.register_fake
def _(codes: Tensor, v: Tensor, mask: Tensor | None, bits: int) -> Tensor:
    return v.new_empty(*v.shape[:-2], bits + 1, v.shape[-1] + 1, dtype=accumulator(v.dtype))


def _sums_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    codes, v, mask, ctx.bits = inputs
    ctx.save_for_backward(codes, v, mask)


def _sums_backward(ctx: Any, grad: Tensor) -> Grads:
    codes, v, mask = ctx.saved_tensors
    to_codes = to_v = None
    with eager.full_precision(v.device):
        if ctx.needs_input_grad[0]:
            values = without(mask, v.to(grad.dtype))
            to_codes = values @ grad[..., :-1, :-1].mT + grad[..., :-1, -1].unsqueeze(-2)
            to_codes = without(mask, to_codes).to(codes.dtype)
        if ctx.needs_input_grad[1]:
            h = without(mask, signs(codes, is_packed(codes, v), ctx.bits, grad.dtype))
            to_v = without(mask, h @ grad[..., :-1, :-1] + grad[..., -1:, :-1]).to(v.dtype)
    return to_codes, to_v, None, None


code_sums.register_autograd(_sums_backward, setup_context=_sums_setup)


@torch.library.custom_op(
    "ecoformer::code_read",
    mutates_args=(),
    schema="(Tensor codes, Tensor state, Tensor? own, int bits, float beta, ScalarType dtype) -> Tensor",
)
def code_read(
    codes: Tensor, state: Tensor, own: Tensor | None, bits: int, beta: float, dtype: torch.dtype
) -> Tensor:
    """`eager.read`, registered."""
    return eager.read(codes, state, own, bits, beta, dtype)


@code_read.register_fake
def _(codes: Tensor, state: Tensor, own: Tensor | None, bits: int, beta: float, dtype: torch.dtype) -> Tensor:
    n = codes.shape[-1 if is_packed(codes, state) else -2]
    return state.new_empty(*state.shape[:-2], n, state.shape[-1] - 1, dtype=dtype)


def _read_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    codes, state, own, ctx.bits, ctx.beta, _ = inputs
    ctx.save_for_backward(codes, state, own)


def _read_backward(ctx: Any, grad: Tensor) -> Grads:
    codes, state, own = ctx.saved_tensors
    to_codes = to_state = to_own = None
    with eager.full_precision(state.device):
        h = signs(codes, is_packed(codes, state), ctx.bits, state.dtype)
        to_top = _top_grad(grad, eager.read_top(h, state, own, ctx.beta), state[..., -1:, -1:])
        if ctx.needs_input_grad[0]:
            to_codes = (to_top @ state[..., :-1, :].mT).to(codes.dtype)
        if ctx.needs_input_grad[1]:
            to_state = _state_grad(h, to_top, ctx.beta, own is not None)
        if own is not None and ctx.needs_input_grad[2]:
            to_own = (ctx.beta * to_top[..., :-1]).to(own.dtype)
    return to_codes, to_state, to_own, None, None, None


code_read.register_autograd(_read_backward, setup_context=_read_setup)


@torch.library.custom_op(
    "ecoformer::causal_product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor c, bool reverse) -> Tensor",
)
def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Tensor:
    """`eager.causal_product`, registered: its loop stays out of compiled graphs.

    Written into one tensor: joining the stretches would hold them twice, and scatter the heap.
    """
    out = torch.empty(c.shape, dtype=c.dtype, device=c.device)
    for start, piece in eager.causal_spans(a, b, c, reverse):
        out.narrow(-2, start, piece.shape[-2]).copy_(piece)
    return out


@causal_product.register_fake
def _(a: Tensor, b: Tensor, c: Tensor, reverse: bool) -> Tensor:
    return c.new_empty(c.shape)


def _product_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _product_backward(ctx: Any, grad: Tensor) -> Grads:
    a, b, c = ctx.saved_tensors
    to_a, to_b, to_c = ctx.needs_input_grad[:3]
    return (
        causal_product(grad, c, b, ctx.reverse) if to_a else None,
        causal_product(c, grad, a, not ctx.reverse) if to_b else None,
        causal_product(b, a, grad, not ctx.reverse) if to_c else None,
        None,
    )


causal_product.register_autograd(_product_backward, setup_context=_product_setup)


@torch.library.custom_op(
    "ecoformer::causal_read",
    mutates_args=(),
    schema="(Tensor codes_q, Tensor codes_k, Tensor v, Tensor? mask, Tensor? state, int bits, float beta, "
    "bool own_value) -> Tensor",
)
def causal_read(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    bits: int,
    beta: float,
    own_value: bool,
) -> Tensor:
    """`eager.causal`, registered, on the registered product."""
    return eager.causal(codes_q, codes_k, v, mask, state, bits, beta, own_value, product=causal_product)


@causal_read.register_fake
def _(codes_q: Tensor, codes_k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _causal_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.bits, ctx.beta, ctx.own_value = inputs
    ctx.save_for_backward(*tensors)


def _causal_backward(ctx: Any, grad: Tensor) -> Grads:
    codes_q, codes_k, v, mask, state = ctx.saved_tensors
    to_q = to_k = to_v = to_state = None
    with eager.full_precision(v.device):
        hq, hk, values = eager.causal_inputs(codes_q, codes_k, v, mask, ctx.bits)
        top = causal_product(hq, hk, values, False)
        top = eager.causal_top(top, hq, values, state, ctx.beta, ctx.own_value)
        to_top = _top_grad(grad, top, eager.running(values[..., -1:], state))
        del top
        if ctx.needs_input_grad[0]:
            to_q = causal_product(to_top, values, hk, False)
            if state is not None:
                to_q = to_q + to_top @ state[..., :-1, :].mT.to(to_top.dtype)
            to_q = to_q.to(codes_q.dtype)
        if ctx.needs_input_grad[1]:
            to_k = causal_product(values, to_top, hq, True)
            to_k = without(mask, to_k).to(codes_k.dtype)
        del values
        if ctx.needs_input_grad[2]:
            to_v = causal_product(hk, hq, to_top[..., :-1], True)
            to_v = torch.add(to_v, _value_bias_grad(to_top[..., :-1], ctx.own_value), alpha=ctx.beta)
            to_v = without(mask, to_v).to(v.dtype)
        if state is not None and ctx.needs_input_grad[4]:
            to_state = _state_grad(hq, to_top, ctx.beta, ctx.own_value).to(state.dtype)
    return to_q, to_k, to_v, None, to_state, None, None, None


def _value_bias_grad(to_numerators: Tensor, own_value: bool) -> Tensor:
    """A value enters its own numerator only, or those of all tokens after it."""
    if own_value:
        return to_numerators
    return to_numerators.flip(-2).cumsum(dim=-2).flip(-2)


causal_read.register_autograd(_causal_backward, setup_context=_causal_setup)
