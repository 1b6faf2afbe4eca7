"""Checkpoint files: what is written is what is read, or one clear line; never half of it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given
from torch import nn

from ecoformer import (
    KernelHasher,
    UnfittedHasherError,
    create_attention,
    fit_hashers,
    hashers_of,
    list_attentions,
)
from ecoformer.storage import CheckpointError, load_into, read, read_config, write

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor):
    """Equal for tensors of equal dtype, shape and bits: NaN equals itself and 0.0 is not -0.0."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist()


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


def refused(call, *args, kind=CheckpointError, **kwargs):
    """The one line with which a call refuses."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def written(path):
    """A small checkpoint with tied names; its path."""
    shared = torch.arange(6.0).view(2, 3)
    tensors = {"a": shared, "b": torch.tensor([True, False]), "tied": shared, "scalar": torch.tensor(7)}
    return write(path, tensors, {"name": "small", "depth": 2})


def with_metadata(path, metadata):
    safetensors.torch.save_file({"a": torch.zeros(3)}, path, metadata=metadata)
    return path


# Round trips


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensor(draw):
    """Random bits, so NaN and infinity too, in random layout."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    width = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (*shape, width), dtype=torch.uint8, generator=generator)
    whole = raw.view(dtype).reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if layout == "transposed":
        return whole.permute(tuple(reversed(range(len(shape)))))
    if layout == "sliced" and shape:
        return whole[::2]
    return whole.expand(2, *shape) if layout == "expanded" else whole


