"""Hashed attention in exported graphs: few passes over the tokens, standard operators only.

A bit is 1 or 0 here, the result of a comparison. One product finds the value of a group of bits: with weights
of +1 where a value has a one and -1 where it has a zero, only the value that agrees in every bit gets as many
as it has ones. The paper's affinity c + h . g is a product of such bits too, with one more bit that is always
1 (`_bits`, `_paper`). Whatever depends on weights alone becomes a constant of the exported file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.affinity import mixing
from ecoformer.backends.eager import Weights
from ecoformer.backends.fused import FusedCall
from ecoformer.backends.hashing import Functions, HashFunctions, Signs

_TINY = 1e-30
"""The smallest denominator where the call has no floor."""


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


def causal_product(a: Tensor, b: Tensor, c: Tensor, reverse: bool = False) -> Tensor:
    """As `eager.causal_product`, but by an N x N matrix: standard operators have no loop over blocks."""
    products = a @ b.mT
    return (products.triu() if reverse else products.tril()) @ c


def attention(call: FusedCall, value_scale: Tensor | None = None) -> Tensor:
    """What `fused.plain` computes, up to rounding; without gradients, and not in causal order.

    A token that is NaN has a code of zeros, but NaN in `v` spreads as everywhere. `value_scale` (H,) scales
    the outputs of each head.
    """
    f_q = _features(call.q, call.functions, call)
    f_k = f_q.mT
    if not call.shared_codes:
        keys = call.q if call.k is None else call.k
        f_k = _features(keys, call.key_functions or call.functions, call, columns=True)
    values, weight = call.v.float(), None
    if call.key_weight is not None:
        weight = call.key_weight.float().unsqueeze(-1)
        values = values * weight
    if call.mask is not None:
        hidden = call.mask[:, None, :, None]
        values = torch.where(hidden, 0.0, values)
        weight = torch.where(hidden, 0.0, 1.0 if weight is None else weight)
    sums = f_k @ values
    counts = f_k.sum(dim=-1, keepdim=True) if weight is None else f_k @ weight
    if call.scale is None or call.ratio is None:
        mix, floor, seen = _paper(call), None, counts[..., -1:, :]
    else:
        mix = mixing(call.scale, call.ratio, call.bits // call.groups)
        seen = counts[..., : mix.shape[-1], :].sum(dim=-2, keepdim=True)  # a key has one value in a group
        floor = None if call.floor is None else call.floor.view(-1, 1, 1) * seen
    if call.mask is not None:  # a query that sees no key reads zero
        floor = torch.where(seen == 0, 1.0, 0.0 if floor is None else floor)
    weights = Weights(mix, 0.0, None)
    tables, below = weights.mixed(sums), f_q @ weights.mixed(counts)
    below = below.clamp_min(_TINY) if floor is None else torch.maximum(below, floor)
    if value_scale is not None:
        tables = tables * value_scale.view(-1, 1, 1)
    return (f_q @ tables / below).to(call.v.dtype)


def _features(tokens: Tensor, functions: Functions, call: FusedCall, columns: bool = False) -> Tensor:
    """Features (B, H, N, F) of tokens: the bits and a 1, or 1 for the value that each group has.

    As (B, H, F, N) with `columns`: products over tokens then need no transpose, and are faster.
    """
    if call.scale is None:
        found = _bits(tokens.float(), functions, extra=1)
        return found.mT if columns else found
    bits = _bits(tokens.float(), functions, extra=0)
    weight, bias = (bits.new_tensor(x) for x in _agreement(call.bits, call.groups))
    rows = bits.flatten(0, 2)
    if columns:
        found = F.relu(torch.addmm(bias.unsqueeze(-1), weight.mT, rows.mT))
        return found.view(-1, *bits.shape[:3]).permute(1, 2, 0, 3)
    return F.relu(torch.addmm(bias, rows, weight)).view(*bits.shape[:3], -1)


def _agreement(bits: int, groups: int) -> tuple[list[list[int]], list[int]]:
    """Weights (b, G * 2^s) and bias (G * 2^s) that give 1 where a group has a value, and at most 0 elsewhere.

    In plain numbers, so that they are constants of the graph.
    """
    size = bits // groups
    values = [(group, value) for group in range(groups) for value in range(1 << size)]
    weight = [
        [(2 * (value >> r % size & 1) - 1) * (r // size == group) for group, value in values]
        for r in range(bits)
    ]
    return weight, [1 - value.bit_count() for _, value in values]


def _bits(tokens: Tensor, functions: Functions, extra: int) -> Tensor:
    """Bits (B, H, N, b + extra) as 1 and 0; extra ones are always 1, for want of weights."""
    if isinstance(functions, Signs):
        bits = (tokens >= 0).float()
        return F.pad(bits, (0, extra), value=1.0) if extra else bits
    weight = F.pad(functions.weight, (0, extra)) if extra else functions.weight
    if not isinstance(functions, HashFunctions):
        return (tokens @ weight >= 0).float()  # the sign does not depend on a token's length
    support, mean, sigma, _ = functions
    length = torch.linalg.vector_norm(tokens, dim=-1)
    unit = tokens * (1 / torch.where(length == 0, 1.0, length)).unsqueeze(-1)
    sigma = sigma.view(-1, 1, 1)
    # -|x - s|^2 / (2 sigma), where |x| is 1 or 0.
    exponent = unit @ (support / sigma).mT - support.square().sum(dim=-1).unsqueeze(-2) / (2 * sigma)
    exponent = exponent - ((length > 0).float() / (2 * sigma.squeeze(-1))).unsqueeze(-1)
    return (torch.exp(exponent) @ weight >= mean.unsqueeze(-2) @ weight).float()


def _paper(call: FusedCall) -> Tensor:
    """(1, b + 1, b + 1): what pairs of bits count in c + (2 x - 1) . (2 y - 1)."""
    bits = call.bits
    ends = torch.full((bits, 1), -2.0)
    corner = torch.full((1, 1), call.constant + bits)
    top = torch.cat([4 * torch.eye(bits), ends], dim=1)
    return torch.cat([top, torch.cat([ends.mT, corner], dim=1)]).to(call.v.device).unsqueeze(0)
