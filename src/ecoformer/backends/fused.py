"""Hashed attention as one operator, from tokens to output: what a fused backend is, and its registration.

A fused backend is a module `ecoformer.backends.NAME` with the functions of `Fused`. Backends compute what
`plain` computes: tokens of any precision are hashed in fp32 and sums over tokens are kept in fp32. Codes may
differ where a projection is zero up to rounding, and nowhere else.
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

from ecoformer.affinity import Affinity, group_values, mixing
from ecoformer.arguments import one_line
from ecoformer.backends import eager
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes, Signs, codes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of tokens and values that fused backends take; all others are eager's."""
DIFFERENTIABLE = ("q", "k", "v", "key_weight", "hash weight", "key hash weight", "scale", "ratio")
_WHERE = (0, 1, 2, 4, 8, 12, 13, 14)
"""Where these are among the operator's tensors."""
TENSORS = 16
Grads = Sequence[Tensor | None]
Needs = tuple[bool, ...]
"""Whether each of `DIFFERENTIABLE` needs a gradient."""
PLAIN = (Tensor, Parameter, NoneType)


class CannotRun(RuntimeError):
    """A backend that said it could run finds that it cannot: eager takes over for good, with one warning."""


_broken: dict[str, str] = {}
"""Backends that raised `CannotRun`, and why."""


class FusedCall(NamedTuple):
    """One call of hashed attention; a query that sees no key reads zero.

    What a backend gets has been checked: shapes fit, tokens and values are fp32, bf16 or fp16 and not empty,
    all tensors are on one device. Strides may be any.
    """

    q: Tensor
    """(B, H, N_q, D)."""
    k: Tensor | None
    """(B, H, N_k, D), None where keys are made of the same tokens as queries."""
    v: Tensor
    """(B, H, N_k, C), where C may differ from D."""
    mask: Tensor | None
    """(B, N_k) bool, True for padding."""
    key_weight: Tensor | None
    """(B, H, N_k) of any float dtype."""
    functions: Functions
    """In fp32. `Signs`: q and k are projections, D = b."""
    key_functions: Functions | None
    """None where keys have the queries' hash functions."""
    scale: Tensor | None
    """(H, G) fp32: the affinity of two codes is the sum over G groups of bits of scale * ratio^d, where
    d bits of the group differ; None where it is constant + h . g."""
    ratio: Tensor | None
    floor: Tensor | None
    """(H,) fp32: denominators are at least this times the number of keys, or the sum of their weights."""
    constant: float
    causal: bool

    @property
    def bits(self) -> int:
        """b."""
        return self.q.shape[-1] if isinstance(self.functions, Signs) else self.functions.weight.shape[-1]

    @property
    def groups(self) -> int:
        """G."""
        return self.bits if self.scale is None else self.scale.shape[1]

    @property
    def group(self) -> int:
        """Bits of a group, 0 for the paper's affinity."""
        return 0 if self.scale is None else self.bits // self.scale.shape[1]

    @property
    def shared_codes(self) -> bool:
        """Whether a token's code as a query is its code as a key."""
        return self.k is None and self.key_functions is None

    def resolved(self) -> FusedCall:
        """Without lazy minus signs (`torch._neg_view`): kernels get addresses, which do not show them."""
        k, key_weight = (None if x is None else x.resolve_neg() for x in (self.k, self.key_weight))
        return self._replace(q=self.q.resolve_neg(), k=k, v=self.v.resolve_neg(), key_weight=key_weight)

    def flat(self) -> tuple[Any, ...]:
        """As the operators take them: `TENSORS` tensors or None, then numbers."""
        functions, key_functions = _spread(self.functions), _spread(self.key_functions)
        return (*self[:5], *functions, *key_functions, *self[7:])

    @classmethod
    def of(cls, *flat: Any) -> FusedCall:
        """The call that `flat` laid out."""
        functions, key_functions = _joined(flat[5:9]) or Signs(), _joined(flat[9:13])
        fields: tuple[Any, ...] = (*flat[:5], functions, key_functions, *flat[13:])
        return cls._make(fields)

    @classmethod
    def simple(cls, q: Tensor, v: Tensor, functions: Functions) -> FusedCall:
        """The paper's attention without further options."""
        call = cls(q, None, v, None, None, functions, None, None, None, None, 0.0, False)
        return call._replace(constant=Affinity.paper(call.bits).constant(call.bits) or 0.0)

    def differentiable(self) -> list[Tensor | None]:
        """The tensors named by `DIFFERENTIABLE`."""
        flat = self.flat()
        return [flat[i] for i in _WHERE]


