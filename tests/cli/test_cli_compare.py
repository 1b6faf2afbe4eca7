"""`ecoformer cost --compare` with the model as it is, and the figures that the pages quote of it."""

import json
from pathlib import Path

import pytest

import ecoformer
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")
ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_readme_quotes_what_is_saved_against_the_model_as_it_is():
    rows = json.loads((ROOT / "results" / "accounting.json").read_text())["figures"]["native"]
    text = " ".join((ROOT / "README.md").read_text().split())
    energy = {(row["resolution"], row["mechanism"]): row["paper"] for row in rows}
    assert f"takes {energy[224, 'native'] / 1e9:.2f} mJ" in text
    saved = [1 - energy[side, "eco"] / energy[side, "native"] for side in (224, 512)]
    assert f"{saved[0]:.0%} less" in text
    assert f"{saved[1]:.0%}" in text


def test_small_models_are_counted_in_millions(run, tmp_path):
    path = ecoformer.save(TextEncoder(length=64, dim=16, hidden=16), tmp_path / "small.safetensors")
    out = run("cost", str(path), "--compare", "softmax,eco", "--tokens", "64")[1]
    assert "energy, pJ (10⁶)" in out
    assert " 0.00 " not in out


def test_models_for_one_size_of_images_are_built_for_the_size_asked_for(run):
    for command in (("cost",), ("simulate", "model")):
        status, _, err = run(*command, "vit_tiny_patch16_224", "--compare", "eco", "--resolution", "64")
        assert (status, err) == (0, "")
    small, large = json.loads(run("cost", "vit_tiny_patch16_224", "--sweep", "resolution=64,96", "--json")[1])
    assert small["energy_pj"] < large["energy_pj"]
