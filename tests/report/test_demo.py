import json

import pytest
import torch
from typer.testing import CliRunner

from ecoformer.cli import app
from ecoformer.report import demo
from ecoformer.training import load_recipe, train

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


def test_the_smallest_difference_is_two_standard_errors_of_the_least_certain_pair():
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(10_000, generator=generator)
    noisy = common + 0.1 * torch.randn(10_000, generator=generator)
    assert demo.smallest_difference([common, common]) == 0
    assert demo.smallest_difference([common, common, noisy]) == pytest.approx(2 * 0.1 / 100, rel=0.05)


def test_all_contestants_train_equally_long_and_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TIME_SECONDS", 0.01)
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
    files = [tmp_path / name / "model.safetensors" for name in names]
    before = [file.stat().st_mtime_ns for file in files]
    again = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json", *options])
    facts = json.loads(again.stdout)
    assert facts == json.loads((tmp_path / "comparison.json").read_text())
    assert [row["model"] for row in facts["rows"]] == names
    assert [row["accuracy"] for row in facts["rows"]] == [found["accuracy"] for found in results]
    assert [row["paper_mj"] for row in facts["rows"]] == [
        pytest.approx(found["cost"]["paper"]["energy_pj"] * 1e-9) for found in results
    ]
    assert [file.stat().st_mtime_ns for file in files] == before, "finished runs are not repeated"


def test_a_model_must_answer_for_every_token(tmp_path):
    pooled = load_recipe("mosaic", [*TINY, "model.options.global_pool=avg"])
    with pytest.raises(RuntimeError, match=r"model\.name: the model's answers are \(4, 8\), but the targets"):
        train(pooled, tmp_path, show=False)


def test_tokens_with_targets_refuse_moved_pixels(tmp_path):
    with pytest.raises(ValueError, match="augment: every token of mosaic has a target"):
        train(load_recipe("mosaic", [*TINY, "augment.flip=true"]), tmp_path, show=False)
