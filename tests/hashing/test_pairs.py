"""Pairs found block by block, and the sparse labels made of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer import reference
from ecoformer.hashing import pairs as pairs_module
from ecoformer.hashing.pairs import SparseLabels, find_pairs

LENGTHS = (11, 7, 1, 3, 0)


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def width(n, wanted):
    """How many similar tokens a row of n tokens can have beside as many dissimilar ones."""
    return min(wanted, max(0, (n - 1) // 2))


def dense(pairs):
    """The labels as matrices; adds where a pair is in both lists, so that this would show."""
    n = pairs.similar.shape[-2]
    labels = pairs.counts.new_zeros(*pairs.similar.shape[:-1], n)
    return labels.scatter_add(-1, pairs.similar, pairs.counts).scatter_add(
        -1, pairs.dissimilar, -pairs.counts
    )


def valid_rows(lengths, n, scattered):
    """(B, N), True for `length` tokens a sample: the first ones, or any."""
    generator = torch.Generator().manual_seed(3)
    places = [torch.randperm(n, generator=generator) if scattered else torch.arange(n) for _ in lengths]
    return torch.stack([place < length for place, length in zip(places, lengths, strict=True)])


@pytest.fixture(params=[1, 60, None], ids=["row by row", "few rows", "one block"])
def blocks(request, monkeypatch):
    """Score blocks of at most this many elements."""
    if request.param is not None:
        monkeypatch.setattr(pairs_module, "_BLOCK_ELEMENTS", request.param)


@given(
    n=st.integers(1, 14),
    l=st.integers(1, 8),
    block=st.integers(1, 200),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-9, 1.0, 1e9]),
)
def test_any_size(n, l, block, seed, scale):  # noqa: E741
    x = tokens(2, n, 3, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs_module, "_BLOCK_ELEMENTS", block)
        labels = dense(find_pairs(x * scale, l))
    kept = width(n, l)
    assert ((labels == 1).sum(-1) == kept).all()
    assert ((labels == -1).sum(-1) == kept).all()
    assert (labels.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert torch.equal(labels, reference.pairwise_labels(x, kept))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("content", [0.0, 1e3, float("nan")])
def test_padding_is_as_if_cut_off(scattered, content):
    n = max(LENGTHS)
    valid = valid_rows(LENGTHS, n, scattered)
    x = tokens(len(LENGTHS), n, 4)
    x[~valid] = content
    labels = dense(find_pairs(x, 4, valid))
    for sample, present, found in zip(x, valid, labels, strict=True):
        cut = sample[present]
        expected = torch.zeros(n, n, dtype=torch.float64)
        expected[present.outer(present)] = reference.pairwise_labels(cut, width(len(cut), 4)).flatten()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("x", [torch.ones(9, 4), torch.zeros(9, 4), torch.eye(3).repeat(3, 1)])
def test_equal_tokens_are_in_one_list_only(x):
    labels = dense(find_pairs(x, 3))
    assert torch.equal(labels.abs().sum(-1), torch.full((9,), 6.0))


@pytest.mark.parametrize("n", [1, 2, 3, 12])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_sparse_labels_multiply_like_dense_ones(n, lead):
    found = find_pairs(tokens(*lead, n, 4), 2)
    labels, sparse = dense(found), SparseLabels(found)
    x = tokens(*lead, n, 5, seed=1)
    expected = (labels + labels.mT) / 2 @ x
    torch.testing.assert_close(sparse @ x, expected)
    strided = x.mT.contiguous().mT
    torch.testing.assert_close(sparse @ strided, expected)
    assert (sparse @ x.float()).dtype == torch.float32


@pytest.mark.parametrize("scattered", [False, True])
def test_sparse_labels_with_padding(scattered):
    valid = valid_rows(LENGTHS, 11, scattered)
    found = find_pairs(tokens(len(LENGTHS), 11, 4), 3, valid)
    labels, sparse = dense(found), SparseLabels(found)
    x = tokens(len(LENGTHS), 11, 2, seed=1)
    torch.testing.assert_close(sparse @ x, (labels + labels.mT) / 2 @ x)
    assert (sparse @ x)[~valid].eq(0).all()
