"""The public operators: hashed attention, and packing of codes.

Arguments are checked here, once, by `arguments.py`; the sums are in `backends/`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ecoformer.affinity import Affinity, Bias
from ecoformer.arguments import (
    FLOATS,
    INTEGERS,
    check_attention,
    check_key_weight,
    check_mask,
    packed_width,
    shape,
)
from ecoformer.backends import eager, exported, fused
from ecoformer.backends.choice import pick, requested, warn_if_requested
from ecoformer.backends.hashing import Functions, Signs, check_functions, sign_ste, transforming

__all__ = ["causal_product", "eco_attention", "hash_attention", "pack_codes", "sign_ste", "unpack_codes"]

_Given = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Functions, Functions | None]
"""q, k, v, mask, weights of keys, and hash functions of queries and of keys."""


class TokenHasher(Protocol):
    """What `eco_attention` asks of a hasher; `hashing/base.py` has them."""

    bits: int

    def functions(self) -> Functions | None:
        """The hash functions, where a backend may compute codes itself."""

    def warn_if_random(self) -> None:
        """Warn if the hash functions should have been learned and were not."""

    def __call__(self, tokens: Tensor, key_padding_mask: Tensor | None = None, /) -> Tensor:
        """Codes of tokens."""


def eco_attention(
    q: Tensor,
    v: Tensor,
    hasher: TokenHasher,
    *,
    k: Tensor | None = None,
    key_hasher: TokenHasher | None = None,
    key_padding_mask: Tensor | None = None,
    key_weight: Tensor | None = None,
    is_causal: bool = False,
    bias: Bias = "paper",
    affinity: Affinity | None = None,
    process_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> Tensor:
    """Hashed attention from tokens to output: `hasher` and `hash_attention` in one, fused where possible.

    Args:
        q: tokens (B, H, N_q, D), which are queries and, unless `k` is given, keys.
        v: values (B, H, N_k, C).
        hasher: hash functions for H heads of D channels.
        k: keys (B, H, N_k, D) with codes of their own.
        key_hasher: hash functions of the keys; by default those of the queries.
        key_padding_mask: (B, N_k) bool, True where a key is padding.
        key_weight: (B, H, N_k), as in `hash_attention`.
        is_causal: as in `hash_attention`.
        bias: as in `hash_attention`.
        affinity: as in `hash_attention`.
        process_group: as in `hash_attention`.
        backend: "eager", "cpu" or "triton"; None takes what `use_backend` or the environment asks for.

    Returns:
        (B, H, N_q, C) in v's dtype.
    """
    wanted = requested(backend)
    key_hasher = None if key_hasher is hasher else key_hasher
    k = None if k is q else k
    affinity = _affinity(affinity, bias, hasher.bits)
    # An exported graph that is to be trained, or that is causal, consists of eager's steps.
    stepwise = exported.exporting() and (is_causal or getattr(hasher, "training", False))
    if process_group is None and not (stepwise or transforming() or _watched()):
        functions, key_functions = hasher.functions(), None if key_hasher is None else key_hasher.functions()
        if functions is not None and (key_hasher is None or key_functions is not None):
            if isinstance(functions, Signs) and isinstance(key_functions, Signs):
                key_functions = None
            # `Signs` holds no tensor whose shape says what it is for; eager raises where tokens do not fit.
            fits = not isinstance(functions, Signs) or hasher.bits == q.shape[-1]
            given = (q, k, v, key_padding_mask, key_weight, functions, key_functions)
            out = _fused(given, affinity, is_causal, wanted) if fits else None
            if out is not None:
                (key_hasher or hasher).warn_if_random()
                return out
    keys = q if k is None else k
    codes_k = (key_hasher or hasher)(keys, key_padding_mask)
    codes_q = codes_k if k is None and key_hasher is None else hasher(q)
    return hash_attention(
        codes_q,
        codes_k,
        v,
        key_padding_mask=key_padding_mask,
        key_weight=key_weight,
        is_causal=is_causal,
        affinity=affinity,
        process_group=process_group,
    )


def _affinity(affinity: Affinity | None, bias: Bias, bits: int) -> Affinity:
    """The affinity, by itself or by its bias, for codes of `bits` bits."""
    if affinity is None:
        return Affinity.of(bias, bits)
    if bias != "paper":
        raise ValueError(f"bias={bias!r} names an affinity of its own: leave it out where affinity is given")
    affinity.size(bits)
    return affinity


def _fused(given: _Given, affinity: Affinity, is_causal: bool, wanted: str | None) -> Tensor | None:
    """The output by a fused backend; None where eager is to compute it."""
    q, _, v, *_ = given
    bits = _bits_of(given, is_causal)
    if bits is None:
        if torch.float64 in (q.dtype, v.dtype):
            warn_if_requested(wanted, "it takes fp32, bf16 and fp16")
        return None
    constant = affinity.constant(bits)
    scale = ratio = floor = None
    if constant is None:
        affinity.check_heads(v)
        scale, ratio, floor = affinity.prepared(bits, v.shape[1], v.device)
    elif affinity.needs_floor(bits):
        return None
    call = fused.FusedCall(*given, scale, ratio, floor, constant or 0.0, is_causal)
    if exported.exporting():
        return exported.attention(call)
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in call.differentiable()
    )
    backend = pick(call, needs_grad, wanted)
    return None if backend == "eager" else fused.run(backend, call, needs_grad)


def _bits_of(given: _Given, is_causal: bool) -> int | None:
    """b, or None where fused backends do not take these arguments: eager's checks say what is wrong."""
    q, k, v, mask, key_weight, functions, key_functions = given
    k = q if k is None else k
    if not q.ndim == k.ndim == v.ndim == 4 or not (q.numel() and v.numel() and k.numel()):
        return None
    heads, dim, bits = sizes = check_functions("hasher", functions, q)
    if key_functions is not None:
        if isinstance(functions, Signs) or isinstance(key_functions, Signs):
            return None
        if check_functions("key_hasher", key_functions, k) != sizes:
            return None
    device, (batch, v_heads, tokens, _) = v.device, v.shape
    if k.shape != (batch, heads, tokens, dim) or v_heads != heads or bits > 64:
        return None
    if (*q.shape[:2], q.shape[3]) != (batch, heads, dim) or (is_causal and q.shape[2] != tokens):
        return None
    if mask is not None and (mask.dtype, mask.shape, mask.device) != (torch.bool, (batch, tokens), device):
        return None
    floats = [q, k, v]
    if key_weight is not None:
        if key_weight.shape != (batch, heads, tokens):
            return None
        floats.append(key_weight)
    # Kernels take fp32 hash functions for granted.
    if any(x.dtype != torch.float32 or x.device != device for x in (*functions, *(key_functions or ()))):
        return None
    return bits if all(x.dtype in fused.DTYPES and x.device == device for x in floats) else None


