"""What is written is what is read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from files import DTYPES, all_bits
from hypothesis import given
from torch import nn

from ecoformer.storage import load_into, read, write

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
        assert read(file)[1] == config
    assert all_bits(result) == all_bits(tensors)
    assert back == config
    assert all(x.is_contiguous() and not x.requires_grad for x in result.values())


def test_other_tools_read_the_file(written):
    with safetensors.safe_open(written, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        envelope = json.loads(file.metadata()["ecoformer"])
    config = {"name": "small", "depth": 2}
    assert envelope == {"format": 1, "config": config, "aliases": {"tied": "a"}}
    assert set(safetensors.torch.load_file(written)) == {"a", "b", "scalar"}


def test_tied_tensors_are_stored_once_and_tied_again(path):
    x = nn.Parameter(torch.randn(1000))
    write(path, {"one": x, "two": x, "three": x.view(1000), "copy": x.clone()}, {})
    assert 8000 < path.stat().st_size < 9000
    result = read(path)[0]
    assert type(result["one"]) is torch.Tensor
    assert result["one"] is result["two"] is result["three"]
    assert result["copy"].data_ptr() != result["one"].data_ptr()


def test_other_views_of_one_memory_are_copies(path):
    x, z = torch.arange(9.0).view(3, 3), torch.complex(torch.ones(3), torch.full((3,), 2.0))
    views = {"x": x, "rows": x[1:], "flat": x.view(-1), "t": x.T, "ints": x.view(torch.int32), "top": x[:2]}
    odd = {"none": x[1:1], "no": x[2:2], "minus": z.conj().imag, "dense": torch.ones(3)._neg_view()}
    assert odd["minus"].is_neg()
    write(path, views | odd, {})
    result = read(path)[0]
    assert all_bits(result) == all_bits({name: view.resolve_neg() for name, view in (views | odd).items()})
    assert len({result[name].untyped_storage().data_ptr() for name in views}) == 6
    assert result["none"] is not result["no"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu(path):
    x = torch.randn(3, 4, device="cuda")
    tensors = {"x": x, "tied": x, "t": x.T, "half": x.bfloat16(), "none": x[:0]}
    write(path, tensors, {})
    result = read(path)[0]
    assert all_bits(result) == all_bits(tensors)
    assert result["x"] is result["tied"]
    model, other = nn.Linear(4, 3).cuda(), nn.Linear(4, 3)
    load_into(model, other.state_dict(), source="x")
    assert all_bits(model.state_dict()) == all_bits(other.state_dict())
    assert model.weight.is_cuda