def _spread(functions: Functions | None) -> tuple[Tensor | None, ...]:
    if functions is None or isinstance(functions, Signs):
        return None, None, None, None
    return (None, None, None, *functions) if isinstance(functions, Hyperplanes) else tuple(functions)


def _joined(tensors: Sequence[Tensor | None]) -> Any:
    if tensors[3] is None:
        return None
    return Hyperplanes(tensors[3]) if tensors[0] is None else HashFunctions(*cast(Any, tensors))


class Fused(Protocol):
    """The functions of a fused backend's module."""

    @staticmethod
    def cannot(call: FusedCall, *, needs_grad: bool) -> str | None:
        """Why this call cannot be run, in a few words without numbers; None where it can.

        A backend that lacks the gradient of an input refuses `needs_grad` where that requires one.
        """

    @staticmethod
    def forward(call: FusedCall, /, *, keep: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The output, as `empty_out` made it, and new tensors for the backward; none unless `keep`."""

    @staticmethod
    def kept(call: FusedCall, /) -> list[Tensor]:
        """Empty tensors of the shapes, dtypes and strides of those that `forward` keeps for the backward."""

    @staticmethod
    def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
        """Contiguous gradients of `DIFFERENTIABLE` in their dtypes; None where not needed.

        Where keys are made of the queries' tokens, the gradient of q has both parts.
        """


def load(name: str) -> Fused | str:
    """The module of a fused backend, or why it cannot be used at all."""
    return _broken[name] if name in _broken else _import(name)


def give_up(name: str, error: CannotRun) -> str:
    """Use a backend no more in this process; returns why."""
    reason = _broken[name] = str(error)
    return reason


@cache
def _import(name: str) -> Fused | str:
    try:
        return cast(Fused, importlib.import_module(f"ecoformer.backends.{name}"))
    except ImportError as error:
        return f"it cannot be imported: {one_line(error)}"


@cache
def warn_once(name: str, reason: str) -> None:
    """Warn once in a process that a backend could not run."""
    warnings.warn(f"backend '{name}' is unavailable ({reason}); using 'eager'", stacklevel=2)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output (B, H, N_q, C) in v's dtype, token by token: heads join without a copy."""
    batch, heads, tokens = q.shape[:3]
    return v.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)


def plain(call: FusedCall) -> Tensor:
    """The same in plain PyTorch."""
    v, mask = call.v, call.mask
    with eager.full_precision(v.device):
        dtype = eager.accumulator(v.dtype)
        hq = codes(call.q, call.functions).to(dtype)
        hk = hq
        if not call.shared_codes:
            tokens = call.q if call.k is None else call.k
            hk = codes(tokens, call.key_functions or call.functions).to(dtype)
        fq, fk, weights = hq, hk, eager.Weights(None, call.constant, None)
        if call.scale is not None and call.ratio is not None and call.floor is not None:
            fq, fk = (group_values(h, call.groups) for h in (hq, hk))
            mix = mixing(call.scale, call.ratio, call.group)
            weights = eager.Weights(mix, 0.0, call.floor.view(-1, 1, 1))
        wide = None if mask is None else mask[:, None].expand(v.shape[:-1])
        if call.causal:
            out = eager.causal(fq, fk, v, wide, call.key_weight, None, weights, eager.causal_product)
        else:
            out = eager.read(fq, eager.sums(fk, v, wide, call.key_weight), weights)
        return out.to(v.dtype)


def run(name: str, call: FusedCall, needs_grad: bool) -> Tensor:
    """Attention by the backend `name`, which has said that it can."""
    flat = call.flat()
    out: Tensor
    if torch.compiler.is_compiling() or any(type(x) not in PLAIN for x in flat[:TENSORS]):
        out = eco_attention(*flat, name)[0]
    elif needs_grad:
        out = _Direct.apply(*flat, name)  # type: ignore[no-untyped-call]
    else:
        out = _forward(name, call, keep=False)[0]
    return out