def hash_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    key_weight: Tensor | None = None,
    is_causal: bool = False,
    bias: Bias = "paper",
    affinity: Affinity | None = None,
    process_group: dist.ProcessGroup | None = None,
    bits: int | None = None,
) -> Tensor:
    """Attention whose weights are the affinities of binary codes: linear in tokens, in time and memory.

    Like `F.scaled_dot_product_attention`, with codes in the place of queries and keys (Eq. 9 of the paper).

    Args:
        codes_q: (..., N_q, b) of ±1, or (..., N_q) packed integers (see `pack_codes`). Floats are not
            checked: between -1 and 1 they are soft codes, for which the affinity's formula holds as it is;
            larger ones may make weights negative.
        codes_k: (..., N_k, b) of ±1, or (..., N_k) packed integers.
        v: (..., N_k, D) in fp64, fp32, bf16 or fp16. Sums over tokens are kept in fp32 (fp64 for fp64). A
            channel of a head that holds NaN or infinity, or whose sums overflow, gives results that are not
            finite, in that channel of that head only; which of NaN and infinity depends on the backend.
        key_padding_mask: (B, N_k) or (..., N_k) bool, True where a key is padding, as in
            `nn.MultiheadAttention`. A query that sees no key at all reads zero.
        key_weight: (..., N_k), positive: how much a key counts, in numerators and denominators. A padded key
            counts nothing.
        is_causal: token t sees the tokens up to and including t; needs N_q = N_k. What is not finite in v may
            also reach earlier tokens.
        bias: which affinity, where `affinity` is not given: "paper" is 2^c + h . g with
            c = ceil(log2(b + 1)), "tight" b + 1 + h . g, which is sharper: with 16 bits the largest weight is
            33 times the smallest, not 3 times.
        affinity: see `Affinity`. Denominators are at least 2^-30 of the affinity's total weight times the
            number of keys (the sum of their weights), so a query that is close to no key gives no NaN.
        process_group: ranks over which the tokens are split, in rank order. One small message is exchanged,
            and gradients flow through it: the loss is the sum of all ranks' losses.
        bits: b, needed with packed codes unless their dtype says it (uint8: 8, int16: 16, int32: 32).

    Returns:
        (..., N_q, D) in v's dtype.
    """
    call = CodeCall(codes_q, codes_k, v, key_padding_mask, key_weight, is_causal, bias, affinity, bits)
    if is_causal:
        return call.causal(None if process_group is None else _sums_before(call.sums(), process_group))
    state = call.sums()
    return call.read(state if process_group is None else _sum_over_ranks(state, process_group))


