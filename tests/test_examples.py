"""The scripts in examples/ do what they say, on less data."""

import runpy
from pathlib import Path

import pytest

from ecoformer.attention.registry import _REGISTRY

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name, **arguments):
    known = dict(_REGISTRY)
    try:
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(known)


def test_a_taught_timm_model_is_nearly_as_good_as_the_original(tmp_path):
    found = run("convert_timm", steps=100, out=str(tmp_path / "vit.safetensors"))
    assert found["converted"] < found["original"] - 0.1
    assert found["distilled"] > found["original"] - 0.05


def test_long_texts_are_told_apart_at_a_fraction_of_softmax_energy():
    found = run("long_text", length=256, steps=60)
    assert found["accuracy"] > 0.9
    assert found["sharp_eco, mJ"] < found["softmax, mJ"]


def test_a_stream_gives_what_the_causal_layer_gives():
    found = run("stream", tokens=200)
    assert found["largest difference"] == pytest.approx(0, abs=1e-5)
    assert found["numbers that the state holds"] == run("stream", tokens=50)["numbers that the state holds"]


def test_a_mechanism_of_ones_own_is_converted_to_and_counted():
    found = run("own_mechanism")
    assert found["elu"] < found["native"] / 5
