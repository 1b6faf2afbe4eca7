"""Integer attention: every backend against the reference in plain Python integers, bit for bit."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoformer import reference
from ecoformer.affinity import Affinity
from ecoformer.backends import cpu, fused, integer
from ecoformer.backends.choice import use_backend
from ecoformer.functional import hash_attention, pack_codes

KERNELS = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
KINDS = [(16, 4), (8, 8), (8, 2), (12, 2), (12, 3), (4, 1), (32, 8), (64, 16), (16, 2)]
SIZES = [(1, 1, 1), (3, 20, 7), (16, 300, 300), (32, 77, 1500), (33, 1100, 1030), (64, 1, 600)]
"""Channels, queries, keys."""


def draw(
    batch, heads, queries, keys, channels, bits, groups, seed, *, exponents=True, padding=False, sharp=1.0
):
    """Arguments of `integer_attention`, and the affinity they come from."""
    generator = torch.Generator().manual_seed(seed)
    codes = [
        torch.where(torch.rand(batch, heads, n, bits, generator=generator) < 0.5, -1.0, 1.0)
        for n in (queries, keys)
    ]
    v = torch.randint(-127, 128, (batch, heads, keys, channels), generator=generator, dtype=torch.int8)
    beta = torch.rand(heads, groups, generator=generator, dtype=torch.float64) * 0.98 * sharp + 0.01
    weight = torch.rand(heads, groups, generator=generator, dtype=torch.float64) + 0.05
    affinity = Affinity(groups, beta, weight)
    levels = integer.integer_levels(*affinity.levels(bits, beta), bits // groups)
    multiplier = integer.integer_multiplier(0.5 + 4 * torch.rand(heads, generator=generator))
    exponent = mask = None
    if exponents:
        exponent = torch.randint(-12, 13, (batch, heads, keys), generator=generator, dtype=torch.int8)
    if padding:
        mask = torch.rand(batch, keys, generator=generator) < 0.4
        mask[0] = True
    return (*codes, v, levels, multiplier, exponent, mask), affinity


def by_reference(codes_q, codes_k, v, levels, multiplier, exponent, mask):
    out = torch.empty(*codes_q.shape[:3], v.shape[-1], dtype=torch.int8)
    for b in range(v.shape[0]):
        seen = None if mask is None else (~mask[b]).tolist()
        for h in range(v.shape[1]):
            bits_q, bits_k = ((codes[b, h] > 0).int().tolist() for codes in (codes_q, codes_k))
            powers = None if exponent is None else exponent[b, h].tolist()
            numbers = (v[b, h].tolist(), levels[h].tolist(), tuple(multiplier[h].tolist()))
            out[b, h] = torch.tensor(reference.integer_attention(bits_q, bits_k, *numbers, powers, seen))
    return out


def packed(arguments):
    return (*map(pack_codes, arguments[:2]), *arguments[2:])


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("exponents", [False, True])
@pytest.mark.parametrize(("bits", "groups"), [(16, 4), (8, 8), (12, 2), (4, 1), (32, 8)])
def test_eager_is_the_reference(bits, groups, exponents, padding):
    arguments, _ = draw(2, 2, 5, 23, 3, bits, groups, bits, exponents=exponents, padding=padding)
    out = integer.eager(*packed(arguments))
    assert torch.equal(out, by_reference(*arguments))
    if padding:
        assert not out[0].any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), keys=st.integers(1, 12), spread=st.integers(0, 120))
def test_eager_is_the_reference_for_any_spread_of_weights(seed, keys, spread):
    arguments, _ = draw(1, 1, 4, keys, 2, 8, 2, seed, exponents=False)
    exponent = torch.randint(-spread, spread + 1, (1, 1, keys), dtype=torch.int8)
    arguments = (*arguments[:5], exponent, None)
    assert torch.equal(integer.eager(*packed(arguments)), by_reference(*arguments))


@pytest.mark.parametrize("keys", [7, 300])
def test_it_is_grouped_attention_up_to_rounding(keys):
    arguments, affinity = draw(2, 2, 50, keys, 8, 16, 4, keys, exponents=False)
    exponent = torch.randint(-3, 4, (2, 2, keys), dtype=torch.int8)
    codes_q, codes_k, v, levels, _, _, _ = arguments
    multiplier = integer.integer_multiplier(torch.tensor([1.0, 2.0]))
    out = integer.integer_attention(*map(pack_codes, (codes_q, codes_k)), v, levels, multiplier, exponent)
    weight = torch.exp2(exponent.double())
    exact = hash_attention(
        codes_q.double(), codes_k.double(), v.double(), affinity=affinity, key_weight=weight
    )
    exact = (exact * torch.tensor([1.0, 2.0]).view(2, 1, 1)).clamp(-127, 127)
    assert (out - exact).abs().max() < 0.52  # half a step, and rounding of tables and reciprocals


def test_bad_input_is_refused():
    (codes_q, codes_k, v, *rest), _ = draw(1, 1, 4, 5, 2, 8, 2, 0)
    codes = [pack_codes(codes_q), pack_codes(codes_k)]
    with pytest.raises(ValueError, match="v must be int8"):
        integer.integer_attention(*codes, v.float(), *rest)
    with pytest.raises(ValueError, match="do not fit v"):
        integer.integer_attention(codes[0], codes[0], v, *rest)
    levels, multiplier, exponent, _ = rest
    for index, bad in ((0, levels.long()), (1, multiplier[:, :1]), (2, exponent[:, :, :1]), (3, v[0] > 0)):
        with pytest.raises(ValueError, match="must be torch"):
            integer.integer_attention(*codes, v, *rest[:index], bad, *rest[index + 1 :])
    with pytest.raises(ValueError, match="do not hold 16 bits"):
        integer.integer_attention(*codes, v, levels.repeat(1, 2, 1), *rest[1:])
    sums = torch.zeros(3, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="divide the columns"):
        integer.pack_signs(sums, sums[0], 3)
    with pytest.raises(ValueError, match="sums must be int32"):
        integer.pack_signs(sums.long(), sums[0], 8)
    many = torch.empty(1, 1, (1 << 24) + 1, 1, dtype=torch.int8, device="meta")
    with pytest.raises(ValueError, match=r"more than 2\^24 keys"):
        integer.integer_attention(codes[0], codes[1], many, *rest)


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def poisoned(request, monkeypatch):
    """Kernels on some threads, where memory holds anything before it is written, and has fences around it."""
    from ecoformer.backends.cpu import launch_integer, threads

    def empty_out(codes, v):
        return fused.empty_out(codes, v).fill_(-128)

    def scratch(wanted):
        held.append(torch.randint(256, (wanted + 256,), dtype=torch.uint8))
        fences.append([held[-1][part].clone() for part in around])
        return held[-1].data_ptr() + 128

    held, fences, around = [], [], (slice(0, 128), slice(-128, None))
    monkeypatch.setattr(launch_integer, "empty_out", empty_out)
    monkeypatch.setattr(threads, "scratch", scratch)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)
    for memory, before in zip(held, fences, strict=True):
        assert all(torch.equal(memory[part], each) for part, each in zip(around, before, strict=True))


@KERNELS
@pytest.mark.parametrize(("bits", "groups"), KINDS)
def test_the_kernel_is_eager(bits, groups, poisoned):
    for channels, queries, keys in SIZES:
        for heads, options in ((1, {"exponents": False}), (1, {}), (2, {"padding": True})):
            arguments = packed(draw(heads, heads, queries, keys, channels, bits, groups, keys, **options)[0])
            assert torch.equal(cpu.integer_attention(*arguments), integer.eager(*arguments))


@KERNELS
@pytest.mark.parametrize("keys", [5, 2000, 5000])
@pytest.mark.parametrize("spread", [0, 24, 127])
def test_the_kernel_takes_any_weights_and_values(keys, spread, poisoned):
    arguments = packed(draw(1, 3, 5000, keys, 32, 16, 4, spread, exponents=False)[0])
    exponent = torch.randint(-spread, spread + 1, (1, 3, keys), dtype=torch.int8)
    for v in (arguments[2], arguments[2].sign(), torch.zeros_like(arguments[2]), arguments[2].clamp_min(126)):
        given = (*arguments[:2], v, *arguments[3:5], exponent, None)
        assert torch.equal(cpu.integer_attention(*given), integer.eager(*given))


@KERNELS
def test_the_kernel_takes_any_strides_and_widths(poisoned):
    *codes, v, levels, multiplier, exponent, mask = packed(
        draw(2, 3, 40, 1100, 20, 16, 4, 0, padding=True)[0]
    )
    expected = integer.eager(*codes, v, levels, multiplier, exponent, mask)

    def strided(x):
        return x.transpose(1, 2).repeat_interleave(2, dim=1).transpose(1, 2)[:, :, ::2]

    others = (levels.mT.contiguous().mT, multiplier.mT.contiguous().mT, strided(exponent), mask.T.clone().T)
    for dtype in (torch.int16, torch.int32, torch.int64):
        kept = [strided(each.to(dtype)) for each in codes]
        for values in (strided(v), v.mT.contiguous().mT):
            out = cpu.integer_attention(*kept, values, *others)
            assert torch.equal(out, expected)
            assert out.transpose(1, 2).is_contiguous()
    above = [each.to(torch.int64) | 1 << 40 for each in codes]  # bits that no group has
    assert torch.equal(cpu.integer_attention(*above, v, *others), expected)


@KERNELS
@pytest.mark.parametrize(("bits", "codes"), [(16, 3), (16, 1), (8, 5), (32, 2), (12, 3), (64, 2), (1, 7)])
def test_packed_signs_are_those_of_pack_codes(bits, codes, poisoned):
    wide = torch.randint(-3, 4, (3000, bits * codes + 5), dtype=torch.int32)
    least = torch.randint(-2, 3, (bits * codes,), dtype=torch.int32)
    for rows in (1, 3000):
        sums = wide[:rows, 2 : bits * codes + 2]
        expected = pack_codes(torch.where(sums >= least, 1, -1).view(rows, codes, bits))
        for backend in (None, "eager"):
            with use_backend(backend):
                found = integer.pack_signs(sums, least, bits)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_the_operators_are_proper_ones_and_compile_in_one_graph():
    *codes, v, levels, multiplier, exponent, mask = packed(draw(2, 2, 6, 9, 4, 16, 4, 1, padding=True)[0])
    sums = torch.randint(-3, 4, (18, 32), dtype=torch.int32)
    least = torch.zeros(32, dtype=torch.int32)
    torch.library.opcheck(torch.ops.ecoformer.pack_signs.default, (sums, least, 16))
    arguments = (*codes, v, levels, multiplier, exponent, mask)
    torch.library.opcheck(torch.ops.ecoformer.integer_attention.default, arguments)

    def attend(sums, q, v, exponent, mask):
        k = integer.pack_signs(sums, least, 16).view(2, 9, 2).transpose(1, 2)
        out = integer.integer_attention(q, k, v, levels, multiplier, exponent, mask)
        return out.transpose(1, 2).flatten(2)

    torch.compiler.reset()
    given = (sums, codes[0], v, exponent, mask)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), attend(*given))


def test_backends_are_asked_for_and_excused(monkeypatch):
    arguments = packed(draw(1, 2, 6, 9, 4, 16, 4, 1)[0])
    expected = integer.eager(*arguments)
    with monkeypatch.context() as patch, use_backend("eager"):
        patch.setattr(cpu, "integer_attention", None)
        assert torch.equal(integer.integer_attention(*arguments), expected)
    fused.warn_once.cache_clear()
    with use_backend("triton"), pytest.warns(UserWarning, match="'triton' is unavailable"):
        assert torch.equal(integer.integer_attention(*arguments), expected)
    monkeypatch.setattr(cpu, "_installed", lambda: False)
    assert torch.equal(integer.integer_attention(*arguments), expected)
    with use_backend("cpu"), pytest.warns(UserWarning, match="numba is not installed"):
        assert torch.equal(integer.integer_attention(*arguments), expected)
