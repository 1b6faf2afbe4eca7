"""`ecoformer train` and `ecoformer eval` as a user types them; what a run keeps and how it is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import accelerate
import pytest
import torch
import yaml
from torch._dynamo.utils import counters
from training_runs import MASKED, PICTURES, PLAIN, in_child, outcome, recipe, whole
from typer.testing import CliRunner

import ecoformer
from ecoformer.cli import app
from ecoformer.hashing import hashers_of
from ecoformer.training import evaluate, evaluate_path, list_recipes, train
from ecoformer.training.batches import distillation_loss
from ecoformer.training.folder import RunFolder
from ecoformer.training.loop import Trainer
from ecoformer.training.run import load_splits


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "plain.yaml"
    path.write_text(yaml.safe_dump(PLAIN))
    return path


@pytest.fixture(scope="module")
def run(file, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    said = call("train", file, "--out", folder)
    assert said.exit_code == 0, said.output
    assert "accuracy" in said.output
    assert f"model: {folder / 'model.safetensors'}" in said.output
    return folder


def test_without_a_recipe_they_are_listed():
    said = call("train").output
    assert all(f"{name} " in said for name in list_recipes())
    assert "scikit-learn's digits" in said


def test_show(file):
    said = call("train", file, "--show", "--set", "optimiser.lr=1e-3")
    assert yaml.safe_load(said.output)["optimiser"]["lr"] == 0.001
    assert yaml.safe_load(said.output)["keep"] == 2


def test_a_run_is_described(run):
    result = outcome(run)["result"]
    assert (result["steps"], result["processes"], result["changes"]) == (7, 1, [])
    assert result["parameters"] == sum(
        p.numel() for p in ecoformer.load(run / "model.safetensors").parameters()
    )
    assert result["cost"]["paper"]["mul"] > 0
    full = json.loads((run / "result.json").read_text())
    assert full["samples_per_second"] > 0
    assert (
        full["seconds"] > 7 * 8 / full["samples_per_second"]
    )  # evaluation and checkpoints are left out there


def test_eval_gives_the_accuracy_of_the_run(run, file):
    result = outcome(run)["result"]
    measured = json.loads(call("eval", run, "--json").output)
    assert measured == {"accuracy": result["accuracy"], "loss": result["test_loss"]}
    by_recipe = json.loads(call("eval", run / "model.safetensors", "--recipe", file, "--json").output)
    assert by_recipe == measured
    assert f"accuracy {result['accuracy']:.2%}" in call("eval", run).output


@pytest.mark.parametrize(
    ("base", "change"), [(MASKED, "ema=0.7"), (PICTURES, "precision=bf16")], ids=["masked", "pictures"]
)
def test_eval_measures_as_the_run_did(base, change, tmp_path):
    chosen = recipe(base, change, "schedule.steps=3", "smoothing=0.2", folder=tmp_path)
    result = train(chosen, tmp_path / "run", show=False)
    assert evaluate_path(tmp_path / "run")["accuracy"] == result["accuracy"]
    assert evaluate_path(tmp_path / "run")["loss"] == result["test_loss"]
    if change == "precision=bf16":
        assert evaluate_path(tmp_path / "run", changes=["precision=fp32"])["loss"] != result["test_loss"]


def test_what_eval_is_not_given(run, file, tmp_path):
    with pytest.raises(ValueError, match=r"is a checkpoint: .*--recipe"):
        evaluate_path(run / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no recipe\.yaml"):
        evaluate_path(tmp_path)
    RunFolder(tmp_path / "begun").begin(recipe(PLAIN, folder=tmp_path))
    with pytest.raises(FileNotFoundError, match="is not finished: train with --resume"):
        evaluate_path(tmp_path / "begun")
    with pytest.raises(FileNotFoundError, match="there is no trained model"):
        evaluate_path(tmp_path / "none", str(file))


def test_averaged_weights_come_with_the_hash_functions(tmp_path):
    chosen = recipe(MASKED, folder=tmp_path)
    trainer = Trainer(chosen, load_splits(chosen), RunFolder(tmp_path / "run"))
    trainer.run()
    ours, averaged = hashers_of(trainer.bare), hashers_of(trainer.average.module)
    for name, hasher in ours.items():
        assert bool(averaged[name].fitted)
        for key, value in hasher.state_dict().items():
            assert torch.equal(value, averaged[name].state_dict()[key]), (name, key)
    assert not torch.equal(trainer.bare.positions, trainer.average.module.positions)


def test_best_is_the_best_of_all_evaluations(tmp_path, monkeypatch):
    accuracies = iter([0.3, 0.7, 0.5])
    monkeypatch.setattr(
        "ecoformer.training.model.figures", lambda sums: {"accuracy": next(accuracies), "loss": 1.0}
    )
    result = train(recipe(PLAIN, "schedule.steps=12", folder=tmp_path), tmp_path / "run", show=False)
    assert (result["accuracy"], result["best_accuracy"]) == (0.5, 0.7)


def test_the_way_from_softmax_to_hashed_attention(tmp_path):
    """Train, convert by `start`, fine-tune with the first model as the teacher; killed and resumed, too."""
    softmax = recipe(PLAIN, folder=tmp_path)
    train(softmax, tmp_path / "softmax", show=False)
    checkpoint = tmp_path / "softmax/model.safetensors"
    hashing = {"attention": {"name": "eco", "options": {"bits": 4, "support": 4}}, "hashing": {"samples": 4}}
    changes = [f"start={checkpoint}", f"teacher.checkpoint={checkpoint}", "teacher.weight=0.7"]
    chosen = recipe(PLAIN | hashing, *changes, "teacher.transfer=3", folder=tmp_path)
    expected = whole(chosen, tmp_path / "eco")
    assert hashers_of(ecoformer.load(tmp_path / "eco/model.safetensors"))

    def before():
        loss = Trainer._loss

        def deadly(self, *args):
            if self.progress.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(self, *args)

        Trainer._loss = deadly

    status = in_child(lambda: train(chosen, tmp_path / "killed", show=False), before)
    assert status == -signal.SIGKILL
    assert whole(chosen, tmp_path / "killed", resume=True) == expected
    for name, less in (("untaught", changes[:1]), ("untransferred", changes)):
        other = recipe(PLAIN | hashing, *less, folder=tmp_path)
        assert whole(other, tmp_path / name)["metrics"] != expected["metrics"]


def test_transfer_brings_layers_closer_to_the_teachers(tmp_path):
    train(recipe(PLAIN, folder=tmp_path), tmp_path / "softmax", show=False)
    checkpoint = tmp_path / "softmax/model.safetensors"
    changes = [f"start={checkpoint}", f"teacher.checkpoint={checkpoint}", "ema=0.9"]
    errors = []
    for steps in (0, 20):
        asked = ["attention.name=sharp_eco", f"teacher.transfer={steps}"]
        chosen = recipe(PLAIN, *asked, *changes, folder=tmp_path)
        trainer = Trainer(chosen, load_splits(chosen), RunFolder(tmp_path / str(steps)))
        trainer._transfer()
        inputs, _ = trainer.task.test_batch(*trainer.loader.samples(16, 0))
        with torch.no_grad():
            taught = trainer.teacher(inputs)
            ours = [model.eval()(inputs) for model in (trainer.bare, trainer.average.module)]
        assert torch.equal(*ours)
        errors.append(float((ours[0] - taught).square().mean()))
    assert errors[1] < 0.8 * errors[0]
    chosen = recipe(PLAIN, "teacher.transfer=3", *changes, folder=tmp_path)  # softmax from softmax
    trainer = Trainer(chosen, load_splits(chosen), RunFolder(tmp_path / "same"))
    before = {name: x.clone() for name, x in trainer.bare.state_dict().items()}
    trainer._transfer()
    assert all(torch.equal(x, before[name]) for name, x in trainer.bare.state_dict().items())


def test_a_teacher_of_other_classes(tmp_path):
    train(recipe(PLAIN, folder=tmp_path), tmp_path / "teacher", show=False)
    pupil = recipe(
        PLAIN,
        f"teacher.checkpoint={tmp_path / 'teacher/model.safetensors'}",
        "data.options.values=6",
        "data.options.keys=10",
        folder=tmp_path,
    )
    with pytest.raises(ValueError, match="has 8 classes, but recall has 6"):
        train(pupil, tmp_path / "run", show=False)


def test_distillation_reads_only_what_is_asked():
    logits, taught = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    targets = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    loss = distillation_loss(logits, taught, targets, 2.0)
    asked = [(0, 0), (0, 2)]
    expected = 0.0
    for i, j in asked:
        p, q = (torch.softmax(x[i, j] / 2, -1) for x in (taught, logits))
        expected += float((p * (p / q).log()).sum()) * 4 / len(asked)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    nothing = distillation_loss(logits, taught, torch.full((2, 3), -100), 2.0)
    assert float(nothing) == 0


def test_evaluating_a_model_of_ones_own(tmp_path):
    chosen = recipe(PLAIN, "eval_batch=20", folder=tmp_path)
    splits = load_splits(chosen)

    class Right(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.one_hot(splits.test.targets.long().clamp(min=0), 8).float() * 100

    assert evaluate(Right(), chosen, splits)["accuracy"] == 1.0


def test_only_training_steps_are_compiled(tmp_path, monkeypatch):
    """By the tracer alone: code for it would take a minute."""
    real = accelerate.Accelerator
    traced = lambda **options: real(**options | {"dynamo_backend": "eager"})  # noqa: E731
    monkeypatch.setattr(accelerate, "Accelerator", traced)
    torch._dynamo.reset()
    counters.clear()
    train(recipe(MASKED, "compile=true", "ema=0", folder=tmp_path), tmp_path / "run", show=False)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_command_asked_to_stop(tmp_path):
    file = tmp_path / "long.yaml"
    file.write_text(yaml.safe_dump(PLAIN | {"schedule": {"steps": 100_000}, "save_every": 100_000}))
    command = [sys.executable, "-m", "ecoformer", "train", str(file), "--out", str(tmp_path / "run")]
    command += ["--set", "evaluate_every=100000"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/metrics.jsonl").exists():
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=30)[1]
    assert started.returncode == 1
    assert "stopping after this step and saving; once more ends at once" in said
    assert "continue with the same command and --resume" in said.splitlines()[-1]
    assert len(RunFolder(tmp_path / "run").steps()) == 1
