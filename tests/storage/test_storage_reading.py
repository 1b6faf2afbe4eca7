"""What cannot be read gives one clear line."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
from files import refused, with_metadata

from ecoformer.storage import CheckpointError, read


def test_no_file(path, tmp_path):
    assert f"no file {path}" in refused(read, path, kind=FileNotFoundError)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path, pipe):
        assert f"{target} is a folder or a device" in refused(read, target)


def test_every_truncation_is_found(written):
    content = written.read_bytes()
    for end in (*range(0, 40), *range(40, len(content), 7), len(content) - 1):
        written.write_bytes(content[:end])
        assert str(written) in refused(read, written), end
    written.write_bytes(content + b"\0")
    assert "damaged" in refused(read, written)


@pytest.mark.parametrize(
    "content", [b"hello, world", b"\0" * 100, b"\n" + b"\0" * 7 + b"[" * 20, "zip", "old"]
)
def test_other_files(path, content):
    if isinstance(content, str):
        torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=content == "zip")
    else:
        path.write_bytes(content)
    line = refused(read, path)
    assert "not a safetensors file" in line
    assert "ecoformer.load_official" in line


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_foreign_safetensors(path, metadata):
    with_metadata(path, metadata)
    line = refused(read, path)
    assert "holds tensors but no ecoformer config" in line
    assert "safetensors.torch.load_file" in line


ENVELOPES = ["", "{", "null", "[]", '"format"', "{}", '{"format": 1}', '{"format": 1, "config": []}']
ENVELOPES += [f'{{"format": {v}, "config": {{}}}}' for v in ("null", '"1"', "0", "-1", "[]")]
ENVELOPES += ["[" * 100_000]
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


TENSORS = [3, {"dtype": "F32", "shape": [1], "data_offsets": [0]}]
TENSORS += [{"dtype": "F32", "shape": s, "data_offsets": [0, 4]} for s in ([2], [-1], [1 << 62, 4])]
TENSORS += [{"dtype": "F32", "shape": [1], "data_offsets": [2, 4]}]
TENSORS += [{"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}]
HEADERS = [b"{" + b"\xff" * 10 + b"}", b'{"a":' + b"[" * 100_000, {"__metadata__": []}]
HEADERS += [b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}"]


@pytest.mark.parametrize("header", HEADERS + [{"__metadata__": GOOD, "a": tensor} for tensor in TENSORS])
def test_damaged_header(path, header):
    raw_file(path, header, b"\0" * 4)
    assert f"{path} is truncated or damaged" in refused(read, path)


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


def test_a_header_is_no_larger_than_the_tensors_need(path):
    """Parsed JSON takes many times its length."""
    raw_file(path, b'{"__metadata__": {"ecoformer": "' + b" " * (1 << 23) + b'"}}')
    assert "bytes are header" in refused(read, path)
