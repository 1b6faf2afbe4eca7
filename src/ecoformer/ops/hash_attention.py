"""Hashed attention: the operator, its checks and its gradients, and which kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ecoformer import affinity as affinities
from ecoformer.ops import eager

KERNELS = ("eager", "cpu", "triton")
_wanted: ContextVar[str | None] = ContextVar("ecoformer_kernels", default=None)


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Within the context, hashed attention runs in "eager", on "cpu" kernels or on "triton" kernels.

    What the kernels do not take runs in eager all the same. By default the fastest that takes a call runs.
    """
    if name not in KERNELS:
        raise ValueError(f'kernels are "eager", "cpu" or "triton", got {name!r}')
    token = _wanted.set(name)
    try:
        yield
    finally:
        _wanted.reset(token)


def hash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    affinity: Tensor | None = None,
    *,
    key_weight: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    state: Tensor | None = None,
    return_state: bool = False,
    process_group: dist.ProcessGroup | None = None,
    bits: int | None = None,
) -> Any:
    """Attention whose weights are the affinities of binary codes: linear in tokens, in time and memory.

    Like `F.scaled_dot_product_attention`, but a query and a key count by how many of their signs agree:
    out_i = sum_j a(i, j) w_j v_j / sum_j a(i, j) w_j. Sums over tokens are in fp32 (fp64 for fp64).

    Args:
        q: (B, H, N_q, b) real numbers; their signs are the codes, sign(0) = +1, NaN counts as negative. The
            gradient of a bit is half the difference between its two values, passed where abs(q) <= 1. Or
            packed codes (B, H, N_q), see `pack_codes`, without a gradient.
        k: (B, H, N_k, b) or packed codes. Where it is the same tensor as `q`, codes are computed once.
        v: (B, H, N_k, D).
        affinity: what a group of s bits counts when d of them differ, (1 or H, G, s + 1), or for each pair of
            its values (1 or H, G, 2^s, 2^s); s <= 8. `ecoformer.affinity` makes them; None is the paper's.
        key_weight: (B, H, N_k), positive: how much each key counts.
        key_padding_mask: (B, N_k) bool, True where a key is padding. It may hold anything, NaN included.
        is_causal: token t sees the tokens up to and including t; needs N_q = N_k.
        state: (B, H, G 2^s, D + 1), sums over keys seen before: those of a stream, or of a fixed memory.
        return_state: return (output, state after all keys); the state is fp64, so that counting never stops.
        process_group: ranks over which tokens are split, in rank order. States are exchanged, with gradients
            of the sum of all ranks' losses.
        bits: b, which packed codes do not say.

    Returns:
        (B, H, N_q, D) in v's dtype; a query that sees no key reads zero.
    """
    width = _check(q, k, v, key_weight, key_padding_mask, is_causal, bits)
    if affinity is not None:
        _check_affinity(affinity, v, width)
    if state is not None:
        size = 4 if affinity is None else affinities.group_size(affinity)
        rows = affinities.group_count(width, size) << size
        remedy = ": keep batch, heads, bits and D of the stream"
        _require("state", state, v, (*v.shape[:2], rows, v.shape[3] + 1), remedy)
    weight = key_weight
    if key_padding_mask is not None:
        seen = ~key_padding_mask.unsqueeze(1)
        weight = seen.to(eager.accumulator(v.dtype)) if weight is None else torch.where(seen, weight, 0)
    keys = None if k is q else k
    if process_group is None:
        out, own = _apply(q, keys, v, affinity, weight, state, width, is_causal)
        after = own.double() if state is None else own.double() + state
    else:
        _, own = _apply(q[:, :, :0], k, v, affinity, weight, None, width, False)
        total, before = _exchange(own.double(), process_group)
        if state is not None:
            total, before = total + state, before + state
        if is_causal:
            out, _ = _apply(q, keys, v, affinity, weight, before, width, True)
        else:
            out, _ = _apply(q, k[:, :, :0], v[:, :, :0], affinity, None, total, width, False)
        after = total
    return (out, after) if return_state else out


class _HashAttention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        f: Tensor | None,
        weight: Tensor | None,
        state: Tensor | None,
        bits: int,
        is_causal: bool,
    ) -> Any:  # spelled out: the compiler counts parameters
        return torch.ops.ecoformer.hash_attention(q, k, v, f, weight, state, bits, is_causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        out, own, below = output
        *tensors, ctx.bits, ctx.is_causal = inputs
        ctx.mark_non_differentiable(below)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, own, below)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_own: Tensor | None, _: None) -> Any:
        *tensors, out, own, below = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        found = torch.ops.ecoformer.hash_attention_backward(
            grad, grad_own, *tensors, out, own, below, ctx.bits, ctx.is_causal
        )
        given = zip(found, tensors, ctx.needs_input_grad, strict=False)
        return (*(x if needed and tensor is not None else None for x, tensor, needed in given), None, None)


