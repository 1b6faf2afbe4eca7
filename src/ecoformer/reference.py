"""The paper, equation by equation, in plain PyTorch.

Every test compares with this file, so it is written to be read beside the paper and never to be fast:
matrices are dense, N x N where the paper writes N x N, and one head of one sample is a matrix.
Equation numbers are those of the EcoFormer paper (NeurIPS 2022). Shapes are (..., N, D) for tokens and
(..., N, b) for codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, temperature: float | None = None) -> Tensor:
    """Eq. (2): every query's weighted sum over all values."""
    tau = math.sqrt(q.shape[-1]) if temperature is None else temperature
    return torch.softmax(q @ k.mT / tau, dim=-1) @ v


def bias_of(bits: int) -> int:
    """2^c with c = ceil(log2(b + 1)): the power of two that keeps every affinity positive."""
    return int(2 ** math.ceil(math.log2(bits + 1)))


def grouped_affinity(
    codes_q: Tensor, codes_k: Tensor, groups: int, beta: Tensor | float, weight: Tensor | float
) -> Tensor:
    """sum_j weight_j prod_{r in group j} (1 + beta_j h_r g_r) for every pair: (..., N_q, N_k).

    `beta` and `weight` are numbers or (H, G), one for each head (the axis before the tokens) and group.
    """
    size = codes_q.shape[-1] // groups
    affinity = torch.zeros(*codes_q.shape[:-1], codes_k.shape[-2], dtype=codes_q.dtype, device=codes_q.device)
    for j in range(groups):
        beta_j = beta[:, j, None, None] if isinstance(beta, Tensor) else beta
        product: Tensor | float = weight[:, j, None, None] if isinstance(weight, Tensor) else weight
        for r in range(j * size, (j + 1) * size):
            agree = codes_q[..., :, None, r] * codes_k[..., None, :, r]
            product = product * (1 + beta_j * agree)
        affinity = affinity + product
    return affinity


FLOOR = 2.0**-30
"""Denominators are at least this share of the sum of weight_j times the sum of the keys' weights."""


def weighted_mean(affinity: Tensor, v: Tensor, total: Tensor | float, key_weight: Tensor) -> Tensor:
    """Means of v by affinities times key weights (..., N_q, N_k); zero where no key has any weight."""
    biased = affinity * key_weight
    floor = FLOOR * total * key_weight.sum(dim=-1, keepdim=True)
    denominator = torch.maximum(biased.sum(dim=-1, keepdim=True), floor)
    unseen = floor == 0
    return torch.where(unseen, 0, biased @ v / denominator.masked_fill(unseen, 1))