@given(
    tensors=st.dictionaries(NAMES, tensor(), max_size=5),
    config=st.dictionaries(st.text(), JSON, max_size=4),
    ties=st.dictionaries(NAMES, st.integers(0, 4), max_size=2),
)
def test_what_is_written_is_read(tensors, config, ties):
    for name, index in ties.items():
        if tensors:
            tensors[name] = list(tensors.values())[index % len(tensors)]
    # Waiting for the disk would be most of the time.
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        file = Path(folder, "x.safetensors")
        assert write(str(file), tensors, config) == file
        result, back = read(file)
        assert os.listdir(folder) == [file.name]
        assert read_config(file) == config
    assert all_bits(result) == all_bits(tensors)
    assert back == config
    assert all(x.is_contiguous() and not x.requires_grad for x in result.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_every_dtype_and_shape(path, dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    write(path, {"x": x}, {})
    assert bits(read(path)[0]["x"]) == bits(x)


def test_other_tools_read_the_file(written):
    with safetensors.safe_open(written, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        envelope = json.loads(file.metadata()["ecoformer"])
    config = {"name": "small", "depth": 2}
    assert envelope == {"format": 1, "config": config, "aliases": {"tied": "a"}}
    assert set(safetensors.torch.load_file(written)) == {"a", "b", "scalar"}


def test_gradients_and_parameters_are_left_behind(path):
    weight = nn.Parameter(torch.randn(3))
    write(path, {"w": weight, "v": weight * 2}, {})
    result = read(path)[0]
    assert type(result["w"]) is torch.Tensor
    assert weight.requires_grad
    assert bits(result["v"]) == bits(weight * 2)


def test_tied_tensors_are_stored_once_and_tied_again(path):
    x = torch.randn(1000)
    write(path, {"one": x, "two": x, "three": x.view(1000), "copy": x.clone()}, {})
    assert 8000 < path.stat().st_size < 9000
    result = read(path)[0]
    assert result["one"] is result["two"] is result["three"]
    assert result["copy"].data_ptr() != result["one"].data_ptr()


def test_other_views_of_one_memory_are_copies(path):
    x = torch.arange(9.0).view(3, 3)
    views = {
        "x": x,
        "rows": x[1:],
        "flat": x.view(-1),
        "t": x.T,
        "none": x[1:1],
        "ints": x.view(torch.int32),
        "top": x[:2],
    }
    write(path, views, {})
    result = read(path)[0]
    assert all_bits(result) == all_bits(views)
    assert len({t.untyped_storage().data_ptr() for t in result.values() if t.numel()}) == 6


def test_empty_tensors_are_not_taken_for_tied(path):
    write(path, {"a": torch.zeros(0), "b": torch.zeros(0)}, {})
    result = read(path)[0]
    assert result["a"] is not result["b"]


def test_negative_views_keep_their_sign(path):
    z = torch.complex(torch.ones(3), torch.full((3,), 2.0))
    views = {"plus": z.imag, "minus": z.conj().imag, "dense": torch.ones(3)._neg_view()}
    assert views["minus"].is_neg()
    assert views["dense"].is_contiguous()
    write(path, views, {})
    result = read(path)[0]
    assert result["plus"].tolist() == [2.0] * 3
    assert result["minus"].tolist() == [-2.0] * 3
    assert result["dense"].tolist() == [-1.0] * 3


def test_a_mapping_that_makes_its_tensors_when_asked(path):
    """Tensors that die at once may lie at one address and still not be tied."""

    class Lazy(OrderedDict):
        def __getitem__(self, name):
            return torch.full((1000,), float(name))

    lazy = MappingProxyType(Lazy.fromkeys(str(i) for i in range(20)))
    write(path, lazy, MappingProxyType({"a": (1, 2)}))
    result, config = read(path)
    assert [float(result[str(i)][0]) for i in range(20)] == list(range(20))
    assert config == {"a": [1, 2]}


def test_read_moves_to_the_device(written):
    result = read(written, device=torch.device("meta"))[0]
    assert all(x.is_meta for x in result.values())
    assert result["a"] is result["tied"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu(path):
    x = torch.randn(3, 4, device="cuda")
    tensors = {"x": x, "tied": x, "t": x.T, "half": x.bfloat16(), "none": x[:0]}
    write(path, tensors, {})
    for device in ("cpu", "cuda"):
        result = read(path, device)[0]
        assert all_bits(result) == all_bits(tensors)
        assert all(t.device.type == device for t in result.values())
        assert result["x"] is result["tied"]
    model, other = nn.Linear(4, 3).cuda(), nn.Linear(4, 3)
    load_into(model, other.state_dict(), source="x")
    assert all_bits(model.state_dict()) == all_bits(other.state_dict())
    assert model.weight.is_cuda


# What cannot be written


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"a": {"b": [1, torch.zeros(1)]}}, r"config\['a'\]\['b'\]\[1\] is a Tensor"),
        ({"a": object()}, r"config\['a'\] is a object"),
        ({"a": {1: 2}}, r"config\['a'\] has the key 1"),
        ({"a": {1, 2}}, r"config\['a'\] is a set"),
        ({"rate": float("nan")}, r"config\['rate'\] is nan"),
        ({"rate": [float("-inf")]}, r"config\['rate'\]\[0\] is -inf"),
        (None, "NoneType"),
    ],
)
def test_config_that_json_would_not_give_back(written, config, says):
    before = written.read_bytes()
    assert re.search(says, refused(write, written, {}, config, kind=(TypeError, ValueError)))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


@pytest.mark.parametrize(
    ("tensors", "kind", "says"),
    [
        ({"x": torch.zeros(2, device="meta")}, CheckpointError, "'x' is on the meta device"),
        ({"x": torch.eye(2).to_sparse()}, CheckpointError, "'x' is torch.sparse_coo"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, CheckpointError, "'x' .* torch.complex64"),
        ({"__metadata__": torch.zeros(2)}, CheckpointError, "named '__metadata__'"),
        ({"\ud800": torch.zeros(2)}, CheckpointError, "named"),
        ({"x": [1.0]}, TypeError, "'x': list"),
        ({3: torch.zeros(2)}, TypeError, "3: Tensor"),
    ],
)
def test_tensors_that_cannot_be_stored(written, tensors, kind, says):
    before = written.read_bytes()
    assert re.search(says, refused(write, written, {"fine": torch.zeros(1), **tensors}, {}, kind=kind))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_missing_folder(tmp_path):
    folder = tmp_path / "no" / "such"
    line = refused(write, folder / "x.safetensors", {}, {}, kind=FileNotFoundError)
    assert f"no folder {folder}" in line
    assert "create it" in line
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_place_of_the_folder(written):
    line = refused(write, written / "x.safetensors", {}, {}, kind=OSError)
    assert f"no folder {written}" in line