def _apply(*given: Any) -> tuple[Tensor, Tensor]:
    operator = _HashAttention.apply if wants_gradient(*given) else torch.ops.ecoformer.hash_attention
    out, own, _ = operator(*given)
    return out, own


def wants_gradient(*given: Any) -> bool:
    """Whether any of these tensors takes a gradient."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)


# ---- The registered operators ------------------------------------------------------------------------------

_library = torch.library.Library("ecoformer", "FRAGMENT")
_GIVEN = "Tensor q, Tensor? k, Tensor v, Tensor? f, Tensor? weight, Tensor? state"
_library.define(f"hash_attention({_GIVEN}, int bits, bool is_causal) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"hash_attention_backward(Tensor grad, Tensor? grad_own, {_GIVEN}, Tensor out, Tensor own, "
    "Tensor below, int bits, bool is_causal) -> Tensor[]"
)


@torch.library.impl(_library, "hash_attention", "CompositeExplicitAutograd")
def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    f, v, bits = given[3], given[2], given[6]
    forward = kernels_for(v, bits, "forward")
    looks = forward is eager.forward and f is not None and f.device.type == "cpu"  # kernels look themselves
    if looks and not bool((affinities.least(f, bits) >= 0).all()):
        raise ValueError(eager.NEGATIVE.format(tuple(f.shape)))
    with eager.full_precision(v.device):
        found: tuple[Tensor, Tensor, Tensor] = forward(*with_affinity(given, 3))
    return found


@torch.library.impl(_library, "hash_attention_backward", "CompositeExplicitAutograd")
def _backward(*given: Any) -> list[Tensor]:
    with eager.full_precision(given[4].device):
        found = kernels_for(given[4], given[11], "backward")(*with_affinity(given, 5))
    found = (*found[:3], None if given[5] is None else found[3], *found[4:])
    return [given[0].new_empty(0) if x is None else x for x in found]


def with_affinity(given: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """The arguments with the paper's affinity where there is none."""
    if given[at] is not None:
        return given
    f = affinities.paper(given[-2], device=given[at - 1].device)
    return (*given[:at], f, *given[at + 1 :])


@torch.library.register_fake("ecoformer::hash_attention")
def _(q: Tensor, k: Tensor | None, v: Tensor, f: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, n), d = q.shape[:3], v.shape[3]
    out = v.new_empty(batch, n, heads, d).transpose(1, 2)
    size = 4 if f is None else affinities.group_size(f)
    rows = affinities.group_count(given[-2], size) << size
    after = v.new_empty(batch, heads, rows, d + 1, dtype=eager.accumulator(v.dtype))
    return out, after, v.new_empty(batch, heads, n, dtype=eager.accumulator(v.dtype))


@torch.library.register_fake("ecoformer::hash_attention_backward")
def _(grad: Tensor, grad_own: Tensor | None, *given: Any) -> list[Tensor]:
    q, k, v, f, weight, state = given[:6]
    packed = not q.dtype.is_floating_point
    found = [q, k, v, f, weight, state]
    return [
        grad.new_empty(0)
        if x is None or (packed and x is q) or (packed and x is k)
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in found
    ]


