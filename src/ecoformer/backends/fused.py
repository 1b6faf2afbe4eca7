"""Hashed attention as one operator, from tokens to output: what a fused backend is, and its registration.

A fused backend is a module `ecoformer.backends.NAME` with the functions of `Fused`. Backends compute what
`plain` computes: tokens of whatever precision are hashed in fp32 and sums over tokens are kept in fp32. Codes
may differ where a projection is zero up to rounding, and nowhere else.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ecoformer.arguments import one_line
from ecoformer.backends import eager
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes, codes

__all__ = [
    "DTYPES",
    "Call",
    "CannotRun",
    "Functions",
    "Fused",
    "Grads",
    "HashFunctions",
    "Hyperplanes",
    "Needs",
    "empty_out",
    "load",
    "run",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of tokens and values that fused backends take; all others are eager's."""
Grads = Sequence[Tensor | None]
Needs = tuple[bool, bool, bool, bool]
"""Whether q, k, v and the weight want a gradient."""
_PLAIN = (Tensor, Parameter, NoneType)


class CannotRun(RuntimeError):
    """A backend that said it could run finds that it cannot: eager takes over for good, with one warning."""


_broken: dict[str, str] = {}
"""Backends that raised `CannotRun`, and why."""


class Call(NamedTuple):
    """One call of hashed attention; a query that sees no key reads zero.

    What a backend gets has been checked: shapes fit, tokens and values are fp32, bf16 or fp16 and not empty,
    all tensors are on one device. Strides may be any.
    """

    q: Tensor
    """(B, H, N_q, D)."""
    k: Tensor | None
    """(B, H, N_k, D), None where queries are also the keys."""
    v: Tensor
    """(B, H, N_k, C), where C may differ from D."""
    mask: Tensor | None
    """(B, N_k) bool, True for padding."""
    functions: Functions
    """In fp32."""
    beta: float
    """What is added to the product of two codes."""
    causal: bool
    own_value: bool = False
    """Above, beta multiplies the query's own value, zero for padding, and not the sum of all: the released
    code's form. Queries are the keys then."""

    def flat(self) -> tuple[Any, ...]:
        """Eight tensors or None, beta, causal and own_value, as the operators take them."""
        q, k, v, mask, functions, *rest = self
        planes = isinstance(functions, Hyperplanes)
        return (q, k, v, mask, *((None, None, None) if planes else ()), *functions, *rest)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        mask: Tensor | None,
        support: Tensor | None,
        mean: Tensor | None,
        sigma: Tensor | None,
        weight: Tensor,
        beta: float,
        causal: bool,
        own_value: bool,
    ) -> Call:
        """The call that `flat` laid out."""
        functions: Functions = Hyperplanes(weight)
        if support is not None and mean is not None and sigma is not None:
            functions = HashFunctions(support, mean, sigma, weight)
        return cls(q, k, v, mask, functions, beta, causal, own_value)


class Fused(Protocol):
    """The functions of a fused backend's module."""

    @staticmethod
    def cannot(call: Call, *, needs_grad: bool) -> str | None:
        """Why this call cannot be run, in a few words without numbers; None where it can.

        A backend that has no gradient for `functions.weight` refuses `needs_grad` where that requires one.
        """

    @staticmethod
    def forward(call: Call, /, *, keep: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The output, as `empty_out` made it, and new tensors that the backward wants; none unless `keep`."""

    @staticmethod
    def kept(call: Call, /) -> list[Tensor]:
        """Empty tensors of the shapes, dtypes and strides of those that `forward` hands to the backward."""

    @staticmethod
    def backward(call: Call, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
        """Contiguous gradients of q, k, v and `functions.weight`, in their dtypes; None where not needed.

        Queries that are also the keys get both parts of their gradient as that of q.
        """


def load(name: str) -> Fused | str:
    """The module of a fused backend, or why it cannot be used at all."""
    return _broken[name] if name in _broken else _import(name)


@cache
def _import(name: str) -> Fused | str:
    try:
        return cast(Fused, importlib.import_module(f"ecoformer.backends.{name}"))
    except ImportError as error:
        return f"it cannot be imported: {one_line(error)}"


@cache
def warn_once(name: str, reason: str) -> None:
    """Say once in a process that a backend could not run."""
    warnings.warn(f'backend "{name}" cannot run, so that eager does: {reason}', stacklevel=2)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output (B, H, N_q, C) in v's dtype, token by token: heads join without a copy."""
    batch, heads, tokens, _ = q.shape
    return v.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)


def plain(call: Call) -> Tensor:
    """The same in plain PyTorch."""
    q, k, v, mask, functions, beta, causal, own_value = call
    with eager.full_precision(v.device):
        hq = codes(q, functions)
        hk = hq if k is None else codes(k, functions)
        bits = hq.shape[-1]
        wide = None if mask is None else mask[:, None].expand(v.shape[:-1])
        if causal:
            return eager.causal(hq, hk, v, wide, None, bits, beta, own_value)
        own = eager.without(wide, v) if own_value else None
        return eager.read(hq, eager.sums(hk, v, wide, bits), own, bits, beta, v.dtype)


def run(name: str, call: Call, needs_grad: bool) -> Tensor:
    """Attention by the backend `name`, which has said that it can."""
    flat = call.flat()
    out: Tensor
    if torch.compiler.is_compiling() or any(type(x) not in _PLAIN for x in flat[:8]):
        out = eco_attention(*flat, name)[0]
    elif needs_grad:
        out = _Quick.apply(*flat, name)  # type: ignore[no-untyped-call]
    else:
        out = _forward(name, call, keep=False)[0]
    return out


