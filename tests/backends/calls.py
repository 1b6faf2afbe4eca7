"""Calls of fused attention, with codes that do not hang on rounding, and what the reference says of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer import reference
from ecoformer.arguments import bias_value
from ecoformer.backends import hashing
from ecoformer.backends.fused import Call
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes

MARGIN = 2e-4


def make_call(
    n=63,
    dim=16,
    bits=16,
    samples=25,
    *,
    batch=2,
    heads=2,
    queries=None,
    channels=None,
    masked=False,
    causal=False,
    whole=False,
    planes=False,
    own=False,
    seed=0,
) -> Call:
    """`queries` makes it cross attention; `whole` gives values of whole numbers, whose sums are exact;
    `own` is the released code's bias."""
    g = torch.Generator().manual_seed(seed)
    functions: Functions
    if planes:
        functions = Hyperplanes(torch.randn(heads, dim, bits, generator=g))
    else:
        support = torch.nn.functional.normalize(torch.randn(heads, samples, dim, generator=g), dim=-1)
        mean = 0.35 + 0.02 * torch.randn(heads, samples, generator=g)
        sigma = 1 + torch.rand(heads, generator=g)
        functions = HashFunctions(support, mean, sigma, torch.randn(heads, samples, bits, generator=g))
    q = steady((batch, heads, n if queries is None else queries, dim), functions, g)
    k = None if queries is None else steady((batch, heads, n, dim), functions, g)
    shape = (batch, heads, n, dim if channels is None else channels)
    v = torch.randint(-9, 10, shape, generator=g).float() if whole else torch.randn(shape, generator=g)
    mask = None
    if masked:
        mask = torch.rand(batch, n, generator=g) < 0.4
        mask[0] = True
    beta = bias_value("official" if own else "paper", bits)
    return Call(q, k, v, mask, functions, float(beta), causal, own)


def steady(shape: tuple[int, ...], functions: Functions, g: torch.Generator) -> Tensor:
    """Tokens whose projections keep their signs when computed in another order."""
    tokens = torch.randn(shape, generator=g)
    for _ in range(200):
        doubtful = (hashing.project(tokens, functions).abs() < MARGIN).any(dim=-1, keepdim=True)
        if not doubtful.any():
            return tokens
        tokens = torch.where(doubtful, torch.randn(shape, generator=g), tokens)
    raise AssertionError("no steady tokens found")


def codes_of(tokens: Tensor, functions: Functions) -> Tensor:
    """By the reference, in fp64."""
    wide = [x.double() for x in functions]
    if isinstance(functions, Hyperplanes):
        return reference.sign(reference.unit(tokens.double()) @ wide[0])
    support, mean, sigma, weight = wide
    return reference.hash_codes(tokens.double(), support, sigma.view(-1, 1, 1), mean.unsqueeze(-2), weight)


def truth(call: Call, dtype: torch.dtype = torch.float64) -> Tensor:
    """The reference, dense."""
    hq = codes_of(call.q, call.functions).to(dtype)
    hk = hq if call.k is None else codes_of(call.k, call.functions).to(dtype)
    mask = None if call.mask is None else call.mask[:, None]
    bias = "official" if call.own_value else "paper"
    return reference.hash_attention(hq, hk, call.v.to(dtype), mask, call.causal, bias)
