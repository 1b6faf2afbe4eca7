"""A run's folder belongs to one run at a time, and what lies in it is not trusted."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import nullcontext, suppress

import pytest
import torch
from training_runs import PLAIN, child, contents, fail, in_step, recipe, status_of, stopped, whole

from ecoformer.storage import CheckpointError
from ecoformer.training import load_recipe, train
from ecoformer.training.folder import RunFolder
from ecoformer.training.run import load_splits


@pytest.fixture
def busy(plain, tmp_path):
    """A folder in which another process trains; its pid; and a function that lets it go on."""
    ready, go = os.pipe(), os.pipe()

    def wait(trainer, loss):
        os.write(ready[1], b".")
        os.read(go[0], 1)
        return loss

    def run():
        with pytest.MonkeyPatch.context() as patch:
            in_step(patch, 3, wait)
            train(plain, tmp_path / "run", show=False)

    pid = child(run)
    os.read(ready[0], 1)
    yield tmp_path / "run", pid, lambda: os.write(go[1], b".")
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for descriptor in (*ready, *go):
        os.close(descriptor)


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_training_is_refused_and_names_the_first(resume, busy, plain, expected):
    folder, pid, go = busy
    before = contents(folder)
    (folder / "recipe.yaml").rename(folder / "hidden") if not resume else None
    with pytest.raises(RuntimeError) as caught:
        train(plain, folder, resume=resume, show=False)
    assert f"{folder} is in use by process {pid} on {socket.gethostname()} since 20" in str(caught.value)
    (folder / "hidden").rename(folder / "recipe.yaml") if not resume else None
    assert contents(folder) == before
    go()
    assert status_of(pid) == 0
    assert whole(plain, folder, resume=True) == expected


def test_a_killed_training_does_not_keep_the_lock(busy, plain, expected):
    folder, pid, _ = busy
    os.kill(pid, signal.SIGKILL)
    assert status_of(pid) == -signal.SIGKILL
    assert (folder / ".lock").exists()
    assert whole(plain, folder, resume=True) == expected


LINKS = (".recipe.yaml.part", ".metrics.jsonl.part", ".result.json.part", "metrics.jsonl", "changes.txt")
LINKS += ("model.safetensors", "result.json", "recipe.yaml", ".lock", "checkpoints/.writing-000000006")


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_links(name, halfway, tmp_path):
    """Where a name is a link to a file of ours, the file stays as it is, whether the run goes on or not."""
    place, mine = halfway.path / name, tmp_path / "mine"
    content = place.read_text() if place.exists() else "mine"
    place.unlink(missing_ok=True)
    mine.write_text(content)
    place.symlink_to(mine)
    slower = recipe(PLAIN, "optimiser.lr=0.001", folder=tmp_path)  # a line of changes.txt
    refused = name in (".lock", "checkpoints/.writing-000000006")
    with pytest.raises((OSError, RuntimeError)) if refused else nullcontext():
        train(slower, halfway.path, resume=True, show=False)
    assert mine.read_text() == content


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_no_folder_is_written_through_a_link(name, halfway, tmp_path):
    other = tmp_path / "other"
    if name == "checkpoints":
        halfway.checkpoints.rename(other)
    else:
        other.mkdir()
    (halfway.path / name).symlink_to(other)
    before = contents(other)
    with pytest.raises(OSError, match=f"{name} is a link"):
        train(recipe(PLAIN, "keep=1", folder=tmp_path), halfway.path, resume=True, show=False)
    assert contents(other) == before


def rewrite(checkpoint, name, change):
    """Change a file of a checkpoint and its checksum, as somebody would who means to."""
    from ecoformer.training.folder import _checksum

    change(checkpoint / name)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = _checksum(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", [b"not a pickle", {"step": 1}], ids=["noise", "incomplete"])
def test_malformed_random_states_are_reported(content, halfway, plain):
    def change(file):
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)

    rewrite(halfway.checkpoint(5), "random_states_0.pkl", change)
    before = contents(halfway.path)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl .*: remove .*step-000000005"):
        train(plain, halfway.path, resume=True, show=False)
    assert contents(halfway.path) == before


def test_a_step_of_accumulation_in_a_file_is_not_believed(tmp_path, monkeypatch):
    chosen, folder = recipe(PLAIN, "accumulate=2", folder=tmp_path), RunFolder(tmp_path / "run")
    expected = whole(chosen, tmp_path / "whole")
    with monkeypatch.context() as patch:
        in_step(patch, 5, fail)
        stopped(chosen, folder.path)

    def change(file):
        torch.save(torch.load(file, weights_only=False) | {"step": 1}, file)

    rewrite(folder.checkpoint(5), "random_states_0.pkl", change)
    assert whole(chosen, folder.path, resume=True) == expected


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_yaml_that_stands_for_billions_of_values(tmp_path):
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMB + "data: {name: recall, options: *i}\n")
    with pytest.raises(ValueError, match="aliases"):
        load_recipe(str(file))
    with pytest.raises(ValueError, match=r"--set data\.options"):
        load_recipe("recall", ["data.options={a: &a [1], b: *a}"])
    for text in ("[" * 90_000, "a: 1\n" * 30_000):
        file.write_text(text)
        with pytest.raises(ValueError, match="not valid YAML"):
            load_recipe(str(file))


MASKED_RECIPE = {**PLAIN, "data": {"name": "masked_sample", "options": {"length": 64, "limit": 64}}}


def hidden(splits):
    return float((splits.test.targets != -100).float().mean())


def test_training_and_testing_hide_the_same_share(tmp_path, monkeypatch):
    chosen = recipe(MASKED_RECIPE, "mask_rate=0.4", folder=tmp_path)
    assert hidden(load_splits(chosen)) == pytest.approx(0.4, abs=0.03)
    rates = []
    monkeypatch.setattr(
        "ecoformer.training.batches.mask_bytes",
        lambda inputs, generator, rate: (rates.append(rate), (inputs.long(), inputs.long() - 1))[1],
    )
    in_step(monkeypatch, 0, fail)
    stopped(chosen, tmp_path / "run")
    assert rates == [0.4]
    with pytest.raises(ValueError, match=r"data\.options\.rate is now mask_rate"):
        recipe(MASKED_RECIPE, "data.options.rate=0.4", folder=tmp_path)
