"""Integer attention: eager and C are plain Python integers bit for bit, these are near exact fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoformer import affinity, pack_codes, reference, use_kernels
from ecoformer.ops import integer

KINDS = [(16, 4), (7, 7), (12, 4), (3, 2), (17, 1), (25, 5), (64, 4), (64, 5), (64, 8)]


def draw(batch, heads, queries, keys, channels, bits=16, size=4, seed=0, spread=12, padding=False):
    generator = torch.Generator().manual_seed(seed)
    codes = [pack_codes(torch.randn(batch, heads, n, bits, generator=generator)) for n in (queries, keys)]
    v = torch.randint(-127, 128, (batch, heads, keys, channels), generator=generator, dtype=torch.int8)
    f = torch.rand(heads, affinity.group_count(bits, size), 1, generator=generator, dtype=torch.float64)
    f = f * torch.rand(f.shape, generator=generator, dtype=torch.float64) ** torch.arange(size + 1)
    multiplier = integer.integer_multiplier(2.0 ** torch.linspace(-1, 7, heads))
    exponent = mask = None
    if spread is not None:
        exponent = torch.randint(-spread, spread + 1, (batch, heads, keys), generator=generator).to(
            torch.int8
        )
    if padding:
        mask = torch.rand(batch, keys, generator=generator) < 0.4
        mask[0] = True
    return *codes, v, integer.integer_levels(f, bits), multiplier, exponent, mask


def by_reference(codes_q, codes_k, v, levels, multiplier, exponent, mask):
    out = torch.empty(*codes_q.shape, v.shape[-1], dtype=torch.int8)
    for b in range(v.shape[0]):
        for h in range(v.shape[1]):
            codes = [[code % 2**64 for code in x[b, h].tolist()] for x in (codes_q, codes_k)]
            e = None if exponent is None else exponent[b, h].tolist()
            seen = None if mask is None else (~mask[b]).tolist()
            numbers = (v[b, h].tolist(), levels[h].tolist(), multiplier[h].tolist())
            out[b, h] = torch.tensor(reference.integer_attention(*codes, *numbers, e, seen))
    return out


def by_eager(*arguments):
    with use_kernels("eager"):
        return integer.integer_attention(*arguments)


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request, monkeypatch):
    monkeypatch.setattr("ecoformer.ops.cpu.LITTLE", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options", [{"spread": None}, {}, {"padding": True}, {"padding": True, "spread": None}], ids=str
)
@pytest.mark.parametrize(("bits", "size"), KINDS)
def test_eager_and_c_are_the_reference(bits, size, options):
    for channels in (1, 33):
        arguments = draw(2, 2, 5, 23, channels, bits, size, **options)
        expected = by_reference(*arguments)
        assert torch.equal(by_eager(*arguments), expected)
        assert torch.equal(integer.integer_attention(*arguments), expected)


@pytest.mark.parametrize(("bits", "size"), KINDS)
def test_c_is_eager(bits, size, threads):
    for queries, keys, channels in [(700, 77, 32), (20, 3300, 33), (3100, 3100, 64), (1, 1, 40)]:
        for batch, heads, options in (
            (1, 1, {"spread": None}),
            (1, 1, {"spread": 127}),
            (2, 2, {"padding": True}),
        ):
            arguments = draw(batch, heads, queries, keys, channels, bits, size, **options)
            out = integer.integer_attention(*arguments)
            assert torch.equal(out, by_eager(*arguments))
            assert out.transpose(1, 2).is_contiguous()


def test_largest_sums_fit():
    codes = torch.zeros(1, 1, 2, dtype=torch.int64)
    v = torch.tensor([[127, -127, 127], [127, -127, -127]], dtype=torch.int8)[None, None]
    levels = torch.tensor([[[2**31 - 1, 0, 1]]], dtype=torch.int32)
    exponent = torch.zeros(1, 1, 2, dtype=torch.int8)  # each weighs 2^23
    for m, e in [(2**15 - 1, 3), (2**14, 14), (2**15 - 1, 22)]:
        arguments = (codes, codes, v, levels, torch.tensor([[m, e]], dtype=torch.int32), exponent, None)
        expected = by_reference(*arguments)
        assert torch.equal(by_eager(*arguments), expected)
        assert torch.equal(integer.integer_attention(*arguments), expected)
        assert expected[0, 0, 0].tolist() == [
            min(127, round(127 * m / 2**e)),
            max(-127, -round(127 * m / 2**e)),
            0,
        ]


def exact(codes, v, f, factor, weights):
    """A query without bits, one channel: what is defined, cut off at ±127, and its least affinity."""
    size = len(f[0]) - 1
    affinities = [
        sum(row[(code >> j * size & (1 << size) - 1).bit_count()] for j, row in enumerate(f))
        for code in codes
    ]
    counts = [a * w for a, w in zip(affinities, weights, strict=True)]
    y = factor * sum(a * x for a, x in zip(counts, v, strict=True)) / sum(counts) if sum(counts) else 0
    return min(max(y, -127), 127), min(affinities)


KEYS = st.lists(
    st.tuples(st.integers(0, 255), st.integers(-127, 127), st.integers(0, 21)), min_size=1, max_size=8
)
LEVELS = st.integers(0, 30).flatmap(lambda bits: st.integers(0, 2**bits))


@settings(max_examples=300, deadline=None)
@given(
    keys=KEYS,
    levels=st.lists(st.lists(LEVELS, min_size=5, max_size=5), min_size=2, max_size=2),
    multiplier=st.tuples(st.integers(2**14, 2**15 - 1), st.integers(3, 22)),
)
def test_it_keeps_its_bound_for_all_levels_and_multipliers(keys, levels, multiplier):
    codes, v, exponents = zip(*keys, strict=True)  # 8 keys of 2^21 weigh 2^24 times the lightest one
    y, _ = exact(codes, v, levels, Fraction(multiplier[0], 2 ** multiplier[1]), [2**e for e in exponents])
    (out,) = reference.integer_attention([0], codes, [[x] for x in v], levels, multiplier, exponents)
    assert abs(out[0] - y) < 0.57


@settings(max_examples=300, deadline=None)
@given(
    keys=KEYS,
    factor=st.floats(-8, 11.9).map(lambda x: 2.0**x),
    ratios=st.lists(st.floats(0.001, 1), min_size=2, max_size=2),
    tops=st.lists(st.floats(0.01, 1), min_size=2, max_size=2),
    differ=st.integers(0, 8),
)
def test_it_is_within_a_unit_of_affinities_that_are_not_too_small(keys, factor, ratios, tops, differ):
    codes, v = zip(*((code | (1 << differ) - 1, x) for code, x, _ in keys), strict=True)
    f = torch.tensor([[[t * r**d for d in range(5)] for r, t in zip(ratios, tops, strict=True)]]).double()
    rows = [[Fraction(x) for x in row] for row in f[0].tolist()]
    y, least = exact(codes, v, rows, Fraction(factor), [1] * len(v))
    if least >= 2 * Fraction(factor) * sum(map(max, rows)) / 2**22:
        levels = integer.integer_levels(f)[0].tolist()
        multiplier = integer.integer_multiplier(torch.tensor([factor]).double())[0].tolist()
        (out,) = reference.integer_attention([0], codes, [[x] for x in v], levels, multiplier)
        assert abs(out[0] - y) < 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-128, 127), st.booleans()), min_size=1, max_size=40))
def test_weights_are_powers_of_two_and_only_tiny_ones_are_lost(keys):
    weights = reference.integer_weights(*map(list, zip(*keys, strict=True)))
    real = [Fraction(2) ** e if seen else Fraction(0) for e, seen in keys]
    assert sum(weights) <= 2**24
    assert len({w / x for w, x in zip(weights, real, strict=True) if w}) <= 1
    exactly = sum(real) <= 2**24 * min((x for x in real if x), default=0)
    for w, x in zip(weights, real, strict=True):
        assert (w > 0) == (x > 0) or (w == 0 and not exactly and x < sum(real) / 2**24)


def test_any_strides_and_widths_are_read_alike():
    q, k, v, levels, multiplier, exponent, mask = draw(2, 3, 40, 1100, 20, padding=True)
    expected = by_eager(q, k, v, levels, multiplier, exponent, mask)

    def strided(x):
        return x.transpose(1, 2).repeat_interleave(2, dim=1).transpose(1, 2)[:, :, ::2]

    rest = (levels.mT.contiguous().mT, multiplier.mT.contiguous().mT, strided(exponent), mask.T.clone().T)
    for dtype in (torch.int16, torch.int32, torch.int64):
        codes = [strided(x.to(dtype)) for x in (q, k)]
        for values in (strided(v), v.mT.contiguous().mT):
            assert torch.equal(integer.integer_attention(*codes, values, *rest), expected)
            assert torch.equal(by_eager(*codes, values, *rest), expected)
    above = [x | 1 << 40 for x in (q, k)]  # bits that no group has
    assert torch.equal(integer.integer_attention(*above, v, *rest), expected)


@pytest.mark.parametrize(("bits", "codes"), [(16, 3), (8, 5), (32, 2), (12, 3), (64, 2), (1, 7)])
def test_packed_signs_are_those_of_pack_codes(bits, codes, threads):
    wide = torch.randint(-3, 4, (3000, bits * codes + 5), dtype=torch.int32)
    least = torch.randint(-2, 3, (bits * codes,), dtype=torch.int32)
    for rows in (1, 3000):
        sums = wide[:rows, 2 : bits * codes + 2]
        expected = pack_codes((sums - least).unflatten(1, (codes, bits)))
        found = integer.pack_signs(sums, least, bits)
        assert found.element_size() == (bits // 8 if bits in (8, 16, 32) else 8)
        assert torch.equal(found.long() & (1 << bits) - 1 if bits < 64 else found, expected)
        with use_kernels("eager"):
            assert torch.equal(integer.pack_signs(sums, least, bits), found)


def test_nothing_seen_is_zero():
    q, k, v, *rest = draw(1, 2, 6, 9, 4)
    assert integer.integer_attention(q[:, :, :0], k, v, *rest).shape == (1, 2, 0, 4)
    assert not integer.integer_attention(q, k[:, :, :0], v[:, :, :0], *rest[:2]).any()


def test_the_operators_are_proper_ones_and_compile():
    q, k, v, levels, multiplier, exponent, mask = draw(2, 2, 6, 9, 4, padding=True)
    sums, least = torch.randint(-3, 4, (18, 32), dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    torch.library.opcheck(torch.ops.ecoformer.pack_signs.default, (sums, least, 16))
    torch.library.opcheck(
        torch.ops.ecoformer.integer_attention.default, (q, k, v, levels, multiplier, exponent, mask)
    )

    def attend(sums, q, v, exponent, mask):
        k = integer.pack_signs(sums, least, 16).view(2, 9, 2).transpose(1, 2)
        out = integer.integer_attention(q, k, v, levels, multiplier, exponent, mask)
        return out.transpose(1, 2).flatten(2)

    given = (sums, q, v, exponent, mask)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), attend(*given))


def test_bad_input_is_refused():
    given = draw(1, 2, 4, 5, 2, padding=True)
    q, _, v, levels, multiplier, exponent, mask = given
    many = torch.empty(1, 1, (1 << 24) + 1, 1, dtype=torch.int8, device="meta")
    for at, bad, message in [
        (0, q[0], "codes_q must be"),
        (0, q.to(torch.uint8), "do not hold the bits"),
        (1, q, "codes_k must be"),
        (2, v.float(), "v must be int8"),
        (2, many, "N <= 2"),
        (3, levels.long(), "levels must be torch.int32"),
        (3, levels[:, :0], "do not hold"),
        (3, -levels, "at least 0"),
        (3, levels | 1 << 30, "at most 2"),
        (4, multiplier[:, :1], "multiplier must be"),
        (4, multiplier + 2**14, "m < 2"),
        (5, exponent[:, :, :1], "exponent must be"),
        (6, mask[0], "key_padding_mask must be"),
    ]:
        for call in (integer.integer_attention, by_eager):
            with pytest.raises(ValueError, match=message):
                call(*given[:at], bad, *given[at + 1 :])
    sums = torch.zeros(3, 8, dtype=torch.int32)
    for bad, least, bits in ((sums, sums[0], 3), (sums.long(), sums[0], 8), (sums, sums, 8)):
        with pytest.raises(ValueError, match="must be"):
            integer.pack_signs(bad, least, bits)
    for factor in (2.0**-9, 2.0**12, -1.0, 0.0, float("nan")):
        with pytest.raises(ValueError, match="factors must be"):
            integer.integer_multiplier(torch.tensor([factor]))
    with pytest.raises(ValueError, match="groups of bits"):
        integer.integer_levels(torch.ones(1, 4, 5), 12)
