"""A run's folder belongs to one run at a time, and what lies in it is not trusted."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import nullcontext, suppress

import pytest
from training_runs import PLAIN, child, contents, in_step, recipe, status_of, whole

from ecoformer.training import train


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


def test_a_second_thread_is_refused_and_the_first_goes_on(plain, expected, tmp_path, monkeypatch):
    said = []

    def again(trainer, loss):
        def run():
            try:
                train(plain, tmp_path / "." / "run", resume=True, show=False)
            except Exception as error:
                said.append(str(error))

        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=run, daemon=True)
            other.start()
            other.join(20)
        return loss

    in_step(monkeypatch, 3, again)
    assert whole(plain, tmp_path / "run") == expected
    assert said == [f"{tmp_path / 'run'} is in use by another thread: choose another folder"]


def test_a_killed_training_does_not_keep_the_lock(busy, plain, expected):
    folder, pid, _ = busy
    os.kill(pid, signal.SIGKILL)
    assert status_of(pid) == -signal.SIGKILL
    assert (folder / ".lock").exists()
    assert whole(plain, folder, resume=True) == expected


LINKS = ("metrics.jsonl", "changes.txt", "model.safetensors", "result.json", "recipe.yaml", ".lock")
LINKS += ("checkpoints/.writing-000000006",)


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
