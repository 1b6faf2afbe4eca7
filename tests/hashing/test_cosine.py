"""Cosines as the target of learning, and the correlation that measures how well codes keep them."""

import pytest
import torch

from ecoformer import FitOptions, KernelHasher, reference
from ecoformer.hashing.pairs import CosineLabels
from ecoformer.hashing.quality import hash_quality


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_labels_are_the_centred_cosines():
    unit, x = reference.unit(draw(2, 3, 9, 4)), draw(2, 3, 9, 5, seed=1)
    centred = unit - unit.mean(dim=-2, keepdim=True)
    torch.testing.assert_close(CosineLabels(unit, None) @ x, (centred @ centred.mT) @ x)


def test_padding_enters_neither_mean_nor_labels():
    unit, x = reference.unit(draw(2, 9, 4)), draw(2, 9, 5, seed=1)
    valid = torch.arange(9) < torch.tensor([9, 6])[:, None]
    short = CosineLabels(unit[1:, :6], None) @ x[1:, :6]
    padded = CosineLabels(unit.masked_fill(~valid[..., None], torch.nan), valid) @ x
    torch.testing.assert_close(padded[1, :6], short[0])
    assert not padded[1, 6:].any()


@pytest.mark.parametrize("padded", [False, True])
def test_correlation_equals_its_definition(padded):
    tokens, codes = draw(2, 3, 11, 4), reference.sign(draw(2, 3, 11, 8, seed=1))
    lengths = (11, 7) if padded else (11, 11)
    valid = torch.arange(11) < torch.tensor(lengths)[:, None]
    found = hash_quality(codes, tokens, 2, valid if padded else None).correlation
    wanted = []
    for sample, length in enumerate(lengths):
        for head in range(3):
            h, x = codes[sample, head, :length], reference.unit(tokens[sample, head, :length])
            both = torch.stack([(h @ h.mT).flatten(), (x @ x.mT).flatten()])
            wanted.append(torch.corrcoef(both)[0, 1])
    assert found == pytest.approx(float(torch.stack(wanted).mean()))


def test_codes_that_say_nothing_correlate_with_nothing():
    assert hash_quality(torch.ones(1, 1, 9, 4), torch.randn(1, 1, 9, 3), 2).correlation == 0


def test_cosine_target_keeps_more_of_the_similarities():
    fit_on, judge_by = draw(4, 2, 200, 6).tanh(), draw(4, 2, 200, 6, seed=1).tanh()
    kept = {
        target: KernelHasher(2, 6)
        .fit(fit_on, options=FitOptions(target=target))
        .quality(judge_by)
        .correlation
        for target in ("pairs", "cosine")
    }
    assert kept["cosine"] > kept["pairs"]