class CodeCall:
    """A checked call of `hash_attention`, in the steps between which ranks or a stream exchange the state."""

    def __init__(
        self,
        codes_q: Tensor,
        codes_k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        key_weight: Tensor | None,
        is_causal: bool,
        bias: Bias,
        affinity: Affinity | None,
        bits: int | None,
    ) -> None:
        width = check_attention(codes_q, codes_k, v, is_causal, bits)
        self.v, self.mask, self.key_weight = v, check_mask(key_padding_mask, v), key_weight
        check_key_weight(key_weight, v)
        affinity = _affinity(affinity, bias, width)
        affinity.check_heads(v)
        with eager.full_precision(v.device):
            self.f_k = eager.features(codes_k, affinity, width, v)
            self.f_q = self.f_k if codes_q is codes_k else eager.features(codes_q, affinity, width, v)
            self.weights = eager.Weights.of(affinity, width, v)

    def sums(self) -> Tensor:
        """The keys' state."""
        with eager.full_precision(self.v.device):
            return eager.sums(self.f_k, self.v, self.mask, self.key_weight)

    def read(self, state: Tensor) -> Tensor:
        """What the queries read from it."""
        with eager.full_precision(self.v.device):
            return eager.read(self.f_q, state, self.weights).to(self.v.dtype)

    def causal(self, before: Tensor | None) -> Tensor:
        """What queries read in causal order, on top of the state `before` them."""
        keys = (self.f_k, self.v, self.mask, self.key_weight)
        with eager.full_precision(self.v.device):
            out = eager.causal(self.f_q, *keys, before, self.weights, _product())
            return out.to(self.v.dtype)


def causal_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t: a, b (..., N, p) and c (..., N, r), in linear memory."""
    return _product()(a, b, c, False)


def _product() -> eager.Product:
    """The registered operator; under `torch.func` and in exports plain PyTorch."""
    if exported.exporting():
        return exported.causal_product
    return eager.causal_product if transforming() else eager.registered_product


def _watched() -> bool:
    """Whether a dispatch mode or `torch.jit.trace` looks at every operator: it is shown the single steps."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


def pack_codes(codes: Tensor) -> Tensor:
    """±1 codes (..., b) as one integer each (...), bit r of the integer being bit r of the code.

    b = 8, 16 and 32 give uint8, int16 and int32, whose width says b; any other b from 1 to 64 gives int64.
    """
    if codes.ndim < 1 or not 1 <= codes.shape[-1] <= 64:
        raise ValueError(f"pack_codes takes codes (..., b) with b from 1 to 64, got {shape(codes)}")
    if codes.dtype not in (*INTEGERS, *FLOATS):
        raise TypeError(f"codes must be ±1, got {codes.dtype} {shape(codes)}")
    traced = torch.compiler.is_compiling() or transforming()
    if not traced and not bool(((codes == 1) | (codes == -1)).all()):
        raise ValueError(f"codes {shape(codes)} must hold only +1 and -1 (NaN tokens hash to NaN)")
    return eager.pack(codes > 0)


def unpack_codes(packed: Tensor, bits: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed integers (...) as ±1 codes (..., bits) of `dtype`: the inverse of `pack_codes`."""
    if packed.dtype not in INTEGERS:
        raise TypeError(f"packed codes must be integers, got {packed.dtype} {shape(packed)}")
    return eager.unpack(packed, packed_width("packed", packed, bits), dtype)


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
        return _sum_over_ranks(grads[0], ctx.group), None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, whose gradient is that of the sum of all ranks' losses."""
    total: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def _sums_before(state: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The state that the tokens of all lower ranks leave behind.

    Every rank fills its own slot of a row of slots, so one all-reduce hands all slots to all ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    slots = [state if r == rank else torch.zeros_like(state) for r in range(size)]
    return _sum_over_ranks(torch.stack(slots), group)[:rank].sum(dim=0)
