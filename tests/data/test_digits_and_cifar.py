"""Pictures in memory: scikit-learn's digits and the official CIFAR files."""

import hashlib
import pickle
import sys

import numpy as np
import pytest
import torch

from ecoformer.data import load


def test_digits():
    splits = load("digits")
    assert splits.train.inputs.shape == (1347, 3, 32, 32)
    assert splits.test.inputs.shape == (450, 3, 32, 32)
    assert splits.train.inputs.dtype == torch.uint8
    assert (splits.kind, splits.classes, splits.name) == ("images", 10, "digits")
    assert splits.train.inputs.max() == 255
    shares = splits.test.targets.bincount() / (
        splits.train.targets.bincount() + splits.test.targets.bincount()
    )
    assert (shares - 0.25).abs().max() < 0.006
    again = load("digits")
    assert torch.equal(again.train.inputs, splits.train.inputs)
    assert torch.equal(again.test.targets, splits.test.targets)


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    splits, source = load("digits", size=8), load_digits()
    ours = torch.cat([splits.train.inputs, splits.test.inputs])[:, 0].flatten(1)
    expected = torch.from_numpy(np.round(source.data * 255 / 16)).to(torch.uint8)
    assert sorted(map(bytes, ours.numpy())) == sorted(map(bytes, expected.numpy()))
    labels = {bytes(x): y for x, y in zip(expected.numpy(), source.target, strict=True)}
    assert all(
        labels[bytes(x[0].flatten().numpy())] == y
        for x, y in zip(splits.test.inputs, splits.test.targets, strict=True)
    )
    with pytest.raises(ValueError, match="size must be at least the digits' own 8, got 7"):
        load("digits", size=7)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A folder in the official layout, and torchvision's checksums set to its files."""
    from torchvision.datasets import CIFAR100

    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    generator = np.random.default_rng(0)
    data = {
        name: generator.integers(0, 256, (n, 3072), dtype=np.uint8) for name, n in (("train", 6), ("test", 4))
    }
    for name, rows in data.items():
        entry = {"data": rows, "fine_labels": [(7 * i) % 100 for i in range(len(rows))]}
        (folder / name).write_bytes(pickle.dumps(entry, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})
    return tmp_path, data


def test_cifar(cifar):
    root, data = cifar
    splits = load("cifar100", root)
    assert torch.equal(splits.train.inputs, torch.from_numpy(data["train"]).view(-1, 3, 32, 32))
    assert torch.equal(splits.test.inputs, torch.from_numpy(data["test"]).view(-1, 3, 32, 32))
    assert splits.train.targets.tolist() == [0, 7, 14, 21, 28, 35]
    assert splits.train.targets.dtype == torch.int64
    assert (splits.kind, splits.classes) == ("images", 100)


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('run')",)


def test_a_strangers_pickle_is_not_opened(cifar):
    root, _ = cifar
    (root / "cifar-100-python" / "test").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="differ from the official ones, and are not opened"):
        load("cifar100", root)


def test_missing_cifar(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-py; unpack cifar-10-python.tar.gz in"):
        load("cifar10", tmp_path)


def test_without_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'ecoformer\[vision\]'"):
        load("cifar10", tmp_path)
