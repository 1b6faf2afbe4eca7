"""Whatever stops a run, the last good state stays, the message says what to do, and the run can go on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import warnings

import pytest
import torch
from PIL import Image
from training_runs import (
    MASKED,
    PICTURES,
    PLAIN,
    contents,
    fail,
    in_child,
    in_step,
    outcome,
    recipe,
    stopped,
    whole,
)

import ecoformer.training.run as run_module
from ecoformer import storage
from ecoformer.data import Arrays, Splits
from ecoformer.training import console, train
from ecoformer.training.batches import Decoded
from ecoformer.training.folder import RunFolder
from ecoformer.training.loop import Interrupted, Trainer

REMEDY = "continue with the same command and --resume"


WRITES = {
    "weights": (
        "safetensors.torch.save_file",
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ),
    "optimiser": ("torch.save", RuntimeError("PytorchStreamWriter failed writing file")),
    "progress": ("ecoformer.training.loop.write", OSError(errno.ENOSPC, "No space left on device")),
    "folder": ("pathlib.Path.mkdir", OSError(errno.ENOSPC, "No space left on device")),
    "manifest": ("ecoformer.training.folder.replace_text", OSError(errno.ENOSPC, "No space left on device")),
    "sync": ("ecoformer.training.folder.to_disk", OSError(errno.EIO, "Input/output error")),
    "name": ("pathlib.Path.rename", OSError(errno.EIO, "Input/output error")),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_write_that_fails(what, plain, expected, tmp_path, monkeypatch):
    where, error = WRITES[what]
    save = Trainer._save

    def failing(self):
        if self.progress.step != 4:
            return save(self)
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *args, **kwargs: (_ for _ in ()).throw(error))
            return save(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", failing)
        message = stopped(plain, tmp_path / "run")
    assert "the checkpoint of step 4 was not completed" in message
    assert ("free some space" in message) == ("No space" in str(error))
    assert message.endswith(f"the state of step 2 is kept in {tmp_path}/run; {REMEDY}")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-000000002"]
    assert whole(plain, tmp_path / "run", resume=True) == expected


def finite(folder, step):
    tensors = storage.read(folder.checkpoint(step) / "progress.safetensors")[0]
    from safetensors.torch import load_file

    weights = load_file(folder.checkpoint(step) / "model.safetensors")
    return all(bool(torch.isfinite(x).all()) for x in (*tensors.values(), *weights.values()))


def test_a_loss_that_is_not_a_number(plain, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        in_step(patch, 4, lambda trainer, loss: loss * float("nan"))
        message = stopped(plain, folder.path)
    assert "became nan by step 5" in message
    assert "--set optimiser.lr=0.001" in message
    assert "the state of step 4 is kept" in message
    assert folder.newest_good() == 4
    assert finite(folder, 4)
    slower = recipe(PLAIN, "optimiser.lr=0.001", folder=tmp_path)
    result = train(slower, folder.path, resume=True, show=False)
    assert result["changes"] == ["from step 4 on: optimiser.lr: 0.01 then, 0.001 now"]
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    rates = {line["step"]: line["lr"] for line in lines if line["split"] == "train"}
    assert rates[3] == pytest.approx(0.01)
    assert rates[7] < 0.001


def test_weights_that_are_not_numbers_are_not_saved(plain, tmp_path, monkeypatch):
    # The loss of step 4 is fine, its gradient is not: the weights are, when the checkpoint is due.
    in_step(monkeypatch, 3, lambda trainer, loss: loss + (loss - loss.detach()) * float("inf"))
    message = stopped(plain, tmp_path / "run")
    assert "a loss or weight became nan by step 4" in message
    assert RunFolder(tmp_path / "run").steps() == [2]


def test_a_test_loss_that_is_not_a_number(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ecoformer.training.model.figures", lambda sums: {"accuracy": 0.5, "loss": float("nan")}
    )
    assert "the test loss became nan by step 5" in stopped(plain, tmp_path / "run")
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    chosen, number = recipe(MASKED, folder=tmp_path), signal.SIGTERM
    expected, handler = whole(chosen, tmp_path / "whole"), signal.getsignal(number)

    def ask(trainer, loss):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # torchrun passes on what the terminal sends as well
        return loss

    with monkeypatch.context() as patch:
        in_step(patch, 4, ask)
        message = stopped(chosen, tmp_path / "run", Interrupted)
    assert message.startswith("stopped at step 5 of 9; the state of step 5 is kept")
    assert signal.getsignal(number) == handler
    assert whole(chosen, tmp_path / "run", resume=True) == expected


def test_a_second_signal_ends_at_once(plain, tmp_path):
    def before():
        console.SAME_SIGNAL = 0.0
        loss = Trainer._loss

        def ask(self, *args):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            return loss(self, *args)

        Trainer._loss = ask

    assert in_child(lambda: train(plain, tmp_path / "run", show=False), before) == -signal.SIGTERM


@pytest.fixture
def in_files(tmp_path):
    """A recipe of pictures in files, decoded by a worker."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 16), ("val", 5)):
        for label in ("a", "b"):
            (tmp_path / "pictures" / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=generator).numpy()
                Image.fromarray(pixels).save(tmp_path / "pictures" / part / label / f"{i}.png")
    augment = {"size": 32, "flip": True, "erase": 0.3, "auto": "rand-m3", "jitter": 0.2, "mixup": 0.3}
    data = {"name": "imagefolder", "root": str(tmp_path / "pictures"), "workers": 1}
    return recipe(PICTURES | {"data": data, "augment": augment, "accumulate": 2}, folder=tmp_path)


