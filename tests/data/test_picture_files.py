"""Pictures in folders: found, numbered and decoded; damage is named in one line."""

import io

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from ecoformer.data import load
from ecoformer.data.splits import limited


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
    places = ["train/cat/b.png", "train/cat/a/x.PNG", "train/ant/1.png", "val/cat/2.png", "val/ant/3.png"]
    for i, place in enumerate(places):
        put(tmp_path / place, encoded(i))
    put(tmp_path / "train/cat/notes.txt", b"no picture")
    put(tmp_path / "train/cat/.hidden.png", b"no picture")
    return tmp_path


def test_folders(folder):
    splits = load("imagefolder", folder)
    assert (splits.kind, splits.classes) == ("images", 2)
    assert splits.train.targets == [0, 1, 1]
    assert [same(splits.train[i][0], seed) for i, seed in enumerate([2, 0, 1])] == [True] * 3
    assert [label for _, label in splits.test] == [0, 1]
    assert same(splits.test[1][0], 3)


def test_val_goes_before_test(folder):
    for name in ("ant", "cat"):
        put(folder / "test" / name / "9.png", encoded(9))
    assert same(load("imagefolder", folder).test[1][0], 3)
    (folder / "val").rename(folder / "other")
    assert same(load("imagefolder", folder).test[1][0], 9)


def test_grey_and_palette_become_rgb_and_limits_hold(folder):
    put(folder / "val/cat/2.png", encoded(0, mode="L"))
    put(folder / "val/cat/3.jpg", encoded(0, form="gif", mode="P"))
    test = load("imagefolder", folder).test
    assert [picture.mode for picture, _ in test] == ["RGB"] * 3
    some = load("imagefolder", folder, limit=2).train
    assert [some[i][1] for i in range(len(some))] == [0, 1]
    assert same(some[0][0], 2)


def test_damage_in_folders(folder):
    put(folder / "val/cat/2.png", encoded(3)[:40])
    with pytest.raises(ValueError, match=r"2\.png is not a readable JPEG, PNG") as caught:
        load("imagefolder", folder).test[1]
    assert "\n" not in str(caught.value)
    put(folder / "val/cat/2.png", b"text")
    with pytest.raises(ValueError, match=r"2\.png is not a readable JPEG, PNG[\w, ]*$"):
        load("imagefolder", folder).test[1]
    put(folder / "val/dog/2.png", encoded(3))
    with pytest.raises(ValueError, match="only one of train and val has the class 'dog'"):
        load("imagefolder", folder)


def test_folders_without_pictures(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*val; put CLASS/\*\.jpg there"):
        load("imagefolder", tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(FileNotFoundError, match="train"):
        load("imagefolder", tmp_path)


def test_postscript_is_not_handed_to_ghostscript(folder, monkeypatch):
    def run(*args, **kwargs):
        raise SystemExit("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    put(folder / "val/cat/2.png", encoded(3, form="eps"))
    with pytest.raises(ValueError, match=r"2\.png is not a readable JPEG, PNG"):
        load("imagefolder", folder).test[1]


def test_a_picture_of_too_many_pixels_is_refused(folder):
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, "png")
    put(folder / "val/cat/2.png", buffer.getvalue())
    with pytest.raises(ValueError, match=r"2\.png .* exceeds limit"):
        load("imagefolder", folder).test[1]


class Own:
    """A data set as torchvision's are."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return picture(i), self.targets[i]


def test_data_sets_of_others_are_limited_by_their_targets():
    own = Own([0, 0, 0, 0, 1])
    some = limited(own, 2)
    assert [label for _, label in (some[0], some[1])] == [0, 1]
    assert same(some[1][0], 4)
    assert limited(own, 5) is own
