"""`ecoformer quantize`: a file with int8 layers, and what other commands make of it."""

import json

import pytest
import torch

import ecoformer
from ecoformer.quantization import integer_layers


@pytest.fixture
def sharp(convert):
    convert("ours.safetensors", "--attention", "sharp_eco", out="sharp.safetensors")


def test_images(cli, sharp):
    done = cli("quantize", "sharp.safetensors", "int8.safetensors", "--data", "photos", "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["megabytes"][1] < 0.4 * facts["megabytes"][0]
    model, before = ecoformer.load("int8.safetensors"), ecoformer.load("sharp.safetensors")
    assert len(integer_layers(model)) == sum(layer["why"] is None for layer in facts["layers"]) > 20
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.nn.functional.cosine_similarity(model(x), before(x)).min() > 0.95

    seen = cli("info", "int8.safetensors")
    assert "of them int8" in seen.out
    assert "sharp_eco, int8" in seen.out
    counted = cli("cost", "int8.safetensors", "--resolution", "32", "--accounting", "exact", "--json")
    assert counted.status == 0, counted.err
    again = cli("quantize", "int8.safetensors", "twice.safetensors", "--data", "photos")
    assert (again.status, again.out) == (2, "")
    assert "quantised already" in again.err


def test_texts(cli):
    done = cli("quantize", "bert_with_words", "int8.safetensors", "--data", "texts.txt", "--samples", "4")
    assert done.status == 0, done.err
    assert "layers in int8" in done.out
    assert integer_layers(ecoformer.load("int8.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ours.safetensors", "out.safetensors"), "--data"),
        (("ours.safetensors", "out.safetensors", "--data", "nowhere"), "nowhere"),
        (("ours.safetensors", "photos", "--data", "photos"), "is a folder"),
        (("bert", "out.safetensors", "--data", "texts.txt"), "tokeniser"),
    ],
)
def test_one_line_for_what_cannot_be(cli, arguments, words, tmp_path):
    done = cli("quantize", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()
