"""Kernelised hash functions: numbers, packed codes and gradients by every kind of kernels."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from ecoformer import pack_codes, reference, use_kernels
from ecoformer.ops import cpu
from ecoformer.ops.hash_tokens import hash_tokens

KINDS = ["eager-fp32", "eager-bf16", "eager-fp64", "cpu-fp32", "cpu-bf16", "cpu-threads"]
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


@pytest.fixture(params=KINDS)
def kernels(request, monkeypatch):
    name, kind = request.param.split("-")
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the kernels were not built")
    if kind == "threads":
        monkeypatch.setattr(cpu, "LITTLE", 0)
        torch.set_num_threads(2)
    yield name, DTYPES.get(kind, torch.float32)
    torch.set_num_threads(1)


def functions(d, samples=25, bits=16, heads=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    support = torch.nn.functional.normalize(draw(heads, samples, d), dim=-1)
    return support, 0.4 + 0.05 * draw(heads, samples), 1 + draw(heads).abs(), draw(heads, samples, bits)


def tokens(n, d, batch=2, heads=2, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, heads, d, generator=generator, dtype=torch.float64).transpose(1, 2)
    return (x * torch.logspace(-2, 2, n, dtype=x.dtype).unsqueeze(-1)).to(dtype)


def by_reference(x, support, mean, sigma, weight):
    kernel = reference.rbf_kernel(reference.unit(x), support, sigma.view(-1, 1, 1))
    return (kernel - mean.unsqueeze(-2)) @ weight


def with_gradients(function, x, fixed, weight, grad):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = function(x, *fixed, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype))


@pytest.mark.parametrize("bits", [1, 16, 37, 64])
@pytest.mark.parametrize("d", [5, 32, 64])
@pytest.mark.parametrize("n", [0, 1, 7, 130])
def test_is_the_reference(n, d, bits, kernels):
    name, dtype = kernels
    x, (*fixed, weight) = tokens(n, d, dtype=dtype), functions(d, bits=bits)
    if dtype == torch.float64:
        *fixed, weight = (t.double() for t in (*fixed, weight))
    grad = torch.randn(2, 2, n, bits)
    wide = [t.double() for t in fixed]
    truth = with_gradients(by_reference, x.double(), wide, weight.double(), grad)
    with use_kernels(name):
        found = with_gradients(hash_tokens, x, fixed, weight, grad)
        packed = hash_tokens(x, *fixed, weight, packed=True)
    with use_kernels("eager"):
        near = with_gradients(hash_tokens, x, fixed, weight, grad)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert (found[1].dtype, found[2].dtype) == (dtype, weight.dtype)
    assert packed.dtype == torch.int64
    assert torch.equal(packed, pack_codes(found[0]))
    if n:
        # Gradients of short tokens are large: errors are measured in units of one token's.
        scaled = [(y, g * x.double().norm(dim=-1, keepdim=True), w) for y, g, w in (found, near, truth)]
        for ours, plain, exact in zip(*scaled, strict=True):
            ours, plain = (float((t.double() - exact).norm() / exact.norm()) for t in (ours, plain))
            assert ours <= 2 * plain + 2e-6
            assert plain <= (1e-12 if dtype == torch.float64 else 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_special_tokens(kernels):
    """A zero token stays zero; length does not matter; NaN and lengths that overflow stay in their token."""
    name, dtype = kernels
    given = functions(8, dtype=dtype if dtype == torch.float64 else torch.float32)
    x = tokens(9, 8, dtype=dtype)
    with use_kernels(name):
        clean = hash_tokens(x, *given)
        x[0, 0, 3], x[1, 1, 2], x[0, 1, 5] = 0, torch.nan, torch.finfo(dtype).max
        leaf = x.clone().requires_grad_()
        y = hash_tokens(leaf, *given)
        (found,) = torch.autograd.grad(y.sum(), leaf)
    zero = by_reference(torch.zeros(1, 2, 1, 8).double(), *(t.double() for t in given))
    torch.testing.assert_close(y[0, 0, 3].double(), zero[0, 0, 0], rtol=1e-5, atol=1e-5)
    assert found[0, 0, 3].isfinite().all()
    assert y[1, 1, 2].isnan().all()
    assert y[0, 1, 5].isnan().all()
    others = torch.ones(2, 2, 9, dtype=torch.bool)
    others[0, 0, 3] = others[1, 1, 2] = others[0, 1, 5] = False
    torch.testing.assert_close(y[others], clean[others])
    assert found[others].isfinite().all()


def test_any_layout_in_memory(kernels):
    name, dtype = kernels
    given, x = (
        functions(6, dtype=dtype if dtype == torch.float64 else torch.float32),
        tokens(9, 6, dtype=dtype),
    )
    turned = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    support = given[0].mT.contiguous().mT
    with use_kernels(name):
        leaves = [t.requires_grad_() for t in (x.contiguous(), turned)]
        ys = hash_tokens(leaves[0], *given), hash_tokens(leaves[1], support, *given[1:])
        torch.testing.assert_close(*ys)
        gradients = [torch.autograd.grad(y.sum(), t)[0] for y, t in zip(ys, leaves, strict=True)]
    torch.testing.assert_close(*gradients, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_codes_are_packed_only_where_nothing_learns():
    *fixed, weight = functions(8)
    x = tokens(5, 8)
    assert hash_tokens(x, *fixed, weight, packed=True).ndim == 3
    assert hash_tokens(x, *fixed, weight.clone().requires_grad_(), packed=True).ndim == 4
    assert hash_tokens(x.requires_grad_(), *fixed, weight, packed=True).ndim == 4
    with torch.no_grad():
        assert hash_tokens(x, *fixed, weight, packed=True).ndim == 3
    assert hash_tokens(x.detach(), *functions(8, bits=65), packed=True).shape[-1] == 65


def test_the_operators_are_proper():
    given = (tokens(5, 8), *functions(8))
    ops = torch.ops.ecoformer
    torch.library.opcheck(ops.hash_tokens.default, (*given, False))
    torch.library.opcheck(ops.hash_tokens.default, (*given, True))
    torch.library.opcheck(ops.hash_tokens_backward.default, (torch.randn(2, 2, 5, 16), *given))


@pytest.mark.parametrize("shared", [False, True])
def test_transforms(shared):
    xs = torch.stack([tokens(5, 8, seed=seed) for seed in range(3)])
    given = [functions(8, seed=seed) for seed in range(3)]
    stacked = given[0] if shared else [torch.stack(parts) for parts in zip(*given, strict=True)]

    def loss(x, *given):
        return hash_tokens(x, *given).square().sum()

    dims = (0, *((None if shared else 0,) * 4))
    found = vmap(grad(loss, (0, 4)), dims)(xs, *stacked)
    ys, codes = (
        vmap(lambda *g, p=packed: hash_tokens(*g, packed=p), dims)(xs, *stacked) for packed in (False, True)
    )
    for i in range(3):
        mine = given[0 if shared else i]
        leaves = [t.clone().requires_grad_() for t in (xs[i], mine[3])]
        expected = torch.autograd.grad(loss(leaves[0], *mine[:3], leaves[1]), leaves)
        torch.testing.assert_close(tuple(t[i] for t in found), expected)
        torch.testing.assert_close(ys[i], hash_tokens(xs[i], *mine))
        assert torch.equal(codes[i], pack_codes(ys[i]))
