"""Tokens that repeat, hardly differ or are all the same: weights stay small, codes are no chance."""

import copy

import pytest
import torch

from ecoformer import FitOptions, KernelHasher, KlshHasher

QUICK = FitOptions(pairs=5, steps=20)
WAYS = {"pairs": QUICK, "start only": FitOptions(steps=0)}
EPS = torch.finfo(torch.float32).eps


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def shared_class_token(batch=16, heads=2, n=5, dim=32):
    """One token is the same in all samples, as in the first block of a ViT, so it is drawn repeatedly."""
    tokens = normal(batch, heads, n, dim)
    tokens[:, :, 0] = normal(heads, dim, seed=1)
    return tokens


def few_distinct(kinds=3, noise=0.0):
    which = torch.randint(0, kinds, (4, 1, 50), generator=torch.Generator().manual_seed(0))
    return normal(kinds, 32)[which] + noise * normal(4, 1, 50, 32, seed=1)


REPEATED = {
    "class token": shared_class_token(),
    "three kinds": few_distinct(),
    "three kinds and rounding": few_distinct(noise=1e-6),
    "two kinds": few_distinct(kinds=2),
}
every_repetition = pytest.mark.parametrize("tokens", REPEATED.values(), ids=REPEATED)


def exact_codes(hasher, tokens):
    return copy.deepcopy(hasher).double().codes(tokens.double())


@every_repetition
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_repeated_tokens(tokens, options):
    hasher = KernelHasher(*tokens.shape[1::2]).fit(tokens, options=options)
    assert hasher.weight.abs().max() < 1e3
    assert torch.equal(hasher.codes(tokens).double(), exact_codes(hasher, tokens))
    y = hasher.project(tokens)
    torch.testing.assert_close(y.square().mean(dim=(0, 2)), torch.ones(y.shape[1::2]), rtol=1e-3, atol=0)


def test_codes_tell_kinds_apart():
    tokens = few_distinct()
    codes = KernelHasher(1, 32).fit(tokens, options=QUICK).codes(tokens)
    assert len(codes.flatten(0, 2).unique(dim=0)) == 3


SAME = {
    "zero": torch.zeros(4, 2, 20, 8),
    "lengths differ": normal(2, 1, 8) * normal(4, 2, 20, 1).abs(),
    "rounding": normal(2, 1, 8) * (1 + EPS * normal(4, 2, 20, 8, seed=1)),
}


@pytest.mark.parametrize("tokens", SAME.values(), ids=SAME)
@pytest.mark.parametrize("make", [KernelHasher, KlshHasher])
def test_tokens_that_are_all_the_same(tokens, make):
    hasher = make(2, 8, support=5)
    with pytest.warns(UserWarning, match=r"^tokens \(4, 2, 20, 8\) are all the same in head 0, 1, ") as found:
        hasher.fit(tokens, options=QUICK)
    assert found[0].filename == __file__
    assert (hasher.weight == 0).all()
    assert (hasher.codes(tokens) == 1).all()


def test_padding_does_not_make_tokens_differ():
    tokens, mask = torch.ones(4, 1, 20, 8), torch.arange(20).expand(4, 20) >= 15
    tokens[:, :, 15:] = normal(4, 1, 5, 8)
    with pytest.warns(UserWarning, match="all the same"):
        KernelHasher(1, 8, support=5).fit(tokens, key_padding_mask=mask, options=QUICK)
