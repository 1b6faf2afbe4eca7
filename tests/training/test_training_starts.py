"""A run that starts from a file trains what the file holds, so that it must fit the recipe and the data."""

from __future__ import annotations

import pytest
import timm
from training_runs import PICTURES, PLAIN, recipe

import ecoformer
from ecoformer.models.text import TwoTowerEncoder
from ecoformer.training import train


def pvt(path, classes):
    options = {**PICTURES["model"]["options"], "num_classes": classes, "attention": "softmax"}
    return ecoformer.save(timm.create_model("ecoformer_pvt_v2_b0", **options), path)


def test_other_classes(tmp_path):
    path = pvt(tmp_path / "pets.safetensors", 37)
    chosen = recipe(PICTURES, f"start={path}", "schedule.steps=2", folder=tmp_path)
    with pytest.raises(ValueError, match=r"^start: pets\.\S+ has 37 classes, but digits has 10"):
        train(chosen, tmp_path / "run", show=False)
    model = ecoformer.load(path)
    model.reset_classifier(10)
    ecoformer.save(model, path)
    train(chosen, tmp_path / "run", show=False)


@pytest.mark.parametrize("name", ["twins_svt_small", "text"])
def test_another_architecture(name, tmp_path):
    path = pvt(tmp_path / "pvt", 10)
    with pytest.raises(ValueError, match=f"pvt holds ecoformer_pvt_v2_b0, but the recipe trains {name}"):
        train(recipe(PICTURES, f"model.name={name}", f"start={path}", folder=tmp_path), tmp_path / "run")
    assert not (tmp_path / "run/recipe.yaml").exists()


def test_a_model_of_pairs_for_tokens(tmp_path):
    sizes = {"vocabulary": 73, "length": 5, "classes": 8, "dim": 8, "depth": 1, "num_heads": 1, "hidden": 8}
    path = ecoformer.save(TwoTowerEncoder(**sizes, attention="softmax"), tmp_path / "towers")
    with pytest.raises(ValueError, match="start: towers holds TwoTowerEncoder, but the recipe trains TextE"):
        train(recipe(PLAIN, f"start={path}", folder=tmp_path), tmp_path / "run", show=False)
