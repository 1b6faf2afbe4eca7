"""Affinities: the paper's, the tightest, those of groups, for all pairs of codes."""

from __future__ import annotations

import pytest
import torch

from ecoformer import affinity as affinities
from ecoformer import reference
from ecoformer.ops.eager import one_hot

SIZES = pytest.mark.parametrize("size", range(1, 9))


def all_codes(bits):
    return torch.tensor([[code >> r & 1 for r in range(bits)] for code in range(1 << bits)]).mul(2.0).sub(1)


def of_all_pairs(f, bits):
    """What all pairs of codes count, by the rows that they pick: (H, 2^b, 2^b)."""
    z = one_hot(all_codes(bits), f, bits, f.dtype).unflatten(-1, (f.shape[1], -1)).transpose(0, 1)
    return (z @ affinities.mixing(f, bits) @ z.mT).sum(1)


@SIZES
@pytest.mark.parametrize("bits", [1, 5, 7, 16, 17, 64, 256])
def test_paper_and_tight(bits, size):
    """Whole numbers, for any number of bits."""
    for make, constant in ((affinities.paper, reference.bias_of(bits)), (affinities.tight, bits + 1)):
        f = make(bits, size)
        assert f.shape == (1, -(-bits // size), size + 1)
        assert torch.equal(f, f.round())
        assert f[..., 0].sum() == constant + bits  # codes that agree
        assert affinities.least(f, bits).item() == constant - bits
        if bits < 8:
            codes = all_codes(bits)
            assert torch.equal(of_all_pairs(f, bits)[0], constant + codes @ codes.mT)


@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 5), (1, 8), (2, 1), (2, 3), (2, 4)])
def test_grouped(groups, size):
    bits, codes = groups * size, all_codes(groups * size).double()
    beta, weight = (0.1 + 0.9 * torch.rand(3, groups, dtype=torch.float64) for _ in range(2))
    beta[0] = 1
    by_head = codes.expand(3, -1, -1)
    truth = reference.grouped_affinity(by_head, by_head, groups, beta, weight)
    torch.testing.assert_close(of_all_pairs(affinities.grouped(beta, weight, bits, size), bits), truth)
    same = affinities.grouped(0.5, 2.0, bits, size)
    torch.testing.assert_close(
        of_all_pairs(same, bits)[0].double(), reference.grouped_affinity(codes, codes, groups, 0.5, 2.0)
    )


def test_a_shorter_last_group():
    """It counts as a group of its own bits."""
    f = affinities.grouped(torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 2.0]]), 6, 4)
    codes = all_codes(6)
    first = reference.grouped_affinity(codes[:, :4], codes[:, :4], 1, 0.5, 1.0)
    last = reference.grouped_affinity(codes[:, 4:], codes[:, 4:], 1, 0.25, 2.0)
    torch.testing.assert_close(of_all_pairs(f, 6)[0], first + last)
    assert affinities.mixing(f, 6)[:, 1, 4:].eq(0).all()
    assert affinities.mixing(f, 6)[:, 1, :, 4:].eq(0).all()


def test_gradients_of_beta_and_weight():
    beta, weight = (torch.rand(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(lambda b, w: affinities.grouped(b, w, 11, 4), (beta, weight))
    f = torch.rand(2, 3, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda f: affinities.mixing(f, 10), (f,))


@SIZES
@pytest.mark.parametrize("full", [False, True])
def test_the_smallest_of_all_pairs(full, size):
    bits, groups = 7, -(-7 // size)
    f = torch.randn(3, groups, *((1 << size,) * 2 if full else (size + 1,)))
    assert affinities.group_size(f) == size
    smallest = of_all_pairs(f, bits).amin((-2, -1))
    torch.testing.assert_close(affinities.least(f, bits), smallest)
