"""What cannot be read gives one clear line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from files import refused, with_metadata

from ecoformer.storage import CheckpointError, read


def test_missing_file(path):
    assert f"no file {path}" in refused(read, path, kind=FileNotFoundError)


def test_a_folder_or_a_pipe_is_no_checkpoint(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path, pipe):
        assert f"{target} is a folder or a device" in refused(read, target)


def test_every_truncation_is_found(written):
    content = written.read_bytes()
    for end in (*range(0, 40), *range(40, len(content), 7), len(content) - 1):
        written.write_bytes(content[:end])
        assert str(written) in refused(read, written), end
    written.write_bytes(content)
    assert read(written)[1]["name"] == "small"


def test_bytes_after_the_end(written):
    written.write_bytes(written.read_bytes() + b"\0")
    assert "damaged" in refused(read, written)


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_pickles_are_named(path, zipped):
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=zipped)
    assert "ecoformer.load_official" in refused(read, path)


@pytest.mark.parametrize("content", [b"hello, world", b"\0" * 100, b"\n" + b"\0" * 7 + b"[" * 20])
def test_other_files(path, content):
    path.write_bytes(content)
    assert "not a safetensors file" in refused(read, path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_foreign_safetensors(path, metadata):
    with_metadata(path, metadata)
    line = refused(read, path)
    assert "holds tensors but no ecoformer config" in line
    assert "safetensors.torch.load_file" in line


ENVELOPES = ["", "{", "null", "[]", '"format"', "{}", '{"format": 1}', '{"format": 1, "config": []}']
ENVELOPES += [
    "[" * 100_000,
    *(f'{{"format": {v}, "config": {{}}}}' for v in ("null", '"1"', "0", "-1", "[]")),
]
ENVELOPES += [f'{{"format": 1, "config": {{}}, "aliases": {a}}}' for a in ("[]", "null", '{"b": 1}')]


@pytest.mark.parametrize("text", ENVELOPES)
def test_damaged_config(path, text):
    with_metadata(path, {"ecoformer": text})
    assert f"the config in {path} is damaged" in refused(read, path)


@pytest.mark.parametrize("aliases", ['{"b": "gone"}', '{"a": "a"}', '{"b": "a", "c": "b"}'])
def test_ties_to_what_is_not_there(path, aliases):
    with_metadata(path, {"ecoformer": f'{{"format": 1, "config": {{}}, "aliases": {aliases}}}'})
    assert "tied names do not match" in refused(read, path)


def test_newer_format(path):
    with_metadata(path, {"ecoformer": '{"format": 2, "config": []}'})
    line = refused(read, path)
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
        {"__metadata__": GOOD, "a": 3},
        {"__metadata__": GOOD, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}",
    ],
)
def test_damaged_header(path, header):
    raw_file(path, header, b"\0" * 4)
    assert f"{path} is truncated or damaged" in refused(read, path)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [2, 4]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]},
        {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]},
    ],
)
def test_tensors_that_do_not_match_their_header(path, tensor):
    raw_file(path, {"__metadata__": GOOD, "a": tensor}, b"\0" * 4)
    assert f"{path} is truncated or damaged" in refused(read, path)


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
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(end)] = draw.choice([draw.randrange(256), ord(draw.choice('{}[]",:019 '))])
        written.write_bytes(damaged)
        try:
            tensors, config = read(written)
        except CheckpointError:
            refusals += 1
        else:  # only the word "checksum" or the unused "format" may change
            assert sorted(x.numel() for x in tensors.values()) == [1, 2, 6, 6]
            assert config == {"name": "small", "depth": 2}
    assert refusals > 150


def test_every_flipped_bit_of_the_tensors_is_found(written):
    content = written.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for at in range(start, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        written.write_bytes(damaged)
        assert "checksum" in refused(read, written)


def test_checksums(path):
    with_metadata(path, GOOD)
    assert read(path)[1] == {}
    for value in ("", "0" * 64, "é"):
        with_metadata(path, GOOD | {"checksum": value})
        assert "checksum" in refused(read, path)


HEADERS = """
import pathlib, re, sys
from ecoformer.storage import CheckpointError, read
for path in sys.argv[1:]:
    try:
        read(path)
    except CheckpointError as error:
        print(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


def test_headers_of_empty_entries_take_no_gigabytes(tmp_path):
    paths = [tmp_path / "7", tmp_path / "99"]
    for path in paths:
        text = '{"format": 0, "config": {"a": [%s{}]}}' % ("{}," * (int(path.name) * 1_000_000 // 3))
        raw_file(path, b'{"__metadata__":{"ecoformer":' + json.dumps(text).encode() + b"}}")
    command = [sys.executable, "-c", HEADERS, *map(str, paths)]
    kilobytes = [int(line) for line in subprocess.check_output(command, text=True).splitlines()]
    assert len(kilobytes) == 2
    assert max(kilobytes) < 900_000, "of which torch alone takes a part"
