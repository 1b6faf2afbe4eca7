"""The public operators: hashed attention, packing of codes, and the sign with a straight-through gradient.

Arguments are checked once, by `arguments.py`; the sums themselves live in `backends/`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ecoformer.arguments import (
    EXACT_WIDTHS,
    FLOATS,
    INTEGERS,
    Bias,
    bias_value,
    check_attention,
    packed_width,
    shape,
)
from ecoformer.backends import Backend, Plain, Registered, eager, fused
from ecoformer.backends.choice import asked_for, pick, tell_if_asked
from ecoformer.backends.hashing import Functions, HashFunctions

__all__ = [
    "bias_value",
    "causal_product",
    "check_surrogate",
    "choose",
    "eco_attention",
    "hash_attention",
    "pack_codes",
    "sign_ste",
    "unpack_codes",
]

Surrogate = Literal["hardtanh", "sigmoid"]


class TokenHasher(Protocol):
    """What `eco_attention` asks of a hasher; `hashing/base.py` has them."""

    bits: int

    @property
    def token_wise(self) -> bool:
        """Whether a token's code depends on that token alone."""

    def functions(self) -> Functions | None:
        """The hash functions, where a backend may compute codes itself."""

    def __call__(self, tokens: Tensor, key_padding_mask: Tensor | None = None, /) -> Tensor:
        """Codes of tokens."""


def eco_attention(
    q: Tensor,
    v: Tensor,
    hasher: TokenHasher,
    *,
    k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    bias: Bias = "paper",
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> Tensor:
    """Hashed attention from tokens to output: `hasher` and `hash_attention` in one, fused where that can be.

    Args:
        q: tokens (B, H, N_q, D), which are queries and, unless `k` is given, keys.
        v: values (B, H, N_k, C).
        hasher: hash functions for H heads of D channels.
        k: keys (B, H, N_k, D) with codes of their own, by the same hash functions.
        key_padding_mask: (B, N_k) bool, True where a key is padding.
        is_causal: as in `hash_attention`.
        bias: as in `hash_attention`.
        group: as in `hash_attention`.
        backend: "eager", "cpu" or "triton"; None takes what `use_backend` or the environment asks for.

    Returns:
        (B, H, N_q, C) in v's dtype.
    """
    wanted = asked_for(backend)
    if is_causal and not hasher.token_wise:
        raise ValueError(
            'sigma="input" looks at all tokens of a sample, so codes have no causal order: '
            'use sigma="stored" with is_causal=True'
        )
    k = None if k is q else k
    if group is None and not (_transforming() or _watched()):
        functions = hasher.functions()
        if functions is not None:
            beta = float(bias_value(bias, functions.weight.shape[-1]))
            own_value = bias == "official"
            out = _fused(fused.Call(q, k, v, key_padding_mask, functions, beta, is_causal, own_value), wanted)
            if out is not None:
                return out
    codes_k = hasher(q if k is None else k, key_padding_mask)
    codes_q = codes_k if k is None else hasher(q)
    return hash_attention(
        codes_q,
        codes_k,
        v,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal,
        bias=bias,
        group=group,
    )


def _fused(call: fused.Call, wanted: str | None) -> Tensor | None:
    """The output by a fused backend; None where eager is to compute it."""
    if not _regular(call):
        if torch.float64 in (call.q.dtype, call.v.dtype):
            tell_if_asked(wanted, "it takes fp32, bf16 and fp16")
        return None
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (call.q, call.k, call.v, call.functions.weight)
    )
    backend = pick(call, needs_grad, wanted)
    return None if backend == "eager" else fused.run(backend, call, needs_grad)


def _regular(call: fused.Call) -> bool:
    """Whether the arguments are what fused backends take; what is wrong with others, eager's checks say."""
    q, k, v, mask, functions, _, causal, own_value = call
    keys = q if k is None else k
    if not q.ndim == keys.ndim == v.ndim == 4 or not (q.numel() and v.numel() and keys.numel()):
        return False
    weight, device = functions.weight, v.device
    dim = functions.support.shape[2] if isinstance(functions, HashFunctions) else weight.shape[1]
    batch, heads, tokens, _ = v.shape
    if keys.shape != (batch, heads, tokens, dim) or heads != weight.shape[0] or weight.shape[2] > 64:
        return False
    if k is not None and (own_value or q.shape[:2] != (batch, heads) or q.shape[3] != dim):
        return False
    if causal and q.shape[2] != tokens:
        return False
    if mask is not None and (mask.dtype, mask.shape, mask.device) != (torch.bool, (batch, tokens), device):
        return False
    if q.device != device or keys.device != device:
        return False
    # Kernels get addresses and take fp32 for granted.
    if any(x.dtype != torch.float32 or x.device != device for x in functions):
        return False
    return q.dtype in fused.DTYPES and v.dtype in fused.DTYPES and keys.dtype in fused.DTYPES