def test_a_lost_worker(in_files, tmp_path, monkeypatch):
    expected = whole(in_files, tmp_path / "whole")
    original = Decoded.__getitem__

    def deadly(self, i):
        if self.epoch == 1 and i == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, i)

    def run():
        monkeypatch.setattr(Decoded, "__getitem__", deadly)
        (tmp_path / "message").write_text(stopped(in_files, tmp_path / "run"))

    # PyTorch tells of a lost worker by a signal, which may come while a checkpoint is written, or a report.
    assert in_child(run) == 0
    message = (tmp_path / "message").read_text()
    assert "DataLoader worker" in message
    assert RunFolder(tmp_path / "run").newest_good() >= 4
    assert f"the state of step {RunFolder(tmp_path / 'run').newest_good()} is kept" in message
    assert whole(in_files, tmp_path / "run", resume=True) == expected
    none = recipe(in_files.model_dump(mode="json"), "data.workers=0", folder=tmp_path)
    alone = whole(none, tmp_path / "alone")
    assert (alone["model"], alone["metrics"]) == (expected["model"], expected["metrics"])


class Own:
    """A data set of grey pictures, as torchvision's are."""

    targets = (0, 1) * 8

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return Image.new("L", (20, 20), 12 * i), self.targets[i]


def test_a_data_set_of_ones_own(in_files, tmp_path, monkeypatch):
    splits = Splits(Own(), Own(), "images", 2)
    expected = whole(in_files, tmp_path / "whole", splits=splits)
    with monkeypatch.context() as patch:
        in_step(patch, 5, fail)
        stopped(in_files, tmp_path / "run", splits=splits)
    assert whole(in_files, tmp_path / "run", resume=True, splits=splits) == expected


def test_a_picture_that_cannot_be_read(in_files, tmp_path):
    broken = tmp_path / "pictures/train/b/3.png"
    broken.write_bytes(b"no picture")
    message = stopped(in_files, tmp_path / "run")
    assert message.startswith(f"ValueError: {broken} is not a readable JPEG, ")
    assert "Traceback" not in message


def test_a_finished_run_returns_at_once(plain, finished, monkeypatch):
    monkeypatch.setattr(run_module, "load_splits", lambda recipe: pytest.fail("data were loaded"))
    result = train(plain, finished, resume=True, show=False)
    assert result == json.loads((finished / "result.json").read_text())
    with pytest.raises(FileExistsError, match=r"already holds a run: .*--resume"):
        train(plain, finished, show=False)


def test_a_finished_run_stays_as_it_is(finished, tmp_path):
    before = contents(finished)
    changed = recipe(PLAIN, "precision=bf16", "optimiser.lr=0.5", folder=tmp_path)
    result = train(changed, finished, resume=True, show=False)
    assert (result["recipe"]["precision"], result["changes"]) == ("fp32", [])
    assert contents(finished) == before
    with pytest.raises(ValueError, match=r"another recipe \(batch: 8 then, 4 now\)"):
        train(recipe(PLAIN, "batch=4", folder=tmp_path), finished, resume=True, show=False)


def test_killed_between_the_last_checkpoint_and_the_result(plain, finished, expected, tmp_path):
    for name in ("result.json", "model.safetensors"):
        shutil.copytree(finished, tmp_path / name)
        (tmp_path / name / name).unlink()
        assert whole(plain, tmp_path / name, resume=True) == expected


def test_resuming_where_there_is_no_run_starts_one(plain, tmp_path):
    (tmp_path / "begun/checkpoints").mkdir(parents=True)
    train(plain, tmp_path / "begun", resume=True, show=False)
    assert outcome(tmp_path / "begun")["result"]["steps"] == 7


def test_another_recipe_is_not_resumed(halfway, tmp_path):
    other = recipe(PLAIN, "batch=4", "seed=3", folder=tmp_path)
    with pytest.raises(ValueError, match=r"another recipe \(batch: 8 then, 4 now, seed: 0 then, 3 now\)"):
        train(other, halfway.path, resume=True, show=False)


def test_other_data_are_not_trained_on(halfway, plain):
    splits = run_module.load_splits(plain)
    fewer = type(splits)(Arrays(*splits.train.batch(torch.arange(38))), splits.test, "tokens", 8, 73, 5)
    with pytest.raises(ValueError, match="was trained on 40 samples, but the data now have 38"):
        train(plain, halfway.path, resume=True, show=False, splits=fewer)


def test_tensorboard_forgets_what_is_logged_again(tmp_path, monkeypatch):
    chosen = recipe(PLAIN, "tensorboard=true", "save_every=100", "log_every=1", folder=tmp_path)

    with monkeypatch.context() as patch:
        in_step(patch, 6, fail)
        stopped(chosen, tmp_path / "run")
    train(chosen, tmp_path / "run", resume=True, show=False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = EventAccumulator(str(tmp_path / "run/tensorboard"))
        events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]