def _forward(name: str, call: FusedCall, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """By the backend, or by eager where that breaks."""
    module = load(name)
    if isinstance(module, str):
        reason = module
    else:
        try:
            return module.forward(call.resolved(), keep=keep)
        except CannotRun as error:
            reason = give_up(name, error)
    return _instead(name, call, keep, reason)


def _instead(name: str, call: FusedCall, keep: bool, reason: str) -> tuple[Tensor, list[Tensor]]:
    """By eager, with memory for what the backend would have kept."""
    warn_once(name, reason)
    out = empty_out(call.q, call.v)
    out.copy_(plain(call))
    return out, _kept(name, call) if keep else []


def _kept(name: str, call: FusedCall) -> list[Tensor]:
    module = _import(name)
    return [] if isinstance(module, str) else module.kept(call)


_ARGUMENTS = (
    "Tensor q, Tensor? k, Tensor v, Tensor? mask, Tensor? key_weight, Tensor? support, Tensor? mean, "
    "Tensor? sigma, Tensor? weight, Tensor? key_support, Tensor? key_mean, Tensor? key_sigma, "
    "Tensor? key_hash_weight, Tensor? scale, Tensor? ratio, Tensor? floor, float constant, bool causal, "
    "str backend"
)


@torch.library.custom_op(
    "ecoformer::eco_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor[])"
)
def eco_attention(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """Tokens to output by the named backend, and what its backward needs; where it cannot run, by eager."""
    *flat, backend = arguments
    module, call = load(backend), FusedCall.of(*flat)
    # Compiled code has its answer from the time when it was compiled.
    reason = None if isinstance(module, str) else module.cannot(call, needs_grad=False)
    return _forward(backend, call, keep=True) if reason is None else _instead(backend, call, True, reason)


@eco_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
    *flat, backend = arguments
    call = FusedCall.of(*flat)
    return empty_out(call.q, call.v), _kept(backend, call)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    ctx.numbers, ctx.backend = inputs[TENSORS:-1], inputs[-1]
    ctx.save_for_backward(*inputs[:TENSORS], *output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> Grads:
    return _gradients(ctx, grad, eco_attention_backward)


def _gradients(ctx: Any, grad: Tensor, backward: Callable[..., Grads]) -> Grads:
    """Of all inputs of the operator, by the operator's backward or by the function that it calls."""
    tensors = ctx.saved_tensors
    flat, saved = (*tensors[:TENSORS], *ctx.numbers), list(tensors[TENSORS:])
    needs = [ctx.needs_input_grad[i] for i in _WHERE]
    if isinstance(load(ctx.backend), str):
        found = plain_backward(FusedCall.of(*flat), grad, needs)
    else:
        found = backward(grad, *flat, ctx.backend, saved, needs)
    grads: list[Tensor | None] = [None] * (len(flat) + 1)
    for i, x, needed in zip(_WHERE, found, needs, strict=True):
        grads[i] = x if needed else None
    return tuple(grads)


eco_attention.register_autograd(_backward, setup_context=_setup)


class _Direct(torch.autograd.Function):
    """The operator outside of compiled code, without what `torch.library` adds: a millisecond a layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """As `eco_attention`, the output alone."""
        *flat, backend = inputs
        output = _forward(backend, FusedCall.of(*flat), keep=True)
        _setup(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> Any:
        """As the operator's."""
        try:
            return _gradients(ctx, grad, _backward_by)
        except CannotRun as error:
            # From now on `_gradients` takes eager's.
            warn_once(ctx.backend, give_up(ctx.backend, error))
            return _gradients(ctx, grad, _backward_by)


def _backward_by(*arguments: Any) -> Grads:
    """Gradients of `DIFFERENTIABLE` by the named backend, None where not needed."""
    grad, *flat, backend, saved, needs = arguments
    module, call = load(backend), FusedCall.of(*flat)
    if isinstance(module, str):
        raise CannotRun(f"backend '{backend}' broke in compiled code ({module}): set ECOFORMER_BACKEND=eager")
    found = module.backward(call.resolved(), grad.resolve_neg(), saved, tuple(needs))
    for name, x, needed in zip(DIFFERENTIABLE, found, needs, strict=True):
        if needed and x is None:
            raise RuntimeError(f"backend '{backend}' gave no gradient for {name}")
    return found


@torch.library.custom_op(
    "ecoformer::eco_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}, Tensor[] saved, bool[] needs) -> Tensor[]",
)
def eco_attention_backward(*arguments: Any) -> list[Tensor]:
    """The same, with empty tensors where not needed."""
    grad = arguments[0]
    return [grad.new_empty(0, dtype=torch.float32) if x is None else x for x in _backward_by(*arguments)]


@eco_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    _, *flat, _, _, needs = arguments
    inputs, like = FusedCall.of(*flat).differentiable(), flat[0]
    return [
        like.new_empty(0, dtype=torch.float32) if x is None or not needed else x.new_empty(x.shape)
        for x, needed in zip(inputs, needs, strict=True)
    ]


def plain_backward(call: FusedCall, grad: Tensor, needs: Sequence[bool]) -> Grads:
    """Gradients of `plain`, which computes the output again."""
    flat = list(call.flat())
    leaves = []
    for i, needed in zip(_WHERE, needs, strict=True):
        if needed:
            flat[i] = flat[i].detach().requires_grad_()
            leaves.append(flat[i])
    with torch.enable_grad():
        out = plain(FusedCall.of(*flat))
    grads = iter(torch.autograd.grad(out, leaves, grad))
    return [next(grads) if needed else None for needed in needs]
