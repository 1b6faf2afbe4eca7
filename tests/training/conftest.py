"""Runs that several files look at."""

from __future__ import annotations

import shutil

import pytest
from training_runs import PLAIN, fail, in_step, outcome, recipe, stopped, whole

from ecoformer.training.folder import RunFolder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return recipe(PLAIN, folder=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def finished(plain, tmp_path_factory):
    """Folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    whole(plain, folder)
    return folder


@pytest.fixture(scope="module")
def expected(finished):
    return outcome(finished)


@pytest.fixture(scope="module")
def cut_short(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "run"
    with pytest.MonkeyPatch.context() as patch:
        in_step(patch, 5, fail)
        stopped(plain, folder)
    return folder


@pytest.fixture
def halfway(cut_short, tmp_path):
    """A run with checkpoints of steps 4 and 5 that was stopped in step 6."""
    folder = RunFolder(shutil.copytree(cut_short, tmp_path / "run"))
    assert folder.steps() == [4, 5]
    return folder
