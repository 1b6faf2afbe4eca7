"""Checkpoints that are damaged, or cannot be read for the moment: the last good state stays."""

from __future__ import annotations

import errno
import os
import pkgutil

import pytest
from training_runs import PLAIN, contents, fail, in_step, recipe, stopped, whole

from ecoformer.storage import CheckpointError
from ecoformer.training import train


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": lambda c: flip(c / "model.safetensors"),
    "optimiser flipped": lambda c: flip(c / "optimizer.bin"),
    "truncated": lambda c: os.truncate(c / "optimizer.bin", 100),
    "removed": lambda c: (c / "progress.safetensors").unlink(),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "empty manifest": lambda c: (c / "manifest.json").write_text("{}"),
    "odd manifest": lambda c: (c / "manifest.json").write_text("[1]"),
    "emptied": lambda c: [p.unlink() for p in c.iterdir()],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint(how, halfway, plain, expected):
    DAMAGES[how](halfway.checkpoint(5))
    with pytest.warns(UserWarning, match="step-000000005 is damaged .* trying an older one"):
        found = whole(plain, halfway.path, resume=True)
    assert found == expected


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(halfway, tmp_path, monkeypatch):
    single = recipe(PLAIN, "keep=1", folder=tmp_path)
    flip(halfway.checkpoint(5) / "model.safetensors")
    halfway.checkpoint(5).rename(halfway.checkpoint(7))

    in_step(monkeypatch, 6, fail)
    with pytest.warns(UserWarning, match="damaged"):
        stopped(single, halfway.path, resume=True)
    assert (halfway.steps(), halfway.newest_good()) == ([6], 6)


@pytest.mark.parametrize("name", ["step-²", "step-٣٣٣٣٣٣٣٣٣", "step-7", "step-"])
def test_other_folders_beside_the_checkpoints(name, halfway, plain, expected):
    (halfway.checkpoints / name).mkdir()
    found = whole(plain, halfway.path, resume=True)
    assert found["checkpoints"].pop(found["checkpoints"].index(name))
    assert found == expected


def test_nothing_but_damaged_checkpoints(halfway, plain):
    for step in halfway.steps():
        flip(halfway.checkpoint(step) / "model.safetensors")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="every checkpoint"):
        train(plain, halfway.path, resume=True, show=False)
    assert halfway.steps() == [4, 5]


READS = {
    "a file": ("ecoformer.training.folder._checksum", "optimizer.bin"),
    "the manifest": ("pathlib.Path.read_text", "manifest.json"),
    "the folder": ("os.listdir", "checkpoints"),
}


@pytest.mark.parametrize("what", READS)
def test_a_passing_error_in_reading_loses_nothing(what, halfway, plain, expected, monkeypatch):
    where, name = READS[what]
    original = pkgutil.resolve_name(where)

    def failing(path, **options):
        if str(path).endswith(name):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return original(path, **options)

    before = contents(halfway.path)
    with monkeypatch.context() as patch:
        patch.setattr(where, failing)
        with pytest.raises(OSError, match=rf"(?s){name}.*Stale|Stale.*{name}"):
            train(plain, halfway.path, resume=True, show=False)
    assert contents(halfway.path) == before
    assert whole(plain, halfway.path, resume=True) == expected
