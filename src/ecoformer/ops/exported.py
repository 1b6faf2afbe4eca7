"""Hashed attention in exported graphs: few passes over the tokens, standard operators only.

A bit is 1 or 0 here, the result of a comparison. One product finds the value of a group of bits: with weights
of +1 where a value has a one and -1 where it has a zero, only the value that agrees in every bit gets as many
as it has ones. The paper's affinity c + h . g is a product of such bits too, with one more bit that is always
1. Whatever depends on weights alone becomes a constant of the exported file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.affinity import group_size, mixing, paper
from ecoformer.ops import eager

_TINY = 1e-30
"""The smallest denominator."""


def exporting() -> bool:
    """Whether `torch.export`, or `torch.onnx.export` by means of it, records the model."""
    known = getattr(torch.compiler, "is_exporting", None)  # since PyTorch 2.7
    return torch.onnx.is_in_onnx_export() if known is None else bool(known())


def rows(x: Tensor) -> Tensor:
    """Tokens (B, N, C); where exported as a matrix, because runtimes then fuse a layer's product and bias."""
    return x.flatten(0, 1) if exporting() else x


def power_of_two(exponent: Tensor) -> Tensor:
    """2^x; where exported by e^x, up to rounding, because runtimes take ten times as long for powers."""
    return torch.exp(exponent * math.log(2)) if exporting() else torch.exp2(exponent)


def causal_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t; where exported, by an N x N matrix instead of blocks."""
    return (a @ b.mT).tril() @ c if exporting() else eager.causal_product(a, b, c)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Our operators by standard ones, for `ExportedProgram.run_decompositions`."""
    ops = torch.ops.ecoformer
    return {ops.hash_attention.default: _hash_attention, ops.hash_tokens.default: _hash_tokens}


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor | None,
    weight: Tensor | None,
    bits: int,
    value_scale: Tensor | None = None,
) -> Tensor:
    """What `eager.forward` puts out, up to rounding. `value_scale` (H,) scales the outputs of each head."""
    size = bits + 1 if f is None else group_size(f)
    f_q = _features(q, bits, size)
    f_k = f_q.mT if k is None else _features(k, bits, size, columns=True)
    values = v.float()
    if weight is not None:
        weight = weight.float().unsqueeze(-1)
        values = torch.where(weight == 0, 0.0, values * weight)
    sums = f_k @ values
    counts = f_k.sum(dim=-1, keepdim=True) if weight is None else f_k @ weight
    if f is None:
        tables, below = _paper(bits, sums) @ sums, f_q @ (_paper(bits, sums) @ counts)
    else:
        m = mixing(f.float(), bits)
        floor = eager.FLOOR * m.mean((-2, -1)).sum(-1).view(-1, 1, 1) * eager.count(counts, m).unsqueeze(-1)
        tables, below = _mix(m, sums), torch.maximum(f_q @ _mix(m, counts), floor)
    if value_scale is not None:
        tables = tables * value_scale.view(-1, 1, 1)
    return (f_q @ tables / below.clamp_min(_TINY)).to(v.dtype)


def _hash_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    f: Tensor | None,
    weight: Tensor | None,
    state: Tensor | None,
    bits: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (q, k, v, paper(bits, device=v.device) if f is None else f, weight)
    y, zq, zk, m = eager.prepare(*given, bits)
    own = zk.mT @ y  # what nothing uses of this is left out
    below = torch.zeros(q.shape[:3], dtype=y.dtype, device=v.device)
    if not is_causal and state is None:
        return attention(q, k, v, f, weight, bits), own, below
    read = eager.mixed(zq, m)
    pairs = read @ zk.mT  # N x N: standard operators have no loop over blocks
    top = (pairs.tril() if is_causal else pairs) @ y
    if state is not None:
        top = top + read @ state.to(y.dtype)
    return (top[..., :-1] / top[..., -1:].clamp_min(_TINY)).to(v.dtype), own, below


def _hash_tokens(
    x: Tensor, support: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor, packed: bool
) -> Tensor:
    """Numbers where the operator packs codes: the decomposition of hashed attention takes either."""
    length = torch.linalg.vector_norm(x, dim=-1)
    unit = x * (1 / torch.where(length == 0, 1.0, length)).unsqueeze(-1)
    sigma = sigma.view(-1, 1, 1)
    # -|x - s|^2 / (2 sigma), where |x| is 1 or 0.
    exponent = unit @ (support / sigma).mT - support.square().sum(dim=-1).unsqueeze(-2) / (2 * sigma)
    exponent = exponent - ((length > 0).float() / (2 * sigma.squeeze(-1))).unsqueeze(-1)
    return torch.exp(exponent) @ weight - mean.unsqueeze(-2) @ weight


def _features(y: Tensor, bits: int, size: int, columns: bool = False) -> Tensor:
    """Features (B, H, N, F) of numbers: the bits and a 1, or 1 for the value that each group has.

    As (B, H, F, N) with `columns`: products over tokens then need no transpose, and are faster.
    """
    ones = (y >= 0).float()
    if size > bits:
        found = F.pad(ones, (0, 1), value=1.0)
        return found.mT if columns else found
    weight, bias = _agreement(bits, size, ones.device)
    tokens = ones.flatten(0, 2)
    if columns:
        found = F.relu(torch.addmm(bias.unsqueeze(-1), weight.mT, tokens.mT))
        return found.view(-1, *ones.shape[:3]).permute(1, 2, 0, 3)
    return F.relu(torch.addmm(bias, tokens, weight)).view(*ones.shape[:3], -1)


def _agreement(bits: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights (b, G * 2^s) and bias (G * 2^s) that give 1 for a group's value, and at most 0 for others."""
    row = torch.arange(-(-bits // size) << size, device=device)
    bit = torch.arange(bits, device=device).unsqueeze(-1)
    sign = 2 * (row // 2 ** (bit % size) % 2) - 1  # runtimes have no shifts
    weight = torch.where(row // (1 << size) == bit // size, sign, 0).float()
    return weight, 1 - weight.clamp_min(0).sum(0)


def _mix(m: Tensor, state: Tensor) -> Tensor:
    """Rows (..., G 2^s, D), those of each group mixed."""
    return (m @ state.unflatten(-2, tuple(m.shape[1:3]))).flatten(-3, -2)


def _paper(bits: int, like: Tensor) -> Tensor:
    """(b + 1, b + 1): what pairs of bits count in c + (2 x - 1) . (2 y - 1)."""
    ends = torch.full((bits, 1), -2.0, device=like.device)
    corner = torch.full((1, 1), float((1 << bits.bit_length()) + bits), device=like.device)
    top = torch.cat([4 * torch.eye(bits, device=like.device), ends], dim=1)
    return torch.cat([top, torch.cat([ends.mT, corner], dim=1)])
