"""The registered operators under everything that PyTorch does to an operator."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.export import Dim, export
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from ecoformer import hash_attention, pack_codes, sign_ste, unpack_codes
from ecoformer.backends import Plain, Registered

OPS = torch.ops.ecoformer
OPTIONS = [{"is_causal": c, "bias": b} for c, b in product([False, True], ["paper", "tight", "official"])]
EVERY_OPTION = pytest.mark.parametrize(
    "options", OPTIONS, ids=[f"{'causal' if o['is_causal'] else 'full'}-{o['bias']}" for o in OPTIONS]
)
LIGHT_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["signs", "packed"])
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["bare", "masked"])


def operator_arguments(x, mask, packed):
    """(operator, its arguments) for all four, with and without their optional tensors."""
    bits = x.codes_q.shape[-1]
    q, k = (pack_codes(c.detach()) if packed else c for c in x[:2])
    state = Registered.code_sums(k, x.v, mask, bits).detach().requires_grad_()
    own = torch.randn_like(x.v).requires_grad_()
    yield OPS.code_sums.default, (k, x.v, mask, bits)
    for reverse in (False, True):
        yield OPS.causal_product.default, (x.codes_q, x.codes_k, x.v.to(x.codes_q.dtype), reverse)
    for bias_values in (None, own):
        yield OPS.code_read.default, (q, state, bias_values, bits, 32.0, x.v.dtype)
    for before, own_value in product((None, state), (False, True)):
        yield OPS.causal_read.default, (q, k, x.v, mask, before, bits, 32.0, own_value)


def test_opcheck(make_inputs, make_mask):
    x = make_inputs(2, 3, n=5, dim=4, dtype=torch.float32).requires_grad()
    calls = dict(operator_arguments(x, make_mask(2, 3, 5), packed=False))
    assert len(calls) == 4
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments)


@PACKED
@MASKED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_opcheck_of_optional_arguments(dtype, masked, packed, make_inputs, make_mask):
    x = make_inputs(2, 3, n=5, dim=4, dtype=dtype).requires_grad()
    for operator, arguments in operator_arguments(x, make_mask(2, 3, 5) if masked else None, packed):
        torch.library.opcheck(operator, arguments, test_utils=LIGHT_CHECKS)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1, 2, 0), (2, 1, 0, 3)], ids=str)
def test_opcheck_of_odd_layouts(order, make_inputs):
    x = make_inputs(2, 3, n=5, dim=4, dtype=torch.float32)
    back = sorted(range(4), key=order.__getitem__)
    odd = type(x)(*(t.permute(order).contiguous().permute(back) for t in x))
    for operator, arguments in operator_arguments(odd, None, packed=False):
        torch.library.opcheck(operator, arguments, test_utils=LIGHT_CHECKS)


@PACKED
@MASKED
def test_gradients_of_each_operator(masked, packed, make_inputs, make_mask):
    x = make_inputs(2, 1, n=4, dim=2, bits=3).requires_grad()
    # A state of no keys at all has a step at its count, so every sample keeps a key here.
    mask = make_mask(2, 1, 4).logical_and(torch.arange(4) > 0) if masked else None
    for operator, arguments in operator_arguments(x, mask, packed):
        gradcheck(operator, arguments)
        gradgradcheck(operator, arguments)


@EVERY_OPTION
@MASKED
@pytest.mark.parametrize(("n", "dim", "bits"), [(4, 2, 3), (66, 1, 1)], ids=["block", "blocks"])
def test_gradients_of_attention(n, dim, bits, masked, options, make_inputs, make_mask):
    x = make_inputs(2, 1, n=n, dim=dim, bits=bits).requires_grad()
    call = partial(hash_attention, key_padding_mask=make_mask(2, 1, n) if masked else None, **options)
    gradcheck(call, tuple(x), fast_mode=n > 4)
    gradgradcheck(call, tuple(x), fast_mode=n > 4)


@PACKED
@MASKED
@pytest.mark.parametrize("before", [False, True], ids=["start", "continued"])
def test_both_backends_keep_one_contract(before, masked, packed, make_inputs, make_mask):
    x = make_inputs(2, 2, n=70, dtype=torch.float32, whole=True).requires_grad()
    mask = make_mask(2, 2, 70) if masked else None
    q, k = (pack_codes(c.detach()) if packed else c for c in x[:2])
    state = Plain.code_sums(k, x.v, None, 16).detach() if before else None

    def results(backend):
        values = x.v if mask is None else x.v.masked_fill(mask.unsqueeze(-1), 0)
        sums = backend.code_sums(k, x.v, mask, 16)
        reads = [backend.code_read(q, sums, own, 16, 32.0, x.v.dtype) for own in (None, values)]
        reads += [backend.causal_read(q, k, x.v, mask, state, 16, 32.0, own) for own in (False, True)]
        return [sums, *reads], x.gradients(torch.cat(reads), torch.ones(()))

    (plain, plain_gradients), (registered, gradients) = results(Plain), results(Registered)
    assert all(map(torch.equal, plain, registered))
    torch.testing.assert_close(gradients, plain_gradients)


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
    return torch.randn(batch, 6, n, 16), torch.randn(batch, 6, n, 5), make_mask(batch, n)


def assert_same_with_gradients(ours, plain, make_mask, batch, n):
    x, v, mask = token_inputs(make_mask, batch, n)
    x.requires_grad_(), v.requires_grad_()
    weight, outs = torch.randn_like(v), [f(x, v, mask) for f in (ours, plain)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), (x, v)) for out in outs))


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[2]], ids=["full-official", "causal-paper"])
def test_compiles_once_for_all_sizes(options, make_mask):
    torch.compiler.reset()
    plain = FromTokens(**options)
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, n in ((2, 7), (3, 70), (4, 130)):
            assert_same_with_gradients(compiled, plain, make_mask, batch, n)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=["full-paper", "causal-official"])
def test_compiles_to_machine_code(options, make_mask):
    torch.compiler.reset()
    plain = FromTokens(**options)
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
        assert torch.equal(program.module()(*arguments), module(*arguments))


def test_exports_cross_attention_of_packed_codes(make_inputs):
    class Packed(torch.nn.Module):
        def forward(self, q, k, v):
            return hash_attention(q, k, v)

    def arguments(n, n_k):
        x = make_inputs(2, 3, n=n, n_k=n_k, dtype=torch.float32)
        return pack_codes(x.codes_q), pack_codes(x.codes_k), x.v

    queries, keys = Dim("queries"), Dim("keys")
    program = export(Packed(), arguments(5, 9), dynamic_shapes=({2: queries}, {2: keys}, {2: keys}))
    assert torch.equal(program.module()(*arguments(70, 33)), hash_attention(*arguments(70, 33)))


@EVERY_OPTION
@MASKED
def test_vmap_over_any_axis(masked, options, make_inputs, make_mask):
    x = make_inputs(3, 2, n=70, dtype=torch.float32, whole=True)
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


@EVERY_OPTION
def test_dual_numbers_keep_their_tangents(options, make_inputs):
    x = make_inputs(3, 2, n=5, dim=2, bits=3)
    direction = tuple(torch.randn_like(t) for t in x)
    _, expected = jvp(partial(hash_attention, **options), tuple(x), direction)
    with forward_ad.dual_level():
        out = hash_attention(*map(forward_ad.make_dual, x, direction), **options)
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None, "the derivative is lost without a word"
    torch.testing.assert_close(tangent, expected)


@EVERY_OPTION
def test_transforms_compile(options, make_inputs):
    x = make_inputs(3, 2, n=5, dim=2, bits=3)
    torch.compiler.reset()

    def loss(q, k, v):
        return hash_attention(q, k, v, **options).square().sum()

    transformed = vmap(grad(loss, (0, 1, 2)))
    compiled = torch.compile(transformed, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*x), transformed(*x))


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
