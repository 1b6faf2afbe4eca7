"""What cannot be written leaves what was there: whole files or none."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import time

import pytest
import torch
from files import all_bits, refused

from ecoformer.storage import read, write


@pytest.mark.parametrize(
    ("odd", "config"),
    [(torch.zeros(2, device="meta"), {}), (torch.eye(2).to_sparse(), {}), ([1.0], {})]
    + [(torch.zeros(2, dtype=torch.complex64), {})]
    + [
        (torch.zeros(1), config)
        for config in ({"a": [torch.zeros(1)]}, {"a": {1}}, {"a": float("nan")}, None)
    ],
)
def test_what_cannot_be_stored(written, odd, config):
    before = written.read_bytes()
    refused(write, written, {"fine": torch.zeros(1), "x": odd}, config, kind=(TypeError, ValueError))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_a_folder_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path, pipe):
        assert str(target) in refused(write, target, {}, {}, kind=IsADirectoryError)
    assert pipe.is_fifo()
    line = refused(write, tmp_path / "no" / "x", {}, {}, kind=FileNotFoundError)
    assert f"no folder {tmp_path / 'no'}" in line


def fail(error):
    def failing(*args, **kwargs):
        raise error

    return failing


FAILURES = {
    "os.replace": fail(OSError(errno.EIO, "no")),
    "os.fsync": fail(OSError(errno.ENOSPC, "no")),
    "os.chmod": fail(PermissionError("no")),
    "safetensors.torch.save_file": fail(KeyboardInterrupt()),
    "secrets.token_hex": fail(KeyboardInterrupt()),
}


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("broken", FAILURES)
def test_failure_leaves_the_old_file_and_nothing_else(path, monkeypatch, broken, existing):
    if existing:
        write(path, {"a": torch.zeros(3)}, {"old": True})
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    monkeypatch.setattr(broken, FAILURES[broken])
    with pytest.raises((OSError, KeyboardInterrupt)):
        write(path, {"a": torch.ones(3)}, {"old": False})
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before


def test_disk_full(written):
    """A limit on the size of files stops the write in the middle, as a full disk would."""
    before, limit = written.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        line = refused(write, written, {"a": torch.zeros(1_000_000)}, {}, kind=OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(written) in line
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_everything_is_on_the_disk_before_the_old_file_goes(written, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: fsync(fd) or events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(
        "os.replace", lambda old, new: replace(old, new) or events.append((str(old), str(new)))
    )
    write(written, {"a": torch.zeros(3)}, {})
    temporary = events[0]
    assert os.path.dirname(temporary) == str(written.parent)
    assert events == [temporary, (temporary, str(written)), str(written.parent)]


KILLED_WRITER = """
import os, random, signal, sys, time
import torch
from ecoformer.storage import read, write

path, rounds = sys.argv[1], int(sys.argv[2])
folder, size, done, cut = os.path.dirname(path), 1_000_000, 0, 0
torch.set_num_threads(1)  # a fork does not inherit the other threads, and would wait for them
write(path, {"x": torch.zeros(size)}, {"n": 0})
random.seed(0)
for turn in range(rounds):
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            while True:
                done += 1
                write(path, {"x": torch.full((size + done,), float(done))}, {"n": done})
                os.write(say, b"x")
        finally:
            os._exit(1)
    os.close(say)
    if not os.read(hear, 1):
        sys.exit("the child could not write")
    time.sleep(random.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(hear)
    tensors, config = read(path)
    before, done = done, config["n"]
    if done <= before or tensors["x"].shape != (size + done,) or not bool((tensors["x"] == done).all()):
        sys.exit(f"file {done} after {before} is torn")
    left = set(os.listdir(folder)) - {os.path.basename(path)}
    cut += bool(left)
    for name in left:
        os.unlink(os.path.join(folder, name))
    if cut and turn > 2:
        break
print(cut)
"""


def test_killed_in_the_middle_of_a_write(path):
    command = [sys.executable, "-c", KILLED_WRITER, str(path), "100"]
    cut = int(subprocess.check_output(command, text=True, timeout=300))
    assert cut > 0, "no child was killed in the middle of a write"


REPLACER = """
import os, sys
target, *sources = sys.argv[1:]
print("ready", flush=True)
while True:
    for source in sources:
        os.link(source, target + ".new")
        os.replace(target + ".new", target)
"""


def test_read_while_being_replaced(tmp_path):
    """A reader sees one file or the other, never one's header with the other's numbers."""
    expected, sources = {}, []
    for n in (1, 2):
        tensors = {"x": torch.full((1000 * n,), float(n)), f"only{n}": torch.full((7,), n)}
        sources.append(str(write(tmp_path / f"{n}.safetensors", tensors, {"n": n})))
        expected[n] = all_bits(tensors)
    target = tmp_path / "x.safetensors"
    shutil.copy(sources[0], target)
    command = [sys.executable, "-c", REPLACER, str(target), *sources]
    seen = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as replacer:
        replacer.stdout.readline()
        try:
            reads, end = 0, time.monotonic() + 60
            # On a busy machine the other process may not run during the first reads.
            while reads < 150 or (len(seen) < 4 and time.monotonic() < end):
                tensors, config = read(target)
                assert all_bits(tensors) == expected[config["n"]]
                seen.add(config["n"])
                seen.add(-read(target)[1]["n"])
                reads += 1
        finally:
            replacer.kill()
    assert seen == {1, 2, -1, -2}
