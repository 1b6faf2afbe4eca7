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
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ecoformer.arguments import one_line
from ecoformer.backends import eager
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes, codes

__all__ = ["CannotRun", "Functions", "Fused", "HashFunctions", "Hyperplanes", "empty_out", "load", "run"]

Grads = Sequence[Tensor | None]


class CannotRun(RuntimeError):
    """A backend that said it could run finds that it cannot: eager takes over for good, with one warning."""


_broken: dict[str, str] = {}
"""Backends that raised `CannotRun`, and why."""


class Fused(Protocol):
    """The functions of a fused backend's module.

    q (B, H, N_q, D), k (B, H, N_k, D) or None where queries are also the keys, v (B, H, N_k, C) where C may
    differ from D: fp32, bf16 or fp16, all on one device, not empty, of any strides. `mask` (B, N_k) is bool,
    True for padding, or None. `functions` are in fp32. `beta` is what is added to the product of two codes.
    A query that sees no key reads zero. Shapes have been checked.
    """

    @staticmethod
    def cannot(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        mask: Tensor | None,
        functions: Functions,
        *,
        causal: bool,
        needs_grad: bool,
    ) -> str | None:
        """Why this call cannot be run, in a few words without numbers; None where it can.

        A backend that has no gradient for `functions.weight` refuses `needs_grad` where that requires one.
        """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        mask: Tensor | None,
        functions: Functions,
        beta: float,
        causal: bool,
        /,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, as `empty_out` made it, and new tensors that the backward wants."""

    @staticmethod
    def kept(
        q: Tensor, k: Tensor | None, v: Tensor, mask: Tensor | None, functions: Functions, causal: bool, /
    ) -> list[Tensor]:
        """Empty tensors of the shapes, dtypes and strides of those that `forward` hands to the backward."""

    @staticmethod
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        mask: Tensor | None,
        functions: Functions,
        beta: float,
        causal: bool,
        saved: list[Tensor],
        needs: tuple[bool, bool, bool, bool],
        /,
    ) -> Grads:
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


def plain(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
) -> Tensor:
    """The same in plain PyTorch."""
    with eager.full_precision(v.device):
        hq = codes(q, functions)
        hk = hq if k is None else codes(k, functions)
        bits = hq.shape[-1]
        wide = None if mask is None else mask[:, None].expand(v.shape[:-1])
        if causal:
            return eager.causal(hq, hk, v, wide, None, bits, beta, False)
        return eager.read(hq, eager.sums(hk, v, wide, bits), None, bits, beta, v.dtype)


def run(
    name: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
    needs_grad: bool,
) -> Tensor:
    """Attention by the backend `name`, which has said that it can."""
    support, mean, sigma = functions[:3] if isinstance(functions, HashFunctions) else (None, None, None)
    tensors = (q, k, v, mask, support, mean, sigma, functions.weight)
    out: Tensor
    if torch.compiler.is_compiling() or any(type(x) not in (Tensor, Parameter, NoneType) for x in tensors):
        out = eco_attention(*tensors, beta, causal, name)[0]
    elif needs_grad:
        out = _Quick.apply(*tensors, beta, causal, name)  # type: ignore[no-untyped-call]
    else:
        out = _forward(name, q, k, v, mask, functions, beta, causal)[0]
    return out


def _forward(
    name: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
) -> tuple[Tensor, list[Tensor]]:
    module = load(name)
    if isinstance(module, str):
        reason: str | None = module
    else:
        reason = module.cannot(q, k, v, mask, functions, causal=causal, needs_grad=False)
        if reason is None:
            try:
                return module.forward(q, k, v, mask, functions, beta, causal)
            except CannotRun as error:
                reason = _broken[name] = str(error)
    warn_once(name, str(reason))
    out = empty_out(q, v)
    out.copy_(plain(q, k, v, mask, functions, beta, causal))
    return out, _kept(name, q, k, v, mask, functions, causal)


def _kept(
    name: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    causal: bool,
) -> list[Tensor]:
    module = _import(name)
    return [] if isinstance(module, str) else module.kept(q, k, v, mask, functions, causal)


def _functions(
    support: Tensor | None, mean: Tensor | None, sigma: Tensor | None, weight: Tensor
) -> Functions:
    if support is None or mean is None or sigma is None:
        return Hyperplanes(weight)
    return HashFunctions(support, mean, sigma, weight)


@torch.library.custom_op(
    "ecoformer::eco_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor? k, Tensor v, Tensor? mask, Tensor? support, Tensor? mean, Tensor? sigma, "
    "Tensor weight, float beta, bool causal, str backend) -> (Tensor, Tensor[])",
)
def eco_attention(
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
    backend: str,
) -> tuple[Tensor, list[Tensor]]:
    """Tokens to output by the named backend, and what its backward wants; where it cannot run, eager does."""
    return _forward(backend, q, k, v, mask, _functions(support, mean, sigma, weight), beta, causal)


@eco_attention.register_fake
def _(
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
    backend: str,
) -> tuple[Tensor, list[Tensor]]:
    functions = _functions(support, mean, sigma, weight)
    return empty_out(q, v), _kept(backend, q, k, v, mask, functions, causal)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, ctx.beta, ctx.causal, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> Grads:
    return _gradients(ctx, grad, eco_attention_backward)


def _gradients(ctx: Any, grad: Tensor, backward: Callable[..., list[Tensor]]) -> Grads:
    """Of all inputs of the operator, by the operator's backward or by the function that it calls."""
    q, k, v, mask, support, mean, sigma, weight, *saved = ctx.saved_tensors
    asked = ctx.needs_input_grad
    needs = [asked[0], asked[1], asked[2], asked[7]]
    if isinstance(load(ctx.backend), str):
        functions = _functions(support, mean, sigma, weight)
        found = _plain_backward(grad, q, k, v, mask, functions, ctx.beta, ctx.causal, needs)
    else:
        tensors = (grad, q, k, v, mask, support, mean, sigma, weight)
        found = backward(*tensors, ctx.beta, ctx.causal, ctx.backend, saved, needs)
    to_q, to_k, to_v, to_weight = (x if needed else None for x, needed in zip(found, needs, strict=True))
    return to_q, to_k, to_v, None, None, None, None, to_weight, None, None, None