def seen_keys(codes_q: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
    """1 where a query sees a key (..., N_q, N_k), 0 for padding and, in causal order, for later tokens."""
    n_queries, n_keys = codes_q.shape[-2], v.shape[-2]
    seen = torch.ones(*v.shape[:-2], n_queries, n_keys, dtype=v.dtype, device=v.device)
    if key_padding_mask is not None:
        seen = seen.masked_fill(key_padding_mask.unsqueeze(-2), 0)
    return seen.tril() if is_causal else seen


def grouped_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    groups: int,
    beta: Tensor | float = 0.5,
    weight: Tensor | float = 1.0,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Attention by the affinity of groups of bits; `key_weight` (..., N_k) scales what a key counts."""
    seen = seen_keys(codes_q, v, key_padding_mask, is_causal)
    if key_weight is not None:
        seen = seen * key_weight.unsqueeze(-2)
    total = weight.sum(dim=-1)[:, None, None] if isinstance(weight, Tensor) else weight * groups
    return weighted_mean(grouped_affinity(codes_q, codes_k, groups, beta, weight), v, total, seen)


def hash_attention(
    codes_q: Tensor,
    codes_k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    bias: str = "paper",
) -> Tensor:
    """Eq. (9), its upper line: affinities of all pairs, then a weighted mean of the values.

    `key_padding_mask` is True where a key is padding and broadcasts to (..., N_k). `bias="tight"` adds b + 1
    in the place of 2^c.
    """
    bits = codes_k.shape[-1]
    shift = bias_of(bits) if bias == "paper" else bits + 1
    affinity, seen = codes_q @ codes_k.mT, seen_keys(codes_q, v, key_padding_mask, is_causal)
    return weighted_mean(affinity + shift, v, shift, seen)


def unit(tokens: Tensor) -> Tensor:
    """Tokens scaled to unit length, as Eq. (4) assumes; a zero vector stays zero."""
    length: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return tokens / length.masked_fill(length == 0, 1)


def squared_distances(tokens: Tensor, support: Tensor) -> Tensor:
    """|q_i - q_(j)|^2 for every token and support sample, by its definition."""
    return (tokens.unsqueeze(-2) - support.unsqueeze(-3)).square().sum(dim=-1)


def rbf_kernel(tokens: Tensor, support: Tensor, sigma: Tensor | float) -> Tensor:
    """The Gaussian kernel exp(-d^2 / (2 sigma)); sigma is a mean squared distance."""
    return torch.exp(-squared_distances(tokens, support) / (2 * sigma))


def sign(x: Tensor) -> Tensor:
    """sign(u) = 1 if u >= 0 else -1 (section 3.3)."""
    return torch.where(x >= 0, 1.0, -1.0).to(x)


def hash_codes(tokens: Tensor, support: Tensor, sigma: Tensor | float, mean: Tensor, a: Tensor) -> Tensor:
    """Eqs. (10) and (11): H(Q) = sign(g(Q) A) with g the zero-mean kernel features."""
    g = rbf_kernel(unit(tokens), support, sigma) - mean
    return sign(g @ a)


def pairwise_labels(tokens: Tensor, l: int) -> Tensor:  # noqa: E741  (the paper's letter)
    """Eq. (13): +1 for the l largest attention scores of a row, -1 for the l smallest, else 0.

    A token is no pair with itself: its own score is always the largest and its own code always agrees,
    so the label would say nothing.
    """
    x = unit(tokens)
    scores = x @ x.mT
    own = torch.eye(scores.shape[-1], dtype=torch.bool, device=tokens.device)
    similar = scores.masked_fill(own, -torch.inf).topk(l, dim=-1).indices
    dissimilar = scores.masked_fill(own, torch.inf).topk(l, dim=-1, largest=False).indices
    labels = torch.zeros_like(scores)
    return labels.scatter(-1, similar, 1.0).scatter(-1, dissimilar, -1.0)


def objective(codes: Tensor, labels: Tensor) -> Tensor:
    """Eq. (12): |H H^T - b Y|^2 in the Frobenius norm."""
    return (codes @ codes.mT - codes.shape[-1] * labels).square().sum(dim=(-2, -1))


def residual(codes: Tensor, labels: Tensor, bits: int) -> Tensor:
    """b Y - sum_t h_t h_t^T over the bits learned so far (the columns of `codes`)."""
    return bits * labels - codes @ codes.mT


def bit_score(bit: Tensor, residual_matrix: Tensor) -> Tensor:
    """h^T R h, the part of Eq. (14) that a new bit can change; larger is better."""
    return (bit.unsqueeze(-2) @ residual_matrix @ bit.unsqueeze(-1)).squeeze(-1, -2)


def integer_weights(exponents: list[int], seen: list[bool]) -> list[int]:
    """2^e of every key in whole numbers that add up to at most 2^24, 0 where a key is padding.

    They have the ratios of 2^e while the seen keys together weigh at most 2^24 times the lightest one.
    """
    top = max((e for e, visible in zip(exponents, seen, strict=True) if visible), default=0)
    powers = [(1 << 24) >> (top - e) if visible else 0 for e, visible in zip(exponents, seen, strict=True)]
    excess = max(0, (sum(powers) - 1).bit_length() - 24)
    return [power >> excess for power in powers]


def integer_attention(
    codes_q: list[int],
    codes_k: list[int],
    v: list[list[int]],
    levels: list[list[int]],
    multiplier: tuple[int, int],
    exponents: list[int] | None = None,
    seen: list[bool] | None = None,
) -> list[list[int]]:
    """One head of hashed attention in whole numbers: packed codes, int8 values, int8 outputs.

    Args:
        codes_q: of every query.
        codes_k: of every key.
        v: a value for every key, numbers from -127 to 127.
        levels: what a group counts where d of its bits differ, a row for each group.
        multiplier: (m, e) scales outputs by m / 2^e, 2^14 <= m < 2^15 and 3 <= e <= 22.
        exponents: keys count 2^e; all count 1 if absent.
        seen: False where a key is padding.
    """
    size, seen = len(levels[0]) - 1, [True] * len(v) if seen is None else seen
    weights = [int(s) for s in seen] if exponents is None else integer_weights(exponents, seen)
    out = []
    for query in codes_q:
        counts = [
            weight
            * sum(
                row[((query ^ key) >> j * size & (1 << size) - 1).bit_count()] for j, row in enumerate(levels)
            )
            for key, weight in zip(codes_k, weights, strict=True)
        ]
        tops = [
            sum(count * value for count, value in zip(counts, channel, strict=True))
            for channel in zip(*v, strict=True)
        ]
        out.append([integer_division(top, sum(counts), multiplier) for top in tops])
    return out


def integer_division(top: int, bottom: int, multiplier: tuple[int, int]) -> int:
    """x = top / bottom * m / 2^e in int8, cut off at ±127, less than 0.57 off, by one reciprocal a query.

    The mantissa, at least 2^14, loses less than 2^-14 of `bottom`. The reciprocal m 2^12 / mantissa, from
    2^11 to 2^13, loses less than 2^-11. `part` loses less than 1, and 2^22 / reciprocal > 2^9 of it make a
    unit. So what is rounded is less than 127 * 2^-11 + 2^-9 < 0.065 off up to 127. `part` is cut off only
    beyond 127: its limit is 127.5 units of 2^11. Before, it is below 2^29; products, with what is added to
    round, are below 2^31.
    """
    factor, exponent = multiplier
    bottom = max(bottom, 1)
    length = bottom.bit_length()
    mantissa = (bottom << 15) >> length
    reciprocal = (factor << 12) // mantissa
    drop = max(0, length + exponent - 25)
    part = min(max(top >> drop, -255 << 10), 255 << 10)
    shift = length + exponent - 3 - drop
    return min(max((part * reciprocal + (1 << shift >> 1)) >> shift, -127), 127)
