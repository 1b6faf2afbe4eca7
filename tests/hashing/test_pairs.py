"""Pairs found block by block, the sparse labels made of them, and the quality measured with both."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer import KernelHasher, reference
from ecoformer.hashing import pairs as pairs_module
from ecoformer.hashing.pairs import SparseLabels, find_pairs
from ecoformer.hashing.quality import hash_quality

LENGTHS = (11, 7, 1, 3, 0)


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def codes(*shape, seed=1):
    return reference.sign(tokens(*shape, seed=seed))


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


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shape", [(13, 4), (3, 13, 4), (2, 3, 13, 4)])
@pytest.mark.parametrize("l", [1, 3, 6])
def test_equals_reference(shape, l):  # noqa: E741
    x = tokens(*shape)
    found = find_pairs(x, l)
    assert found.similar.shape == (*shape[:-1], l)
    assert torch.equal(dense(found), reference.pairwise_labels(x, l))


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


def test_blocks_bound_the_scores(monkeypatch):
    monkeypatch.setattr(pairs_module, "_BLOCK_ELEMENTS", 100)
    x = tokens(2, 3, 17, 4)
    rows = list(pairs_module.row_blocks(x))
    assert [i for block in rows for i in range(17)[block]] == list(range(17))
    assert len(rows) == 17  # 2 x 3 x 17 scores a row are more than a block holds already
    assert [block.stop - block.start for block in pairs_module.row_blocks(x[0, 0])] == [5, 5, 5, 2]


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


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("bits", [1, 2, 9])  # with one or two bits nearly all codes tie
def test_quality_equals_reference(bits):
    x, h = tokens(2, 3, 15, 4), codes(2, 3, 15, bits)
    quality = hash_quality(h, x, neighbours=4)
    objective = reference.objective(h, reference.pairwise_labels(x, 4)).mean(dim=0)
    recall = reference.recall(h, x, 4).mean(dim=0)
    torch.testing.assert_close(quality.objective_per_head, objective)
    torch.testing.assert_close(quality.recall_per_head, recall, check_dtype=False)
    assert quality.objective == pytest.approx(float(objective.mean()))
    assert quality.recall == pytest.approx(float(recall.mean()))
    assert quality.neighbours == 4


def test_quality_of_a_fitted_hasher():
    x = tokens(2, 2, 30, 6, dtype=torch.float32)
    hasher = KernelHasher(2, 6, bits=8, support=5).fit(x)
    quality = hasher.quality(x.bfloat16(), neighbours=5)
    h = hasher(x.bfloat16()).float()
    labels = reference.pairwise_labels(x.bfloat16().float(), 5)
    assert quality.objective == pytest.approx(float(reference.objective(h, labels).mean()))
    assert not quality.objective_per_head.requires_grad


def test_perfect_codes():
    """Two far clusters, and codes that name the cluster: each token finds only its own kind."""
    cluster = torch.arange(12) % 2
    centres = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    x = (centres[cluster] + 0.01 * tokens(12, 2)).expand(1, 1, 12, 2)
    h = (2.0 * cluster - 1).double().view(1, 1, 12, 1).expand(1, 1, 12, 8)
    assert hash_quality(h, x, neighbours=5).recall == pytest.approx(1)
    # Left over: a token with itself, and the sixth token of the other cluster, for which Y has no label.
    assert hash_quality(h, x, neighbours=5).objective == 2 * 12 * 64
    assert hash_quality(torch.ones_like(h), x, neighbours=5).recall == pytest.approx(5 / 11)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("scattered", [False, True])
def test_quality_with_padding_is_as_if_cut_off(scattered):
    lengths = (11, 8, 4)
    valid = valid_rows(lengths, 11, scattered)
    x, h = tokens(3, 2, 11, 4), codes(3, 2, 11, 5)
    gap = ~valid[:, None, :, None]
    objective, recall = [], []
    for sample, code, present in zip(x, h, valid, strict=True):
        cut, code = sample[:, present], code[:, present]
        kept = width(cut.shape[1], 3)
        objective.append(reference.objective(code, reference.pairwise_labels(cut, kept)))
        recall.append(reference.recall(code, cut, kept) * cut.shape[1])
    quality = hash_quality(h.masked_fill(gap, torch.nan), x.masked_fill(gap, 1e3), 3, valid)
    torch.testing.assert_close(quality.objective_per_head, torch.stack(objective).mean(dim=0))
    expected = torch.stack(recall).sum(dim=0) / sum(lengths)
    torch.testing.assert_close(quality.recall_per_head, expected, check_dtype=False)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_quality_of_few_tokens(n):
    """Where no pairs are left, nothing can be recalled; the objective is that of empty labels."""
    x, h = tokens(2, 2, n, 4), codes(2, 2, n, 5)
    quality, kept = hash_quality(h, x, neighbours=10), width(n, 10)
    assert quality.neighbours == kept
    objective = reference.objective(h, reference.pairwise_labels(x, kept))
    torch.testing.assert_close(quality.objective_per_head, objective.mean(dim=0))
    assert 0 <= quality.recall <= 1


@pytest.mark.parametrize("neighbours", [0, -1])
def test_neighbours_out_of_range(neighbours):
    with pytest.raises(ValueError, match=f"^neighbours must be at least 1, got {neighbours}$"):
        hash_quality(codes(1, 1, 9, 4), tokens(1, 1, 9, 4), neighbours)
