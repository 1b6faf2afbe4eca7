"""Associative recall: the answer stands in the list, beside its key, and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoformer.data import IGNORED, load


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.integers(1, 7), st.integers(0, 99))
def test_answers_by_looking_them_up(pairs, queries, spare, values, seed):
    queries, keys = min(pairs, queries), pairs + spare
    options = {"pairs": pairs, "queries": queries, "keys": keys, "values": values, "seed": seed}
    try:
        splits = load("recall", count=20, test_count=3, **options)
    except ValueError as error:
        assert "too few lists" in str(error)  # noqa: PT017
        return
    assert (splits.kind, splits.classes) == ("tokens", values)
    assert (splits.vocabulary, splits.length) == (1 + keys + keys * values, pairs + queries)
    for part in (splits.train, splits.test):
        for row, targets in zip(part.inputs.tolist(), part.targets.tolist(), strict=True):
            book = dict(divmod(token - 1 - keys, values) for token in row[:pairs])
            asked = [token - 1 for token in row[pairs:]]
            assert len(book) == pairs
            assert len(set(asked)) == queries
            assert set(book) <= set(range(keys))
            assert targets[:pairs] == [IGNORED] * pairs
            assert targets[pairs:] == [book[key] for key in asked]


def test_draws():
    splits = load("recall")
    assert splits.train.inputs.shape == (20_000, 40)
    assert splits.train.inputs.dtype == splits.train.targets.dtype == torch.int16
    asked = splits.train.targets[:, 32:].flatten().long()
    assert (asked.bincount(minlength=64) / len(asked) * 64 - 1).abs().max() < 0.1
    first = ((splits.train.inputs[:, 0].long() - 129) // 64).bincount(minlength=128)
    assert (first / 20_000 * 128 - 1).abs().max() < 0.35
    assert torch.equal(load("recall").train.inputs, splits.train.inputs)
    assert not torch.equal(load("recall", seed=1).train.inputs, splits.train.inputs)


def test_no_list_is_in_both_splits():
    # Of 3 * 2 * 16 = 96 lists, 60 draws take about 45: test lists must be drawn again and again.
    splits = load("recall", pairs=2, queries=1, keys=3, values=4, count=60, test_count=30)
    train, test = ({tuple(row[:2]) for row in part.inputs.tolist()} for part in (splits.train, splits.test))
    assert not train & test
    with pytest.raises(ValueError, match="too few lists for test_count=5"):
        load("recall", pairs=1, queries=1, keys=2, values=2, count=500, test_count=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 200}, "pairs=200 .*keys=128"),
        ({"queries": 33}, "queries=33 .*pairs=32"),
        ({"values": 0}, "positive"),
        ({"keys": 512}, "keys=512 .*32768"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        load("recall", **options)