def _forward(name: str, call: Call, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """By the backend, or by eager where that breaks."""
    module = load(name)
    if isinstance(module, str):
        reason = module
    else:
        try:
            return module.forward(call, keep=keep)
        except CannotRun as error:
            reason = _broken[name] = str(error)
    return _instead(name, call, keep, reason)


def _instead(name: str, call: Call, keep: bool, reason: str) -> tuple[Tensor, list[Tensor]]:
    """By eager, with room for what the backend would have kept."""
    warn_once(name, reason)
    out = empty_out(call.q, call.v)
    out.copy_(plain(call))
    return out, _kept(name, call) if keep else []


def _kept(name: str, call: Call) -> list[Tensor]:
    module = _import(name)
    return [] if isinstance(module, str) else module.kept(call)


@torch.library.custom_op(
    "ecoformer::eco_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor? k, Tensor v, Tensor? mask, Tensor? support, Tensor? mean, Tensor? sigma, "
    "Tensor weight, float beta, bool causal, bool own_value, str backend) -> (Tensor, Tensor[])",
)
def eco_attention(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """Tokens to output by the named backend, and what its backward wants; where it cannot run, eager does."""
    *flat, backend = arguments
    module, call = load(backend), Call.of(*flat)
    # Compiled code has its answer from the time when it was compiled.
    reason = None if isinstance(module, str) else module.cannot(call, needs_grad=False)
    return _forward(backend, call, keep=True) if reason is None else _instead(backend, call, True, reason)


@eco_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    *flat, backend = arguments
    call = Call.of(*flat)
    return empty_out(call.q, call.v), _kept(backend, call)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, ctx.beta, ctx.causal, ctx.own_value, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> Grads:
    return _gradients(ctx, grad, eco_attention_backward)


def _gradients(ctx: Any, grad: Tensor, backward: Callable[..., Grads]) -> Grads:
    """Of all inputs of the operator, by the operator's backward or by the function that it calls."""
    tensors = ctx.saved_tensors
    flat, saved = (*tensors[:8], ctx.beta, ctx.causal, ctx.own_value), list(tensors[8:])
    asked = ctx.needs_input_grad
    needs = [asked[0], asked[1], asked[2], asked[7]]
    if isinstance(load(ctx.backend), str):
        found = plain_backward(Call.of(*flat), grad, needs)
    else:
        found = backward(grad, *flat, ctx.backend, saved, needs)
    to_q, to_k, to_v, to_weight = (x if needed else None for x, needed in zip(found, needs, strict=True))
    return to_q, to_k, to_v, None, None, None, None, to_weight, None, None, None, None


eco_attention.register_autograd(_backward, setup_context=_setup)


class _Quick(torch.autograd.Function):
    """The operator outside of compiled code, without what `torch.library` adds: a millisecond a layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """As `eco_attention`, the output alone."""
        *flat, backend = inputs
        output = _forward(backend, Call.of(*flat), keep=True)
        _setup(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> Any:
        """As the operator's."""
        try:
            return tuple(_gradients(ctx, grad, _backward_by))
        except CannotRun as error:
            # From now on `_gradients` takes eager's.
            _broken[ctx.backend] = str(error)
            warn_once(ctx.backend, str(error))
            return tuple(_gradients(ctx, grad, _backward_by))


def _backward_by(*arguments: Any) -> Grads:
    """Gradients of q, k, v and weight by the named backend, None where not needed."""
    grad, *flat, backend, saved, needs = arguments
    module, call = load(backend), Call.of(*flat)
    if isinstance(module, str):
        raise CannotRun(f'backend "{backend}" broke in compiled code ({module}): set ECOFORMER_BACKEND=eager')
    found = module.backward(call, grad, saved, tuple(needs))
    for name, x, needed in zip(("q", "k", "v", "weight"), found, needs, strict=True):
        if needed and x is None:
            raise RuntimeError(f'backend "{backend}" gave no gradient for {name}')
    return found


@torch.library.custom_op(
    "ecoformer::eco_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor? k, Tensor v, Tensor? mask, Tensor? support, Tensor? mean, "
    "Tensor? sigma, Tensor weight, float beta, bool causal, bool own_value, str backend, Tensor[] saved, "
    "bool[] needs) -> Tensor[]",
)
def eco_attention_backward(*arguments: Any) -> list[Tensor]:
    """The same, with empty tensors where not needed."""
    grad = arguments[0]
    return [grad.new_empty(0, dtype=torch.float32) if x is None else x for x in _backward_by(*arguments)]


@eco_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    _, *flat, _, _, needs = arguments
    call = Call.of(*flat)
    inputs, weight = (call.q, call.k, call.v, call.functions.weight), call.functions.weight
    return [
        weight.new_empty(0) if x is None or not needed else x.new_empty(x.shape)
        for x, needed in zip(inputs, needs, strict=True)
    ]


def plain_backward(call: Call, grad: Tensor, needs: Sequence[bool]) -> Grads:
    """Gradients of `plain`, which computes the output anew."""
    inputs = (call.q, call.q if call.k is None else call.k, call.v, call.functions.weight)
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
    q, k, v, weight = leaves
    functions = call.functions._replace(weight=weight)
    with torch.enable_grad():
        out = plain(call._replace(q=q, k=None if call.k is None else k, v=v, functions=functions))
    grads = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad))
    return [next(grads) if needed else None for needed in needs]