def test_a_folder_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path, pipe):
        assert str(target) in refused(write, target, {}, {}, kind=IsADirectoryError)
    assert pipe.is_fifo()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "epoch.safetensors", tmp_path / "latest.safetensors"
    link.symlink_to(real)
    for depth in (1, 2):  # the first time the link leads nowhere
        assert write(link, {}, {"depth": depth}) == link
        assert link.is_symlink()
        assert read_config(real) == {"depth": depth}
    assert os.listdir(real.parent) == [real.name]


def test_longest_file_name(tmp_path):
    path = tmp_path / ("x" * 255)
    write(path, {}, {"a": 1})
    assert read_config(path) == {"a": 1}


# Permissions


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_new_file_follows_the_umask(path, mask):
    with umask(mask):
        write(path, {"a": torch.zeros(2)}, {})
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_replaced_file_keeps_its_permissions(written, mode):
    written.chmod(mode)
    with umask(0o022):
        write(written, {"a": torch.zeros(2)}, {"new": True})
    assert written.stat().st_mode & 0o777 == mode
    assert read_config(written) == {"new": True}


@pytest.fixture
def not_root():
    """A folder, and no privileges: root may do what permissions forbid."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield folder
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)


def test_permission_denied(not_root):
    home = not_root / "home"
    home.mkdir()
    path = write(home / "x.safetensors", {"a": torch.zeros(2)}, {"old": True})
    home.chmod(0o555)
    line = refused(write, path, {"a": torch.ones(2)}, {}, kind=PermissionError)
    assert str(path) in line
    assert ".tmp" not in line
    assert os.listdir(home) == [path.name]
    assert read_config(path) == {"old": True}
    path.chmod(0o000)
    for call in (read, read_config):
        assert str(path) in refused(call, path, kind=PermissionError)
    home.chmod(0o755)


# Whole or not at all


def fail(error):
    def failing(*args, **kwargs):
        raise error

    return failing


def cut_short(tensors, filename, metadata):
    content = safetensors.torch.save(tensors, metadata)
    Path(filename).write_bytes(content[:-1])


FAILURES = {
    "os.replace": fail(OSError(errno.EIO, "no")),
    "os.fsync": fail(OSError(errno.ENOSPC, "no")),
    "os.chmod": fail(PermissionError("no")),
    "os.fstat": fail(KeyboardInterrupt()),
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


def test_failures_of_safetensors_are_os_errors(written, monkeypatch):
    error = safetensors.SafetensorError("I/O error:\n no space")
    monkeypatch.setattr("safetensors.torch.save_file", fail(error))
    line = refused(write, written, {}, {}, kind=OSError)
    assert str(written) in line
    assert "no space" in line
    assert read_config(written)["name"] == "small"


def test_a_file_that_did_not_arrive_whole_replaces_nothing(written, monkeypatch):
    monkeypatch.setattr("safetensors.torch.save_file", cut_short)
    assert "truncated" in refused(write, written, {"a": torch.zeros(3)}, {})
    assert read_config(written)["name"] == "small"
    assert os.listdir(written.parent) == [written.name]


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

    def watched_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def watched_replace(source, target):
        events.append((Path(source), Path(target)))
        replace(source, target)

    monkeypatch.setattr("os.fsync", watched_fsync)
    monkeypatch.setattr("os.replace", watched_replace)
    write(written, {"a": torch.zeros(3)}, {})
    temporary = events[0]
    assert temporary.parent == written.parent
    assert events == [temporary, (temporary, written), written.parent]


def test_a_folder_that_cannot_be_synced_is_no_failure(written, monkeypatch):
    fsync, calls = os.fsync, []

    def files_only(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "no folders")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", files_only)
    write(written, {}, {"new": True})
    assert len(calls) == 2
    assert read_config(written) == {"new": True}


KILLED_WRITER = """
import os, random, signal, sys, time
import torch
from ecoformer.storage import read, write

