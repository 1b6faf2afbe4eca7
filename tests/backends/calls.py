"""Calls of fused attention with codes that do not depend on rounding, and the reference's results."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer import reference
from ecoformer.affinity import FLOOR, Affinity
from ecoformer.backends import hashing
from ecoformer.backends.fused import _WHERE as WHERE
from ecoformer.backends.fused import FusedCall
from ecoformer.backends.hashing import Functions, HashFunctions, Hyperplanes, Signs

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
    signs=False,
    groups=None,
    beta=(0.2, 0.9),
    apart=False,
    weighted=False,
    seed=0,
) -> FusedCall:
    """`queries` makes it cross attention; `whole` gives values of whole numbers, whose sums are exact;
    `signs`: tokens are projections of `bits` channels; `groups` of bits have `beta` in that range; `apart`
    gives keys hash functions of their own, and `weighted` weights."""
    g = torch.Generator().manual_seed(seed)
    functions = Signs() if signs else make_functions(heads, dim, bits, 0 if planes else samples, g)
    dim, wide = bits if signs else dim, dim if channels is None else channels
    key_functions = make_functions(heads, dim, bits, 0 if planes else samples, g) if apart else None
    both = [functions] if key_functions is None else [functions, key_functions]
    q = steady((batch, heads, n if queries is None else queries, dim), both, g)
    k = None if queries is None else steady((batch, heads, n, dim), both, g)
    shape = (batch, heads, n, wide)
    v = torch.randint(-9, 10, shape, generator=g).float() if whole else torch.randn(shape, generator=g)
    mask = None
    if masked:
        mask = torch.rand(batch, n, generator=g) < 0.4
        mask[0] = True
    key_weight = 0.1 + torch.rand(batch, heads, n, generator=g) if weighted else None
    constant, levels = Affinity.paper(bits).constant(bits), (None, None, None)
    if groups is not None:
        low, high = beta
        numbers = torch.rand(2, heads, groups, generator=g)
        affinity = Affinity(groups, low + (high - low) * numbers[0], 0.5 + numbers[1])
        levels, constant = (*affinity.levels(bits, v), FLOOR * affinity.total(v)), 0.0
    return FusedCall(q, k, v, mask, key_weight, functions, key_functions, *levels, constant, causal)


def make_functions(heads, dim, bits, samples, g) -> Functions:
    """Kernelised hash functions with so many support samples, or hyperplanes with 0."""
    if not samples:
        return Hyperplanes(torch.randn(heads, dim, bits, generator=g))
    support = torch.nn.functional.normalize(torch.randn(heads, samples, dim, generator=g), dim=-1)
    mean = 0.35 + 0.02 * torch.randn(heads, samples, generator=g)
    sigma = 1 + torch.rand(heads, generator=g)
    return HashFunctions(support, mean, sigma, torch.randn(heads, samples, bits, generator=g))


def steady(shape: tuple[int, ...], functions: list[Functions], g: torch.Generator) -> Tensor:
    """Tokens whose projections keep their signs, and their side of 1, when computed in another order."""
    tokens = torch.randn(shape, generator=g)
    for _ in range(400):
        y = torch.cat([hashing.project(tokens, each) for each in functions], dim=-1)
        ones = torch.cat([scaled(tokens, each) for each in functions], dim=-1)
        doubtful = ((y.abs() < MARGIN) | ((ones.abs() - 1).abs() < MARGIN)).any(dim=-1, keepdim=True)
        if not doubtful.any():
            return tokens
        tokens = torch.where(doubtful, torch.randn(shape, generator=g), tokens)
    raise AssertionError("no steady tokens found")


def scaled(tokens: Tensor, functions: Functions) -> Tensor:
    """Projections as the gradient of signs sees them: it passes where they are at most 1."""
    y = hashing.project(tokens, functions)
    return hashing.scaled(y) if isinstance(functions, Signs) else y


def codes_of(tokens: Tensor, functions: Functions) -> Tensor:
    """By the reference, in fp64."""
    wide = [x.double() for x in functions]
    if isinstance(functions, Signs):
        return reference.sign(tokens.double())
    if isinstance(functions, Hyperplanes):
        return reference.sign(reference.unit(tokens.double()) @ wide[0])
    support, mean, sigma, weight = wide
    return reference.hash_codes(tokens.double(), support, sigma.view(-1, 1, 1), mean.unsqueeze(-2), weight)


def truth(call: FusedCall, dtype: torch.dtype = torch.float64) -> Tensor:
    """The reference, dense."""
    return _attend(call, codes_of, dtype)


def truth_gradients(call: FusedCall, grad: Tensor) -> list[Tensor | None]:
    """Gradients of all differentiable inputs, by the reference in fp64."""
    flat = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call.flat()]
    for i in WHERE:
        if flat[i] is not None:
            flat[i] = flat[i].requires_grad_()
    wide = FusedCall.of(*flat)
    out = _attend(wide, lambda *given: hashing.sign_ste(scaled(*given)), torch.float64)
    found = torch.autograd.grad(out, [flat[i] for i in WHERE if flat[i] is not None], grad.double())
    grads = iter(found)
    return [None if flat[i] is None else next(grads) for i in WHERE]


def _attend(call: FusedCall, codes, dtype: torch.dtype) -> Tensor:
    hq = codes(call.q, call.functions).to(dtype)
    hk = hq
    if not call.shared_codes:
        tokens = call.q if call.k is None else call.k
        hk = codes(tokens, call.key_functions or call.functions).to(dtype)
    mask = None if call.mask is None else call.mask[:, None]
    v, key_weight = call.v.to(dtype), None if call.key_weight is None else call.key_weight.to(dtype)
    if call.scale is None and key_weight is None:
        bias = "paper" if call.constant == reference.bias_of(call.bits) else "tight"
        return reference.hash_attention(hq, hk, v, mask, call.causal, bias)
    if call.scale is None:
        beta, weight = call.bits / call.constant, call.constant / call.bits
    else:
        scale, ratio = call.scale.to(dtype), call.ratio.to(dtype)
        beta = (1 - ratio) / (1 + ratio)
        weight = scale / (1 + beta) ** (call.bits // call.groups)
    return reference.grouped_attention(hq, hk, v, call.groups, beta, weight, mask, call.causal, key_weight)
