"""Integer attention: every backend against the reference in plain Python integers, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoformer import reference
from ecoformer.affinity import Affinity
from ecoformer.backends import integer
from ecoformer.functional import hash_attention, pack_codes, unpack_codes


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


def test_products_of_the_division_fit_in_32_bits(monkeypatch):
    products = []
    plain = reference.shifted
    monkeypatch.setattr(reference, "shifted", lambda n, by: products.append(abs(n)) or plain(n, by))
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        narrow, length = (int(torch.randint(high, (), generator=generator)) for high in (30, 52))
        bottom = (1 << length) + int(torch.randint(1 << length, (), generator=generator))
        top = min(127 * bottom >> narrow, (1 << 30) - 1) + 8  # 8 for the rounding of 16 groups
        reference.integer_division(top, bottom, narrow, ((1 << 15) - 1, seed % 23))
    assert max(products) < 1 << 31


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


def test_multipliers_are_exact_to_15_bits_and_bounded():
    factors = torch.tensor([0.01, 1.0, 0.999999, 3.0, 100.0])
    whole, exponent = integer.integer_multiplier(factors).unbind(-1)
    assert ((whole >= 1 << 14) & (whole < 1 << 15)).all()
    torch.testing.assert_close(whole / 2.0**exponent, factors, rtol=2**-15, atol=0)
    with pytest.raises(ValueError, match="between"):
        integer.integer_multiplier(torch.tensor([1e-4]))


def test_bad_input_is_refused():
    (codes_q, codes_k, v, *rest), _ = draw(1, 1, 4, 5, 2, 8, 2, 0)
    codes = [pack_codes(codes_q), pack_codes(codes_k)]
    with pytest.raises(ValueError, match="v must be int8"):
        integer.integer_attention(*codes, v.float(), *rest)
    with pytest.raises(ValueError, match="do not fit v"):
        integer.integer_attention(codes[0], codes[0], v, *rest)
    many = torch.empty(1, 1, (1 << 24) + 1, 1, dtype=torch.int8, device="meta")
    with pytest.raises(ValueError, match=r"more than 2\^24 keys"):
        integer.integer_attention(codes[0], codes[1], many, *rest)


def test_packed_codes_of_any_width_are_read_alike():
    arguments, _ = draw(1, 2, 6, 9, 4, 16, 4, 1)
    narrow = packed(arguments)
    wide = tuple(codes.to(torch.int64) & 0xFFFF for codes in narrow[:2])
    assert torch.equal(unpack_codes(wide[0], 16), arguments[0])
    assert torch.equal(integer.eager(*narrow), integer.eager(*wide, *narrow[2:]))
