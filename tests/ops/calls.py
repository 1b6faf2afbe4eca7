"""Calls of `hash_attention`, and the dense truth in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer import affinity as affinities
from ecoformer import hash_attention, pack_codes, unpack_codes, use_kernels
from ecoformer.ops.eager import FLOOR

FLAGS = ("weighted", "masked", "packed", "state", "shared", "per_head", "full", "learned")
"""`weighted`: keys have weights, some of them zero; `state`: earlier keys; `shared`: keys are the queries;
`per_head` and `full`: forms of the affinity; `learned`: the loss reads the state that is returned too."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_call(
    n_q: int = 64,
    n_k: int | None = None,
    bits: int = 16,
    size: int = 4,
    d: int = 32,
    flags: set[str] | frozenset[str] = frozenset(),
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    heads: int = 2,
    seed: int = 0,
) -> dict[str, Tensor | bool | int | None]:
    """Arguments of `hash_attention` by name; where keys are the queries, `k` is None."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    n_k = n_q if n_k is None or causal or "shared" in flags else n_k
    groups = affinities.group_count(bits, size)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def tokens(n: int, width: int) -> Tensor:  # as layers lay them out
        return draw(batch, n, heads, width).transpose(1, 2)

    q, k, v = tokens(n_q, bits), None if "shared" in flags else tokens(n_k, bits), tokens(n_k, d)
    if "packed" in flags:
        q, k = (None if x is None else pack_codes(x) for x in (q, k))
    lead = (heads if "per_head" in flags else 1, groups)
    last = (1 << size, 1 << size) if "full" in flags else (size + 1,)
    f = draw(*lead, *last, dtype=wide).abs() + 0.1
    weight = mask = state = None
    if "weighted" in flags:
        weight = draw(batch, heads, n_k, dtype=wide).abs()
        weight = torch.where(weight < 0.4, 0, weight)
        v = torch.where((weight == 0).unsqueeze(-1), torch.nan, v)  # padding may hold anything
    if "masked" in flags:
        mask = torch.rand(batch, n_k, generator=generator) < 0.4
        mask[0] = "state" not in flags  # a sample of padding only
        v = v.masked_fill(mask[:, None, :, None], torch.nan)
    if "state" in flags:
        state = draw(batch, heads, groups, 1 << size, d + 1, dtype=wide).abs()
        state[:, :, -1, 1 << bits - (groups - 1) * size :] = 0
        state = (state * 7 / state[..., -1:].sum(3, keepdim=True)).flatten(2, 3)  # all groups count all keys
    grads = tokens(n_q, d), draw(batch, heads, groups << size, d + 1, dtype=wide)
    return {
        **{"q": q, "k": k, "v": v, "affinity": f, "key_weight": weight, "state": state, "bits": bits},
        **{"key_padding_mask": mask, "is_causal": causal, "grad": grads[0]},
        "grad_state": grads[1] if "learned" in flags else None,
    }


LEAVES = ("q", "k", "v", "affinity", "key_weight", "state")


def results(call, kernels: str | None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, state and gradients of a call, in `dtype` or the call's; by kernels, or the truth for None."""
    call = {
        name: x.to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    leaves = {name: call[name] for name in LEAVES}
    leaves = {
        n: x.detach().requires_grad_() for n, x in leaves.items() if x is not None and x.is_floating_point()
    }
    grad, grad_state = call.pop("grad"), call.pop("grad_state")
    call |= leaves
    call["k"] = call["q"] if call["k"] is None else call["k"]
    if kernels is None:
        out, state = dense(**call)
    else:
        with use_kernels(kernels):
            out, state = hash_attention(
                call.pop("q"), call.pop("k"), call.pop("v"), **call, return_state=True
            )
    loss = (out * grad).sum() if grad_state is None else (out * grad).sum() + (state * grad_state).sum()
    with use_kernels(kernels or "eager"):
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    found = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "state": state.detach(), **found}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    affinity: Tensor,
    key_weight: Tensor | None,
    state: Tensor | None,
    bits: int,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """`hash_attention` by the matrix of all pairs' affinities, gradients by autograd."""
    f, size, groups = affinity, affinities.group_size(affinity), affinity.shape[1]
    zq, zk = (picked(unpack_codes(x, bits, f.dtype) if x.ndim == 3 else x, size, groups) for x in (q, k))
    differ = torch.tensor([[(x ^ y).bit_count() for x in range(1 << size)] for y in range(1 << size)])
    m = f if f.ndim == 4 else f[..., differ]
    reach = torch.tensor([min(size, bits - j * size) for j in range(groups)]).view(-1, 1)
    reach = torch.arange(1 << size) < 1 << reach  # what the last group cannot reach counts nothing
    m = torch.where(reach.unsqueeze(-1) & reach.unsqueeze(-2), m, 0)
    mixed = torch.einsum("bhngx,hgxy->bhngy", zq, m.expand(v.shape[1], -1, -1, -1))
    w = torch.ones(v.shape[:3], dtype=v.dtype) if key_weight is None else key_weight
    if key_padding_mask is not None:
        w = torch.where(key_padding_mask.unsqueeze(1), 0, w)
    w, v = torch.where(w == 0, 0, w), torch.where((w == 0).unsqueeze(-1), 0, v)
    y = w.unsqueeze(-1) * F.pad(v, (0, 1), value=1.0)
    counted = torch.ones(q.shape[2], v.shape[2], dtype=v.dtype)
    counted = counted.tril() if is_causal else counted
    top = (torch.einsum("bhngy,bhmgy->bhnm", mixed, zk) * counted) @ y
    seen, after = w @ counted.mT, torch.einsum("bhmgy,bhmd->bhgyd", zk, y).flatten(2, 3)
    if state is not None:
        top = top + mixed.flatten(3) @ state
        seen, after = (
            seen + state.unflatten(2, (groups, -1))[:, :, 0, :, -1].sum(-1, keepdim=True),
            after + state,
        )
    floor = (FLOOR * m.mean((-2, -1)).sum(-1).unsqueeze(-1) * seen).detach()
    below = torch.where((top[..., -1] < floor) | (seen == 0), floor, top[..., -1])
    out = torch.where(
        (seen == 0).unsqueeze(-1), 0, top[..., :-1] / torch.where(seen == 0, 1, below).unsqueeze(-1)
    )
    return out, after


def picked(y: Tensor, size: int, groups: int) -> Tensor:
    """1 for the value that each group of bits has (B, H, N, G, 2^s), with the gradient that bits have."""
    inside = y.clamp(-1, 1)
    h = torch.where(y >= 0, 1.0, -1.0).to(y.dtype) + (inside - inside.detach())
    h = F.pad(h, (0, size * groups - y.shape[-1]), value=-1.0).unflatten(-1, (groups, size))
    values = torch.arange(1 << size)
    chosen = torch.stack([(2 * (values >> r & 1) - 1).to(y.dtype) * h[..., r, None] for r in range(size)])
    return ((1 + chosen) / 2).prod(0)
