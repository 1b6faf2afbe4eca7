"""The registry, limits with balanced classes, and what arrays and splits promise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer.data import Arrays, Splits, list_datasets, load, register_dataset, registry
from ecoformer.data.splits import balanced


def arrays(n=6):
    return Arrays(torch.arange(n * 2, dtype=torch.int16).view(n, 2), torch.arange(n) % 3)


def test_names():
    files = {"aan", "cifar10", "cifar100", "imagefolder", "imdb", "masked_bytes"}
    assert {name for name in list_datasets() if registry._REGISTRY[name][1]} == files
    assert set(list_datasets()) - files == {"digits", "listops", "masked_sample", "mosaic", "recall"}


def test_registering(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @register_dataset("mine")
    def mine(*, size=2):
        return Splits(arrays(size), arrays(size), "text", 3, 12, 2)

    splits = load("mine", size=5)
    assert (splits.name, len(splits.train)) == ("mine", 5)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_dataset("mine")(mine)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"name": "zzz"}, ValueError, "'zzz': there are aan, cifar10"),
        ({"name": "digits", "sise": 3}, TypeError, "digits has no option sise: it takes size"),
        ({"name": "digits", "limit": 0}, ValueError, "limit must be"),
        ({"name": "digits", "root": "x"}, ValueError, "root='x'"),
        ({"name": "imdb"}, ValueError, "root, a folder that holds train/pos/"),
        ({"name": "imdb", "root": "no/where"}, FileNotFoundError, "no folder no/where; it must hold"),
    ],
)
def test_wrong_calls_get_one_line(call, error, message):
    with pytest.raises(error) as caught:
        load(**call)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [n for n in list_datasets() if registry._REGISTRY[n][1]])
def test_an_empty_folder_says_what_must_lie_there(name, tmp_path):
    with pytest.raises((FileNotFoundError, ValueError)) as caught:
        load(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 50))
def test_limits_balance_classes(labels, limit):
    labels = torch.tensor(labels)
    chosen = balanced(labels, limit)
    assert len(chosen) == min(limit, len(labels))
    assert (chosen.diff() > 0).all()
    taken, there = labels[chosen].bincount(minlength=5), labels.bincount(minlength=5)
    unexhausted = taken[taken < there]
    assert not len(unexhausted) or taken.max() <= unexhausted.min() + 1
    assert torch.equal(balanced(labels, limit), chosen)


def test_limit_of_a_data_set():
    full, some = load("digits"), load("digits", limit=25)
    assert len(some.train) == len(some.test) == 25
    assert set(some.train.targets.bincount().tolist()) == {2, 3}
    rows = {bytes(x.numpy()) for x in full.train.inputs}
    assert all(bytes(x.numpy()) in rows for x in some.train.inputs)
    assert len(load("digits", limit=10_000).train) == len(full.train)
    assert len(load("recall", limit=7, count=9, test_count=9).train) == 7


def test_arrays():
    part = arrays()
    inputs, targets = part.batch(torch.tensor([4, 0]))
    assert inputs.tolist() == [[8, 9], [0, 1]]
    assert inputs.dtype == torch.int16
    assert targets.tolist() == [1, 0]
    assert len(part) == 6
    assert part.to("meta").inputs.is_meta
    with pytest.raises(ValueError, match=r"inputs \(2, 2\) and targets \(3,\)"):
        Arrays(torch.zeros(2, 2), torch.zeros(3))


def test_splits_check_their_kind():
    with pytest.raises(ValueError, match=r"inputs of kind 'images' have 4 dimensions, got \(6, 2\)"):
        Splits(arrays(), arrays(), "images", 3)
    with pytest.raises(ValueError, match="kind must be"):
        Splits(arrays(), arrays(), "sound", 3)
