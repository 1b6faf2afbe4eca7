"""Stored data sets come back as they were; files that do not belong together are refused."""

import pytest
import torch

from ecoformer.data import Images, Splits, load, store
from ecoformer.storage import CheckpointError, write

SETS = {
    "digits": {"size": 8},
    "recall": {"count": 9, "test_count": 4},
    "listops": {"count": 9, "test_count": 4, "min_length": 5, "max_length": 30},
    "masked_sample": {"length": 512},
}


@pytest.mark.parametrize("name", SETS)
def test_round_trip(name, tmp_path):
    splits = load(name, **SETS[name])
    again = load("stored", store(splits, tmp_path / "deep" / "folder"))
    for part in ("train", "test"):
        ours, theirs = getattr(splits, part), getattr(again, part)
        for field in ("inputs", "targets"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field))
            assert getattr(ours, field).dtype == getattr(theirs, field).dtype
    for field in ("kind", "classes", "vocabulary", "length", "name", "masked"):
        assert getattr(again, field) == getattr(splits, field)


def test_files_of_two_calls(tmp_path):
    splits = load("recall", **SETS["recall"])
    store(splits, tmp_path)
    test = (tmp_path / "test.safetensors").read_bytes()
    store(splits, tmp_path)
    (tmp_path / "test.safetensors").write_bytes(test)
    with pytest.raises(CheckpointError, match="of two different calls: store them again"):
        load("stored", tmp_path)


def test_other_files(tmp_path):
    store(load("recall", **SETS["recall"]), tmp_path)
    (tmp_path / "test.safetensors").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match=r"holds no test\.safetensors; ecoformer\.data\.store writes"):
        load("stored", tmp_path)
    (tmp_path / "test.safetensors").write_bytes((tmp_path / "train.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"test\.safetensors is not the test part"):
        load("stored", tmp_path)
    write(tmp_path / "train.safetensors", {"x": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match=r"train\.safetensors is not the train part"):
        load("stored", tmp_path)


def test_pictures_are_not_stored(tmp_path):
    pictures = Images((), torch.zeros(0))
    with pytest.raises(TypeError, match="train is Images"):
        store(Splits(pictures, pictures, "images", 2), tmp_path / "x")
    assert not (tmp_path / "x").exists()