def hash_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    bias: Bias = "paper",
    group: dist.ProcessGroup | None = None,
    bits: int | None = None,
) -> Tensor:
    """Attention whose weights are the affinities of binary codes: linear in tokens, in time and memory.

    Like `F.scaled_dot_product_attention`, with codes in the place of queries and keys (Eq. 9 of the paper).

    Args:
        codes_q: (..., N_q, b) of ±1, or (..., N_q) packed integers (see `pack_codes`). Floats are taken
            as they are: that they are ±1 is not checked.
        codes_k: (..., N_k, b) of ±1, or (..., N_k) packed integers.
        v: (..., N_k, D) in fp64, fp32, bf16 or fp16. Sums over tokens are kept in fp32 (fp64 for fp64).
        key_padding_mask: (B, N_k) or (..., N_k) bool, True where a key is padding, as in
            `nn.MultiheadAttention`. A query that sees no key at all reads zero.
        is_causal: token t sees the tokens up to and including t; needs N_q = N_k. NaN or infinity in v
            reaches the other tokens of its head, as without causal order.
        bias: "paper" adds 2^c, c = ceil(log2(b + 1)), to every affinity, "tight" b + 1, the least that keeps
            all positive: with 16 bits the largest is 33 times the smallest, and not 3 times. "official" is
            what the released code does: (b + 1) times the token's own value above, (b + 1) times the number
            of keys below.
        group: process group over which the tokens are split, in rank order. One small message is exchanged,
            and gradients flow through it: the loss is the sum of all ranks' losses.
        bits: b, needed with packed codes unless their dtype says it (uint8: 8, int16: 16, int32: 32).

    Returns:
        (..., N_q, D) in v's dtype.
    """
    mask, width, beta, own_value = check_attention(
        codes_q, codes_k, v, key_padding_mask, is_causal, bias, bits
    )
    ops = choose()
    if is_causal:
        state = None if group is None else _sums_before(ops.code_sums(codes_k, v, mask, width), group)
        return ops.causal_read(codes_q, codes_k, v, mask, state, width, beta, own_value)
    state = ops.code_sums(codes_k, v, mask, width)
    if group is not None:
        state = sum_over_ranks(state, group)
    own = eager.without(mask, v) if own_value else None
    return ops.code_read(codes_q, state, own, width, beta, v.dtype)


def causal_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t: a, b (..., N, p) and c (..., N, r), in linear memory."""
    return choose().causal_product(a, b, c, False)


def choose() -> type[Backend]:
    """The registered operators; under `torch.func` plain PyTorch, which its transforms see through."""
    return Plain if _transforming() else Registered


def _transforming() -> bool:
    # PyTorch's own autograd.Function asks the same question; there is no public name for it.
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _watched() -> bool:
    """Whether a dispatch mode looks at every operator, as counting does: it is shown the single steps."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def pack_codes(codes: Tensor) -> Tensor:
    """±1 codes (..., b) as one integer each (...), bit r of the integer being bit r of the code.

    b = 8, 16 and 32 give uint8, int16 and int32, whose width says b; any other b from 1 to 64 gives int64.
    """
    if codes.ndim < 1 or not 1 <= codes.shape[-1] <= 64:
        raise ValueError(f"pack_codes takes codes (..., b) with b from 1 to 64, got {shape(codes)}")
    if codes.dtype not in (*INTEGERS, *FLOATS):
        raise TypeError(f"codes must be ±1, got {codes.dtype} {shape(codes)}")
    traced = torch.compiler.is_compiling() or _transforming()
    if not traced and not bool(((codes == 1) | (codes == -1)).all()):
        raise ValueError(f"codes {shape(codes)} must hold only +1 and -1 (NaN tokens hash to NaN)")
    bits = codes.shape[-1]
    # The top bit of an int64 is its sign: the sum wraps around to it, as two's complement wants.
    weights = torch.ones(bits, dtype=torch.int64, device=codes.device) << torch.arange(
        bits, device=codes.device
    )
    packed = ((codes > 0).to(torch.int64) * weights).sum(dim=-1)
    return packed.to(EXACT_WIDTHS.get(bits, torch.int64))


def unpack_codes(packed: Tensor, bits: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed integers (...) as ±1 codes (..., bits) of `dtype`: the inverse of `pack_codes`."""
    if packed.dtype not in INTEGERS:
        raise TypeError(f"packed codes must be integers, got {packed.dtype} {shape(packed)}")
    return eager.unpack(packed, packed_width("packed", packed, bits), dtype)


def check_surrogate(surrogate: str) -> None:
    """Refuse a stand-in for the sign's gradient that `sign_ste` does not have."""
    if surrogate not in ("hardtanh", "sigmoid"):
        raise ValueError(f'surrogate must be "hardtanh" or "sigmoid", got {surrogate!r}')


def sign_ste(x: Tensor, surrogate: Surrogate = "hardtanh", zero: float = 1.0) -> Tensor:
    """sign(x) in the forward pass, the gradient of a smooth stand-in in the backward pass.

    "hardtanh" passes the gradient where |x| <= 1 (the paper); "sigmoid" is that of 2 / (1 + e^-x) - 1.
    `zero` is sign(0): +1 in the paper, 0 in the released code. NaN stays NaN.
    """
    check_surrogate(surrogate)
    with torch.no_grad():
        codes = torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, torch.where(x == 0, zero, x))).to(x.dtype)
    if not x.requires_grad and not _transforming():
        return codes
    smooth = x.clamp(-1, 1) if surrogate == "hardtanh" else 2 * torch.sigmoid(x) - 1
    # (smooth - smooth) is zero, so the value stays exactly ±1 while the gradient is that of `smooth`.
    return codes + (smooth - smooth.detach())


class _AllReduce(torch.autograd.Function):
    """Sum over ranks whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grads[0], ctx.group), None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, whose gradient is that of the sum of all ranks' losses."""
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def _sums_before(state: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The state that the tokens of all lower ranks leave behind.

    Every rank fills its own slot of a row of slots, so one all-reduce hands all slots to all ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    slots = [state if r == rank else torch.zeros_like(state) for r in range(size)]
    return sum_over_ranks(torch.stack(slots), group)[:rank].sum(dim=0)
