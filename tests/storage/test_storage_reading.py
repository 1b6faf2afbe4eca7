"""What cannot be read gives one clear line."""

from __future__ import annotations

import json
import os
import pickle
import random

import pytest
import torch
from files import refused, with_metadata

from ecoformer.storage import CheckpointError, read, read_config, write


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