@torch.library.register_vmap("ecoformer::hash_attention")
def _(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
    joined = as_heads(info.batch_size, dims, given, heads_of(given[0], dims[0]), {3})
    found = torch.ops.ecoformer.hash_attention(*joined)
    return tuple(x.unflatten(1, (info.batch_size, -1)) for x in found), (1, 1, 1)


@torch.library.register_vmap("ecoformer::hash_attention_backward")
def _(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
    rows = 0 if given[5] is None else given[5].shape[0 if dims[5] != 0 else 1]
    joined = as_heads(info.batch_size, dims, given, heads_of(given[2], dims[2]), {5})
    found = torch.ops.ecoformer.hash_attention_backward(*joined)
    for i, x in enumerate(found):
        if i == 3 and rows:  # of f: (n H, ...) to (n, 1 or H, ...)
            x = x.unflatten(0, (info.batch_size, -1))
            found[i] = x.sum(1, keepdim=True) if rows == 1 else x
        else:
            found[i] = (
                x.unflatten(1, (info.batch_size, -1)).movedim(1, 0)
                if x.numel()
                else x.new_empty(info.batch_size, 0)
            )
    return found, [0] * len(found)


def as_heads(
    count: int, dims: tuple[int | None, ...], given: tuple[Any, ...], heads: int, first: set[int]
) -> list[Any]:
    """The arguments of `count` calls as those of one with so many times the heads.

    Heads are the second dimension, but the first one of the arguments that `first` names by place.
    """
    joined: list[Any] = []
    for i, (x, dim) in enumerate(zip(given, dims, strict=True)):
        if isinstance(x, Tensor):
            at = 0 if i in first else 1
            x = x.unsqueeze(at) if dim is None else x.movedim(dim, at)
            sizes = list(x.shape)
            sizes[at : at + 2] = count, heads
            x = x.expand(sizes).flatten(at, at + 1)
        joined.append(x)
    return joined


def heads_of(x: Tensor, dim: int | None) -> int:
    """How many heads each of the calls has that vmap joins in x."""
    return int(x.shape[1] if dim is None else x.movedim(dim, 0).shape[2])


# ---- Kernels and checks ------------------------------------------------------------------------------------


def kernels_for(x: Tensor, bits: int, function: str) -> Any:
    """A function of the kernels that compute a call on `x`, or of eager."""
    name = _wanted.get() or {"cpu": "cpu", "cuda": "triton"}.get(x.device.type, "eager")
    if name != "eager" and bits <= 64 and x.dtype != torch.float64:
        module = import_module(f"ecoformer.ops.{name}")
        if module.unavailable(x.device) is None and hasattr(module, function):
            return getattr(module, function)
    return getattr(eager, function)


def _exchange(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The sum of all ranks' states, and of those of the ranks before this one."""
    import torch.distributed.nn.functional as differentiable

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    slots = torch.stack([own if r == rank else torch.zeros_like(own) for r in range(ranks)])
    slots = differentiable.all_reduce(slots, group=group)
    return slots.sum(0), slots[:rank].sum(0)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_weight: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    bits: int | None,
) -> int:
    """Refuse what does not fit, in one line; returns b."""
    if v.ndim != 4 or not v.is_floating_point():
        raise ValueError(f"v must be floating point (B, H, N, D), got {_said(v)}")
    batch, heads, tokens = v.shape[:3]
    width = bits
    for name, x in (("q", q), ("k", k)):
        packed = not x.is_floating_point()
        if x.ndim != (3 if packed else 4) or x.shape[:2] != (batch, heads) or x.device != v.device:
            raise ValueError(
                f"{name} must be numbers (B, H, N, b) or packed codes (B, H, N) beside v {_said(v)}, "
                f"got {_said(x)}"
            )
        most = min(64, 8 * x.element_size())
        if packed and (bits is None or not 1 <= bits <= most):
            raise ValueError(
                f"{name} {_said(x)} holds packed codes: pass bits=b, from 1 to {most}, got {bits}"
            )
        if not packed:
            if width not in (None, x.shape[3]) or not x.shape[3]:
                raise ValueError(f"{name} must have b = {width} bits as the other codes, got {_said(x)}")
            width = x.shape[3]
    if k.shape[2] != tokens:
        raise ValueError(f"k {_said(k)} and v {_said(v)} must have the same number of tokens")
    if is_causal and q.shape[2] != tokens:
        raise ValueError(f"is_causal=True needs N_q = N_k, got q {_said(q)} and k {_said(k)}")
    if key_weight is not None:
        _require("key_weight", key_weight, v, (batch, heads, tokens))
    if mask is not None and (
        mask.dtype != torch.bool or mask.shape != (batch, tokens) or mask.device != v.device
    ):
        square = mask.ndim > 1 and mask.shape[-1] == mask.shape[-2] == tokens
        remedy = "for causal order use is_causal=True" if square else "True where a key is padding"
        raise ValueError(
            f"key_padding_mask must be bool (B, N_k) = {(batch, tokens)} on {v.device}, {remedy}, "
            f"got {_said(mask)}"
        )
    assert width is not None  # noqa: S101
    return width


def _check_affinity(f: Tensor, v: Tensor, bits: int) -> None:
    size = affinities.group_size(f) if f.ndim in (3, 4) else 0
    groups = affinities.group_count(bits, size) if 1 <= size <= affinities.LARGEST else 0
    rows = (size + 1,) if f.ndim == 3 else (1 << size,) * 2
    fits = groups and f.shape[0] in (1, v.shape[1]) and f.shape[1:] == (groups, *rows)
    if not fits or f.device != v.device or not f.is_floating_point():
        raise ValueError(
            f"affinity must be floating point (1 or H, G, s + 1) or (1 or H, G, 2^s, 2^s) on {v.device}, "
            f"with H = {v.shape[1]}, s <= {affinities.LARGEST} and G = b / s rounded up for b = {bits}, "
            f"got {_said(f)}"
        )


def _require(name: str, x: Tensor, v: Tensor, shape: tuple[int, ...], remedy: str = "") -> None:
    if x.shape != shape or not x.is_floating_point() or x.device != v.device:
        raise ValueError(f"{name} must be floating point {shape} on {v.device}{remedy}, got {_said(x)}")


def _said(x: Tensor) -> str:
    """A tensor as error messages name it."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
