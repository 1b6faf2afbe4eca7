"""The registered operators under everything that PyTorch does to an operator."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim, export
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from ecoformer import Affinity, hash_attention, pack_codes, sign_ste, unpack_codes
from ecoformer.backends import eager

OPS = torch.ops.ecoformer
KINDS = {
    "paper": {"bias": "paper"},
    "groups": {"affinity": Affinity(1, 0.9)},
}
OPTIONS = {
    f"{'causal' if causal else 'full'}-{kind}": {"is_causal": causal, **given}
    for causal, (kind, given) in product([False, True], KINDS.items())
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["bare", "masked"])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_causal_product_is_a_proper_operator(reverse, make_inputs):
    arguments = (*make_inputs(2, n=5, dim=4, bits=3).requires_grad(), reverse)
    torch.library.opcheck(OPS.causal_product.default, arguments)
    gradcheck(OPS.causal_product.default, arguments)
    gradgradcheck(OPS.causal_product.default, arguments)
    plain = eager.causal_product(*arguments)
    assert torch.equal(OPS.causal_product.default(*arguments), plain)


@EVERY_OPTION
@MASKED
@pytest.mark.parametrize(("n", "dim", "bits"), [(4, 2, 3), (66, 1, 1)], ids=["block", "blocks"])
def test_gradients_of_attention(n, dim, bits, masked, options, make_inputs, make_mask):
    x = make_inputs(2, 1, n=n, dim=dim, bits=bits).requires_grad()
    call = partial(hash_attention, key_padding_mask=make_mask(2, 1, n) if masked else None, **options)
    gradcheck(call, tuple(x), fast_mode=n > 4)
    gradgradcheck(call, tuple(x), fast_mode=n > 4)


class FromTokens(torch.nn.Module):
    """Tokens to codes to attention, as a graph to be compiled or exported."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, v, mask):
        codes = sign_ste(x)
        return hash_attention(codes, codes, v, key_padding_mask=mask, **self.options)


def token_inputs(make_mask, batch, n):
    # Heads differ from every batch size: PyTorch takes equal sizes for one symbol.
    return torch.randn(batch, 6, n, 4), torch.randn(batch, 6, n, 5), make_mask(batch, n)


def assert_same_with_gradients(ours, plain, make_mask, batch, n):
    x, v, mask = token_inputs(make_mask, batch, n)
    x.requires_grad_(), v.requires_grad_()
    weight, outs = torch.randn_like(v), [f(x, v, mask) for f in (ours, plain)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), (x, v)) for out in outs))


@pytest.mark.parametrize("options", ["causal-paper", "full-groups"])
def test_compiles_once_for_all_sizes(options, make_mask):
    torch.compiler.reset()
    plain = FromTokens(**OPTIONS[options])
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, n in ((2, 7), (3, 70), (4, 130)):
            assert_same_with_gradients(compiled, plain, make_mask, batch, n)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("options", ["full-groups", "causal-paper"])
def test_compiles_to_machine_code(options, make_mask):
    torch.compiler.reset()
    plain = FromTokens(**OPTIONS[options])
    assert_same_with_gradients(torch.compile(plain, fullgraph=True), plain, make_mask, 2, 70)


def test_packing_compiles(make_inputs):
    x = make_inputs(2, 3, bits=33, dtype=torch.float32, whole=True)

    def through_integers(q, k, v):
        q, k = pack_codes(q), pack_codes(k)
        return hash_attention(q, unpack_codes(k, 33), v, bits=33)

    compiled = torch.compile(through_integers, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*x), hash_attention(*x))


@EVERY_OPTION
def test_exports_with_any_batch_and_length(options, make_mask):
    batch, tokens = Dim("batch", max=1024), Dim("tokens", max=1 << 20)
    module = FromTokens(**options)
    shapes = ({0: batch, 2: tokens}, {0: batch, 2: tokens}, {0: batch, 1: tokens})
    program = export(module, token_inputs(make_mask, 2, 9), dynamic_shapes=shapes)
    for size in ((3, 17), (5, 130), (1, 64), (4, 2)):
        arguments = token_inputs(make_mask, *size)
        torch.testing.assert_close(program.module()(*arguments), module(*arguments))
    assert not any("ecoformer" in str(node.target) for node in program.graph.nodes)


@EVERY_OPTION
@MASKED
def test_vmap_over_any_axis(masked, options, make_inputs, make_mask):
    x = make_inputs(3, 2, n=70, bits=4, dtype=torch.float32, whole=True)
    mask = make_mask(3, 2, 70) if masked else None

    def call(q, k, v, padding):
        return hash_attention(q, k, v, key_padding_mask=padding, **options)

    along = 0 if masked else None
    expected = call(*x, mask)
    assert torch.equal(vmap(call, (0, 0, 0, along))(*x, mask), expected)
    assert torch.equal(vmap(vmap(call, (0, 0, 0, along)), (0, 0, 0, along))(*x, mask), expected)
    by_head = vmap(call, (1, 1, 1, 1 if masked else None), out_dims=1)
    assert torch.equal(by_head(*x, mask), expected)
    shared = vmap(lambda q: call(q, x.codes_k[0], x.v[0], None))(x.codes_q)
    assert torch.equal(shared[1], call(x.codes_q[1], x.codes_k[0], x.v[0], None))


@EVERY_OPTION
def test_function_transforms_give_autograds_gradients(options, make_inputs, make_mask):
    x = make_inputs(3, 2, n=5, dim=2, bits=3).requires_grad()
    mask = make_mask(3, 2, 5)

    def loss(q, k, v, padding):
        return hash_attention(q, k, v, key_padding_mask=padding, **options).square().sum()

    expected = torch.autograd.grad(loss(*x, mask), x)
    everywhere = (0, 1, 2)
    torch.testing.assert_close(grad(loss, everywhere)(*x, mask), expected)
    torch.testing.assert_close(vmap(grad(loss, everywhere))(*x, mask), expected)

    def attention(*tensors):
        return hash_attention(*tensors, key_padding_mask=mask, **options)

    plain = torch.autograd.functional.jacobian(attention, tuple(x))
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(transform(attention, everywhere)(*x), plain)
    by_rows = torch.autograd.functional.jacobian(attention, tuple(x), vectorize=True)
    torch.testing.assert_close(by_rows, plain)
    second = torch.autograd.functional.hessian(lambda v: loss(*x[:2], v, mask), x.v)
    torch.testing.assert_close(hessian(lambda v: loss(*x[:2], v, mask))(x.v), second)


def test_transforms_see_through_sign_and_packing(make_inputs):
    x = torch.randn(4, 3, 9, 16)
    codes = sign_ste(x)
    assert torch.equal(vmap(sign_ste)(x), codes)
    assert torch.equal(vmap(pack_codes)(codes), pack_codes(codes))
    assert torch.equal(vmap(partial(unpack_codes, bits=16))(pack_codes(codes)), codes)
    module = FromTokens()
    v = torch.randn(4, 3, 9, 5)

    def loss(tokens, values):
        return functional_call(module, {}, (tokens, values, None)).square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, v), leaf)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(vmap(grad(loss))(x, v), expected)
