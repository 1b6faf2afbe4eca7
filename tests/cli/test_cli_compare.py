"""`ecoformer cost --compare` with the model as it is."""

import json

import pytest

import ecoformer
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")


def test_small_models_have_digits_left(run, tmp_path):
    path = ecoformer.save(TextEncoder(length=64, dim=16, hidden=16), tmp_path / "small.safetensors")
    out = run("cost", str(path), "--compare", "softmax,eco", "--tokens", "64")[1]
    energies = [float(line.split()[3]) for line in out.splitlines()[2:]]
    assert len(energies) == 3
    assert all(0 < energy < 0.01 for energy in energies)


def test_models_for_one_size_of_images_are_built_for_the_size_asked_for(run):
    for on in ((), ("--on", "bitfusion")):
        status, _, err = run("cost", "vit_tiny_patch16_224", "--compare", "eco", "--resolution", "64", *on)
        assert (status, err) == (0, "")
    small, large = json.loads(run("cost", "vit_tiny_patch16_224", "--sweep", "resolution=64,96", "--json")[1])
    assert small["energy_pj"] < large["energy_pj"]