eco_attention.register_autograd(_backward, setup_context=_setup)


class _Quick(torch.autograd.Function):
    """The operator outside of compiled code, without what `torch.library` adds: a millisecond a layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """As `eco_attention`, the output alone."""
        q, k, v, mask, support, mean, sigma, weight, beta, causal, backend = inputs
        functions = _functions(support, mean, sigma, weight)
        output = _forward(backend, q, k, v, mask, functions, beta, causal)
        _setup(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> Any:
        """As the operator's."""
        return tuple(_gradients(ctx, grad, _backward_by))


@torch.library.custom_op(
    "ecoformer::eco_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor? k, Tensor v, Tensor? mask, Tensor? support, Tensor? mean, "
    "Tensor? sigma, Tensor weight, float beta, bool causal, str backend, Tensor[] saved, bool[] needs) "
    "-> Tensor[]",
)
def eco_attention_backward(
    grad: Tensor,
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
    backend: str,
    saved: list[Tensor],
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v and weight by the named backend, empty where not needed."""
    return _backward_by(
        grad, q, k, v, mask, support, mean, sigma, weight, beta, causal, backend, saved, needs
    )


def _backward_by(
    grad: Tensor,
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
    backend: str,
    saved: list[Tensor],
    needs: list[bool],
) -> list[Tensor]:
    module = load(backend)
    functions = _functions(support, mean, sigma, weight)
    wanted = (needs[0], needs[1], needs[2], needs[3])
    if isinstance(module, str):
        raise CannotRun(f'backend "{backend}" broke in compiled code ({module}): set ECOFORMER_BACKEND=eager')
    found = module.backward(grad, q, k, v, mask, functions, beta, causal, saved, wanted)
    for name, x, needed in zip(("q", "k", "v", "weight"), found, needs, strict=True):
        if needed and x is None:
            raise RuntimeError(f'backend "{backend}" gave no gradient for {name}')
    return [weight.new_empty(0) if x is None else x for x in found]


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
    needs: Sequence[bool],
) -> Grads:
    """Gradients by computing the output anew, where the backend broke after it was chosen."""
    inputs = (q, q if k is None else k, v, functions.weight)
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
    ours = functions._replace(weight=leaves[3])
    with torch.enable_grad():
        out = plain(leaves[0], None if k is None else leaves[1], leaves[2], mask, ours, beta, causal)
    grads = iter(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad))
    return [next(grads) if needed else None for needed in needs]


@eco_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor | None, v: Tensor, *rest: Any) -> list[Tensor]:
    weight, needs = rest[4], rest[9]
    inputs = (q, k, v, weight)
    return [
        weight.new_empty(0) if x is None or not needed else x.new_empty(x.shape)
        for x, needed in zip(inputs, needs, strict=True)
    ]
