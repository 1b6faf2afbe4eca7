"""Pictures in folders and in tar shards: found, numbered and decoded; damage is named in one line."""

import gzip
import io
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from ecoformer.data import load


def picture(seed, size=(5, 4), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(seed, form="png", **kwargs):
    buffer = io.BytesIO()
    picture(seed, **kwargs).save(buffer, form)
    return buffer.getvalue()


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def same(found, seed):
    return np.array_equal(np.asarray(found), np.asarray(picture(seed)))


@pytest.fixture
def folder(tmp_path):
    for i, place in enumerate(["train/cat/b.png", "train/cat/a/x.PNG", "train/ant/1.png", "val/cat/2.png"]):
        put(tmp_path / place, encoded(i))
    put(tmp_path / "train/cat/notes.txt", b"no picture")
    put(tmp_path / "train/cat/.hidden.png", b"no picture")
    return tmp_path


def test_folders(folder):
    splits = load("imagefolder", folder)
    assert (splits.kind, splits.classes) == ("images", 2)
    assert splits.train.labels.tolist() == [0, 1, 1]
    assert [same(splits.train[i][0], seed) for i, seed in enumerate([2, 1, 0])] == [True] * 3
    assert splits.train[-1][1] == 1
    assert splits.test[0][1] == 1, "by the number that the class has in train"
    assert same(splits.test[0][0], 3)
    with pytest.raises(IndexError, match="index"):
        splits.train[3]


def test_val_goes_before_test(folder):
    put(folder / "test/ant/9.png", encoded(9))
    assert load("imagefolder", folder).test.labels.tolist() == [1]
    (folder / "val").rename(folder / "other")
    assert load("imagefolder", folder).test.labels.tolist() == [0]


def test_grey_and_palette_become_rgb_and_limits_hold(folder):
    put(folder / "val/cat/2.png", encoded(0, mode="L"))
    put(folder / "val/cat/3.jpg", encoded(0, form="gif", mode="P"))
    test = load("imagefolder", folder).test
    assert [test[i][0].mode for i in range(2)] == ["RGB", "RGB"]
    some = load("imagefolder", folder, limit=2).train
    assert some.labels.tolist() == [0, 1]
    assert same(some[0][0], 2)


def test_damage_in_folders(folder):
    put(folder / "val/cat/2.png", encoded(3)[:40])
    with pytest.raises(ValueError, match=r"2\.png: .* not a readable JPEG, PNG") as caught:
        load("imagefolder", folder).test[0]
    assert "\n" not in str(caught.value)
    put(folder / "val/cat/2.png", b"text")
    with pytest.raises(ValueError, match=r"2\.png: .* not a readable JPEG, PNG[\w, ]*$"):
        load("imagefolder", folder).test[0]
    put(folder / "val/dog/2.png", encoded(3))
    with pytest.raises(ValueError, match="val has a class 'dog' that train lacks"):
        load("imagefolder", folder)


def test_folders_without_pictures(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*val; put CLASS/\*\.jpg there"):
        load("imagefolder", tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(FileNotFoundError, match="train has no folders"):
        load("imagefolder", tmp_path)
    (tmp_path / "train/cat").mkdir()
    with pytest.raises(FileNotFoundError, match="train holds no pictures"):
        load("imagefolder", tmp_path)


def tar(path, entries):
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as shard:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))


def sample(key, seed, label, form="png"):
    return [(f"{key}.cls", str(label).encode()), (f"{key}.{form}", encoded(seed, form))]


@pytest.fixture
def shards(tmp_path):
    tar(tmp_path / "train-000.tar", [*sample("d/a", 0, 3), *sample("d/b", 1, 0), ("d/b.json", b"{")])
    tar(tmp_path / "train-001.tar", [*sample("c" * 120, 2, 1, form="webp"), ("c.txt", b"caption")])
    tar(tmp_path / "val-0.tar", sample("v", 5, 2))
    return tmp_path


def test_shards(shards):
    splits = load("webdataset", shards)
    assert (splits.kind, splits.classes) == ("images", 4)
    assert splits.train.labels.tolist() == [3, 0, 1]
    assert same(splits.train[0][0], 0)
    assert same(splits.train[1][0], 1)
    assert splits.train[2][0].size == (5, 4)
    assert same(splits.test[0][0], 5)
    assert load("webdataset", shards, train="*-001.tar").train.labels.tolist() == [1]
    assert load("webdataset", shards, limit=2).train.labels.tolist() == [0, 1]


def test_workers(shards):
    train = load("webdataset", shards).train
    loader = DataLoader(train, batch_size=None, sampler=[2, 1, 0, 1], num_workers=2)
    assert [label for _, label in loader] == [1, 0, 3, 0]
    assert same(pickle.loads(pickle.dumps(train))[1][0], 1), "as workers that are spawned get it"


@pytest.mark.parametrize("empty", ["train-000.tar", "train-002.tar"])
def test_an_empty_shard_beside_full_ones(shards, empty):
    (shards / "train-000.tar").rename(shards / "train-003.tar")
    tar(shards / empty, [])
    splits = load("webdataset", shards)
    assert splits.train.labels.tolist() == [1, 3, 0]
    assert same(splits.train[2][0], 1)
    assert splits.classes == 4


PICTURE = ("k.png", encoded(0))
DAMAGE = {
    "'k' lacks a label": [PICTURE],
    "'k' lacks a label, KEY.cls": [PICTURE, ("k.json", b'{"label": 1}')],
    "'k' lacks a picture": [("k.cls", b"1")],
    "'k.cls' must hold a class number": [PICTURE, ("k.cls", b"cat")],
    "'k.cls' must hold a class number below 100,000": [PICTURE, ("k.cls", b"-1")],
    "'k' has two pictures": [PICTURE, ("k.cls", b"1"), ("k.jpg", b"")],
    "hold no samples": [],
}


@pytest.mark.parametrize("message", DAMAGE)
def test_wrong_samples_are_named(shards, message):
    tar(shards / "val-0.tar", DAMAGE[message])
    refused(shards, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tar: tar[: len(tar.rstrip(b"\0")) - 20], "cut short within 'v.png'"),
        (lambda tar: tar[:1024], "byte 1024"),  # the label's header and data, no picture, no end
        (lambda tar: tar[:1024] + b"x" * 512 + tar[1536:], "byte 1024"),
        (gzip.compress, "not a plain tar"),
    ],
    ids=["within", "between", "header", "compressed"],
)
def test_damaged_shards(shards, damage, message):
    path = shards / "val-0.tar"
    path.write_bytes(damage(path.read_bytes()))
    refused(shards, message)


def refused(shards, message):
    with pytest.raises(ValueError, match=r"val-0\.tar") as caught:
        load("webdataset", shards)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_picture_is_named(shards):
    tar(shards / "val-0.tar", [("k.cls", b"1"), ("k.png", b"nothing")])
    with pytest.raises(ValueError, match=r"val-0\.tar, byte \d+: .* not a readable"):
        load("webdataset", shards).test[0]


def test_a_shard_that_shrank_is_named(shards):
    test = load("webdataset", shards).test
    (shards / "val-0.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val-0\.tar, byte \d+: the picture is cut short"):
        test[0]


def test_missing_shards(shards):
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*none-\*\.tar; set train= and test="):
        load("webdataset", shards, train="none-*.tar")