path, rounds = sys.argv[1], int(sys.argv[2])
folder, size, done, cut = os.path.dirname(path), 1_000_000, 0, 0
write(path, {"x": torch.zeros(size)}, {"n": 0})
random.seed(0)
for _ in range(rounds):
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            done += 1
            write(path, {"x": torch.full((size + done,), float(done))}, {"n": done})
            os.write(say, b"x")
    os.read(hear, 1)
    time.sleep(random.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(hear), os.close(say)
    tensors, config = read(path)
    before, done = done, config["n"]
    if done <= before or tensors["x"].shape != (size + done,) or not bool((tensors["x"] == done).all()):
        sys.exit(f"file {done} after {before} is torn")
    left = set(os.listdir(folder)) - {os.path.basename(path)}
    cut += bool(left)
    for name in left:
        os.unlink(os.path.join(folder, name))
print(cut)
"""


def test_killed_in_the_middle_of_a_write(path):
    command = [sys.executable, "-c", KILLED_WRITER, str(path), "12"]
    cut = int(subprocess.check_output(command, text=True))
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
            for _ in range(400):
                tensors, config = read(target)
                assert all_bits(tensors) == expected[config["n"]]
                seen.add(config["n"])
                seen.add(-read_config(target)["n"])
        finally:
            replacer.kill()
    assert seen == {1, 2, -1, -2}


# What cannot be read


def test_missing_file(path):
    for call in (read, read_config):
        assert f"no file {path}" in refused(call, path, kind=FileNotFoundError)


def test_a_folder_or_a_pipe_is_no_checkpoint(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for call in (read, read_config):
        for target in (tmp_path, pipe):
            assert f"{target} is a folder or a device" in refused(call, target)


def test_empty_file(path):
    path.touch()
    for call in (read, read_config):
        assert f"{path} is empty" in refused(call, path)


def test_every_truncation_is_found(written):
    content = written.read_bytes()
    for end in range(1, len(content)):
        written.write_bytes(content[:end])
        for call in (read, read_config):
            assert f"{written} is truncated" in refused(call, written), end
    written.write_bytes(content)
    assert read_config(written)["name"] == "small"


def test_bytes_after_the_end(written):
    written.write_bytes(written.read_bytes() + b"\0")
    for call in (read, read_config):
        assert "damaged" in refused(call, written)


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_pickles_are_named(path, zipped):
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=zipped)
    for call in (read, read_config):
        line = refused(call, path)
        assert "is a PyTorch pickle" in line
        assert "torch.load(..., weights_only=True)" in line
        assert "ecoformer.load_official" in line


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickles_are_named(path, protocol):
    path.write_bytes(pickle.dumps({"a": [1, 2, 3]}, protocol=protocol))
    assert f"{path} is a PyTorch pickle" in refused(read, path)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_whose_length_looks_like_a_pickle(path, length):
    write(path, {"a": torch.ones(2)}, {"pad": ""})
    short = int.from_bytes(path.read_bytes()[:8], "little")
    write(path, {"a": torch.ones(2)}, {"pad": "x" * (length - short)})
    content = path.read_bytes()
    assert content[:8] == length.to_bytes(8, "little")
    assert content[0] == 0x80
    assert content[1] in range(2, 6)
    assert read(path)[0]["a"].tolist() == [1, 1]
    path.write_bytes(content[:-20])
    assert "truncated" in refused(read, path)


@pytest.mark.parametrize(
    "content",
    [
        b"hello, world",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
        b"\0" * 100,
        b"{}" * 9,
        b"\n" + b"\0" * 7 + b"[" * 20,
    ],
)
def test_other_files(path, content):
    path.write_bytes(content)
    for call in (read, read_config):
        assert "is not a safetensors file" in refused(call, path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_foreign_safetensors(path, metadata):
    with_metadata(path, metadata)
    for call in (read, read_config):
        line = refused(call, path)
        assert "holds tensors but no ecoformer config" in line
        assert "safetensors.torch.load_file" in line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"format"',
        "{}",
        '{"format": 1}',
        '{"format": 1, "config": []}',
        "[" * 100_000,
    ]
    + [f'{{"format": {version}, "config": {{}}}}' for version in ("null", '"1"', "0", "-1", "1.5", "[]")]
    + [
        f'{{"format": 1, "config": {{}}, "aliases": {a}}}'
        for a in ("[]", "3", "null", '{"b": 1}', '{"b": []}')
    ],
)
def test_damaged_config(path, text):
    with_metadata(path, {"ecoformer": text})
    for call in (read, read_config):
        assert f"the config in {path} is damaged" in refused(call, path)


@pytest.mark.parametrize("aliases", ['{"b": "gone"}', '{"a": "a"}', '{"b": "a", "c": "b"}'])
def test_ties_to_what_is_not_there(path, aliases):
    with_metadata(path, {"ecoformer": f'{{"format": 1, "config": {{}}, "aliases": {aliases}}}'})
    assert "tied names do not match" in refused(read, path)


@pytest.mark.parametrize("rest", ["", ', "config": []', ', "config": {}, "aliases": []'])
def test_newer_format(path, rest):
    with_metadata(path, {"ecoformer": f'{{"format": 2{rest}}}'})
    for call in (read, read_config):
        line = refused(call, path)
        assert "has format 2" in line
        assert "upgrade ecoformer" in line


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


GOOD = {"ecoformer": '{"format": 1, "config": {}}'}


@pytest.mark.parametrize(
    "header",
    [
        b"{" + b"\xff" * 10 + b"}",
        b'{"a":' + b"[" * 100_000,
        {"__metadata__": []},
        {"__metadata__": {"ecoformer": 3}},
        {"__metadata__": GOOD, "a": 3},
        {"__metadata__": GOOD, "a": {"dtype": "F32", "shape": [1]}},
        {"__metadata__": GOOD, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"__metadata__": GOOD, "a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}},
        b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}",
    ],
)
def test_damaged_header(path, header):
    raw_file(path, header, b"\0" * 4)
    for call in (read, read_config):
        assert "is damaged, its header cannot be read" in refused(call, path)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [2, 4]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]},
        {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]},
    ],
)
def test_tensors_that_do_not_match_their_header(path, tensor):
    raw_file(path, {"__metadata__": GOOD, "a": tensor}, b"\0" * 4)
    assert f"{path} is damaged" in refused(read, path)
    assert read_config(path) == {}


@pytest.mark.parametrize("shape", [[0, 1 << 62, 1 << 62], [0, 1 << 63], [0, (1 << 64) - 1]])
def test_empty_tensors_of_absurd_shape(path, shape):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    raw_file(path, {"__metadata__": GOOD, "a": entry})
    try:
        tensors = read(path)[0]
    except CheckpointError:
        return
    assert tensors["a"].shape == tuple(shape)


def test_random_damage_to_the_header_has_no_unclear_outcome(written):
    content = written.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    draw, refusals = random.Random(0), 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(end)] = draw.choice([draw.randrange(256), ord(draw.choice('{}[]",:019 '))])
        written.write_bytes(damaged)
        try:
            tensors, config = read(written)
        except CheckpointError:
            refusals += 1
        else:  # a letter in a name or in the config; in "aliases", and the tied name is gone
            assert sorted(x.numel() for x in tensors.values()) in ([1, 2, 6, 6], [1, 2, 6])
            assert isinstance(config, dict)
    assert 500 < refusals < 1000


def test_read_config_reads_no_tensors(path, monkeypatch):
    """The numbers lie in a hole of the file as large as a disk: reading them would take for ever."""
    size = 1 << 40
    raw_file(path, {"__metadata__": GOOD, "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    os.truncate(path, path.stat().st_size + size)
    assert read_config(path) == {}


# Into a model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Mixed(nn.Module):
    """Floats, integers, booleans, normalisation and a hasher."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.rand(3) < 0.5)
        self.hasher = KernelHasher(2, 4, bits=8, support=5)


def fitted():
    model = Mixed()
    model.hasher.fit(torch.randn(2, 2, 30, 4))
    return model


def test_fitted_hasher_into_a_fresh_model(path):
    source, model = fitted(), Mixed()
    write(path, source.state_dict(), {})
    tokens = torch.randn(1, 2, 6, 4)
    with pytest.raises(UnfittedHasherError):
        model.hasher(tokens)
    load_into(model, read(path)[0], source=str(path))
    assert all_bits(model.state_dict()) == all_bits(source.state_dict())
    assert torch.equal(model.hasher(tokens), source.hasher(tokens))
    load_into(model, Mixed().state_dict(), source="fresh")
    with pytest.raises(UnfittedHasherError):
        model.hasher(tokens)


@pytest.mark.parametrize("name", list_attentions())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gives_the_same_output(path, name, dtype):
    needed = {"seq_len": 9} if name == "linformer" else {}
    source, model = (create_attention(name, dim=16, num_heads=2, **needed).to(dtype) for _ in range(2))
    x = torch.randn(4, 9, 16, dtype=dtype)
    if hashers_of(source):
        fit_hashers(source, [x], progress=False)
    write(path, source.state_dict(), {})
    load_into(model, read(path)[0], source=str(path))
    assert torch.equal(model(x), source(x))


def test_values_are_copied_into_the_model_s_own_tensors():
    model, other = fitted(), fitted()
    before = {name: x.data_ptr() for name, x in model.state_dict().items()}
    parameters = list(model.parameters())
    tensors = other.state_dict()
    load_into(model, tensors, source="x")
    assert {name: x.data_ptr() for name, x in model.state_dict().items()} == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all_bits(model.state_dict()) == all_bits(tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precision_is_fine(dtype):
    model, tensors = nn.Linear(3, 4), nn.Linear(3, 4).to(dtype).state_dict()
    load_into(model, tensors, source="x")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, tensors["weight"].float())


def test_nan_is_loaded():
    model = nn.Linear(2, 1)
    tensors = {"weight": torch.tensor([[torch.nan, torch.inf]]), "bias": torch.tensor([-torch.nan])}
    load_into(model, tensors, source="x")
    assert all_bits(model.state_dict()) == all_bits(tensors)


BAD = {
    "missing": (lambda t: t.pop("linear.weight"), r"1 missing \('linear.weight'\)"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(1)), r"1 unexpected \('extra'\)"),
    "shape": (
        lambda t: t.update({"linear.bias": torch.zeros(5)}),
        r"1 of another shape \('linear.bias' \(5,\) instead of \(4,\)\)",
    ),
    "broadcast": (lambda t: t.update({"linear.bias": torch.zeros(1)}), "1 of another shape"),
    "scalar": (lambda t: t.update({"norm.num_batches_tracked": torch.zeros(1).long()}), "another shape"),
    "float for bool": (lambda t: t.update(flags=torch.ones(3)), "kind of number .'flags' torch.float32 inst"),
    "bool for float": (lambda t: t.update({"linear.bias": torch.ones(4).bool()}), "1 of another kind"),
    "int for float": (lambda t: t.update({"linear.bias": torch.ones(4).int()}), "1 of another kind"),
    "float for int": (lambda t: t.update({"norm.num_batches_tracked": torch.tensor(3.0)}), "another kind"),
    "int for bool": (lambda t: t.update(flags=torch.ones(3).to(torch.uint8)), "another kind"),
    "complex": (lambda t: t.update({"linear.bias": torch.ones(4).cfloat()}), "another kind"),
    "meta": (lambda t: t.update({"linear.bias": torch.ones(4, device="meta")}), "1 on the meta device"),
    "none": (lambda t: t.update({"linear.bias": None}), "1 not a tensor .'linear.bias' NoneType"),
    "all": (lambda t: t.clear(), r"13 missing \('flags', 'linear.weight', 'linear.bias', \.\.\.\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_load_that_fails_leaves_the_model_untouched(case):
    spoil, says = BAD[case]
    model, tensors = fitted(), dict(Mixed().state_dict())
    spoil(tensors)
    before, tokens = all_bits(model.state_dict()), torch.randn(1, 2, 6, 4)
    codes = model.hasher(tokens)
    line = refused(load_into, model, tensors, source="some.safetensors")
    assert line.startswith("some.safetensors does not fit Mixed: ")
    assert re.search(says, line)
    assert all_bits(model.state_dict()) == before
    assert torch.equal(model.hasher(tokens), codes)


def test_several_differences_share_the_line():
    tensors = {f"x{i}": torch.zeros(1) for i in range(5)} | {"bias": torch.zeros(9)}
    line = refused(load_into, nn.Linear(3, 4), tensors, source="x")
    assert "1 missing ('weight'); 5 unexpected ('x0', 'x1', 'x2', ...); 1 of another shape ('bias'" in line


def test_a_model_on_the_meta_device_is_refused():
    tensors = nn.Linear(3, 4).state_dict()
    assert "Linear is on the meta device" in refused(
        load_into, nn.Linear(3, 4, device="meta"), tensors, source="x"
    )


def test_tied_weights(path):
    source, model = Tied(), Tied()
    write(path, source.state_dict(), {})
    tensors = read(path)[0]
    load_into(model, tensors, source="x")
    assert torch.equal(model.head.weight, source.head.weight)
    assert model.head.weight is model.embed.weight


class OddlyTied(nn.Module):
    """One number that is contiguous whatever its stride."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(4)[::2][:1])
        self.register_buffer("b", self.a)


def test_tied_weights_given_as_equal_copies():
    for model in (Tied(), OddlyTied()):
        tensors = {name: torch.full_like(x, torch.nan) for name, x in model.state_dict().items()}
        load_into(model, tensors, source="x")
        assert all(x.isnan().all() for x in model.state_dict().values())
        odd = {name: x.clone().as_strided_(x.shape, x.stride()) for name, x in model.state_dict().items()}
        load_into(model, odd, source="x")


HALF = torch.ones(5, 3).half()


@pytest.mark.parametrize("head", [torch.zeros(5, 3), HALF.view(torch.bfloat16)], ids=["numbers", "dtype"])
def test_untied_weights_do_not_overwrite_each_other(head):
    model, tensors = Tied(), {"embed.weight": HALF, "head.weight": head}
    before = all_bits(model.state_dict())
    line = refused(load_into, model, tensors, source="x")
    assert "1 tied in the model but not here ('embed.weight' and 'head.weight')" in line
    assert all_bits(model.state_dict()) == before


class Counting(nn.Module):
    """Extra state whose size depends on what happened, and that may refuse."""

    def __init__(self, steps=()):
        super().__init__()
        self.linear, self.steps = nn.Linear(2, 2), list(steps)

    def get_extra_state(self):
        return torch.tensor(self.steps)

    def set_extra_state(self, state):
        if state.ndim != 1:
            raise RuntimeError("steps must be\na list")
        self.steps = state.tolist()


def test_extra_state(path):
    write(path, Counting([3.0, 4.0]).state_dict(), {})
    model = Counting()
    load_into(model, read(path)[0], source="x")
    assert model.steps == [3.0, 4.0]


def test_a_module_that_refuses_late():
    tensors = Counting().state_dict() | {"_extra_state": torch.zeros(2, 2)}
    line = refused(load_into, Counting(), tensors, source="x.safetensors")
    assert "Counting refused x.safetensors" in line
    assert "steps must be a list" in line


def test_modules_see_their_own_version():
    """Without it, a module takes every checkpoint for one of an older PyTorch and converts it."""
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    load_into(Versioned(2, 2), dict(nn.Linear(2, 2).state_dict()), source="x")
    assert seen == [7]


def test_import_brings_no_safetensors():
    code = "import sys, ecoformer.storage; sys.exit(any(m.startswith('safetensors') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
