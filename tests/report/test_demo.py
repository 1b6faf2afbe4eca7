import json

import pytest
import torch
from typer.testing import CliRunner

from ecoformer import create_attention
from ecoformer.cli import app
from ecoformer.report import demo
from ecoformer.report.inside import _layer, look_inside, smallest_difference
from ecoformer.training import load_recipe, train
from ecoformer.training.model import build_model
from ecoformer.training.run import load_splits

TINY = (
    "schedule.steps=2",
    "schedule.warmup=0",
    "data.options={side: 8, symbols: 3, count: 8, test_count: 4}",
    "augment.size=32",
    "model.options.img_size=32",
    "model.options.embed_dims=[8]",
    "batch=4",
    "hashing.samples=4",
)


@pytest.mark.filterwarnings("ignore:hash functions are random")
@pytest.mark.parametrize("name", ["softmax", "eco", "sharp_eco", "performer"])
def test_the_weights_of_a_layer_reproduce_its_output(name):
    torch.manual_seed(0)
    layer, x = create_attention(name, 16, 1).eval(), torch.randn(1, 9, 16)
    q, k, v = layer._project(x)
    with torch.no_grad():
        seen = _layer("", layer, x)
        out = layer.attend(q, k, v, None, False, **layer._token_terms(x))
    torch.testing.assert_close(seen.weights @ v[0, 0], out[0, 0], rtol=1e-4, atol=1e-5)
    assert (seen.codes is not None) == ("eco" in name)


def test_only_layers_that_are_ours_are_looked_into():
    recipe = load_recipe("mosaic", TINY)
    splits = load_splits(recipe)
    native = load_recipe("mosaic", [*TINY, "attention.name=native"])
    models = {"native": build_model(native, splits), "sharp_eco": build_model(recipe, splits)}
    sample = look_inside(models, recipe, splits, 1)
    assert {name: len(layers) for name, layers in sample.layers.items()} == {"native": 0, "sharp_eco": 2}
    assert sample.layers["sharp_eco"][0].codes.shape == (64, 32)
    assert all(answer.shape == sample.target.shape == (64,) for answer in sample.answers.values())
    with pytest.raises(ValueError, match="4 test pictures, but no number 4"):
        look_inside(models, recipe, splits, 4)


def test_the_smallest_difference_is_two_standard_errors_of_the_least_certain_pair():
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(10_000, generator=generator)
    noisy = common + 0.1 * torch.randn(10_000, generator=generator)
    assert smallest_difference([common, common]) == 0
    assert smallest_difference([common, common, noisy]) == pytest.approx(2 * 0.1 / 100, rel=0.05)


def test_all_contestants_train_equally_long_and_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TIME_SECONDS", 0.01)
    monkeypatch.setattr(demo, "TIMED_SIZES", (1, 2))
    monkeypatch.chdir(tmp_path.parent)  # for a short path in what is printed
    options = [part for change in TINY for part in ("--set", change)]
    result = CliRunner().invoke(app, ["demo", "--out", tmp_path.name, *options])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    names = list(demo.CONTESTANTS)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in names]
    assert [found["recipe"]["attention"]["name"] for found in results] == names
    assert {(found["steps"], found["test_samples"]) for found in results} == {(2, 4)}
    assert len({json.dumps(found["recipe"]["schedule"]) for found in results}) == 1
    assert all(found["recipe"]["start"] is None for found in results)
    page = (tmp_path / "index.html").read_text()
    assert all(f'data-model="{name}"' in page for name in names)
    files = [tmp_path / name / "model.safetensors" for name in names]
    before = [file.stat().st_mtime_ns for file in files]
    again = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json", *options])
    facts = json.loads(again.stdout)
    assert [row["model"] for row in facts["rows"]] == names
    assert [file.stat().st_mtime_ns for file in files] == before
    runs = [str(tmp_path / name) for name in names]
    report = CliRunner().invoke(app, ["report", *runs, "--out", str(tmp_path / "r.html"), "--picture", "1"])
    assert report.exit_code == 0
    assert 'data-role="map"' in (tmp_path / "r.html").read_text()


def test_a_model_must_answer_for_every_token(tmp_path):
    pooled = load_recipe("mosaic", [*TINY, "model.options.global_pool=avg"])
    with pytest.raises(RuntimeError, match=r"model\.name: the model's answers are \(4, 8\), but the targets"):
        train(pooled, tmp_path, show=False)


def test_tokens_with_targets_refuse_moved_pixels(tmp_path):
    with pytest.raises(ValueError, match="augment: every token of mosaic has a target"):
        train(load_recipe("mosaic", [*TINY, "augment.flip=true"]), tmp_path, show=False)
