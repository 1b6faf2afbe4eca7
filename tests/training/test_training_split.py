"""Tokens of a sample split over processes: the run that one process makes, weight for weight."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_training_ranks import lines, torchrun
from torch import nn
from training_runs import MASKED, PLAIN, die, on_ranks, outcome, recipe, whole

from ecoformer import save, storage
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.hashing import hashers_of
from ecoformer.models.text import PAD
from ecoformer.training import model, train
from ecoformer.training.batches import Loader
from ecoformer.training.loop import Trainer
from ecoformer.training.model import build_model, check_model
from ecoformer.training.processes import divide
from ecoformer.training.run import load_splits

SPLIT = PLAIN | {
    "attention": {"name": "eco", "options": {"bits": 4, "support": 4, "local": 3}},
    "model": {"name": "text", "options": PLAIN["model"]["options"] | {"dropout": 0.0, "depth": 2}},
    # Adam forgets the scale of a gradient; SGD tells twice the gradient from the right one.
    "optimiser": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0},
    "schedule": {"name": "constant", "steps": 4},
    "hashing": {"samples": 5, "refit_every": 1},
    "eval_batch": 3,
    "evaluate_every": 100,
    "save_every": 100,
    "log_every": 1,
}
SAMPLES, TESTED, LENGTH = 24, 7, 11


def texts(kind: str) -> Splits:
    """Texts of odd length, of which some end before the border, with targets as the kind has them."""
    generator = torch.Generator().manual_seed(3)
    shape = (SAMPLES, 2, LENGTH) if kind == "pairs" else (SAMPLES, LENGTH)
    inputs = torch.randint(1, 9, shape, generator=generator)
    inputs[::3, ..., 4:] = PAD
    inputs[1::3, ..., 8:] = PAD
    if kind == "tokens":
        targets = torch.where(inputs == PAD, IGNORED, inputs.roll(1, dims=-1) % 3)
        targets[::4, 1:] = IGNORED
    else:
        targets = inputs.flatten(1).sum(dim=1) % 3
    tested = Arrays(inputs[:TESTED], targets[:TESTED])
    return Splits(Arrays(inputs, targets), tested, kind, 3, 9, LENGTH)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = storage.read(folder / "model.safetensors")[0]
    return {name: tensor for name, tensor in tensors.items() if "hasher" not in name}


def assert_same_way(folder: Path, other: Path, chosen, splits: Splits) -> None:
    """Same losses line for line, and all weights went from their start to the same place, up to rounding."""
    for ours, theirs in zip(lines(folder), lines(other), strict=True):
        assert ours.pop("split") == theirs.pop("split")
        assert ours == pytest.approx(theirs, rel=1e-5)
    start = build_model(chosen, splits).state_dict()
    ours, theirs = weights(folder), weights(other)
    for name, there in theirs.items():
        way = (there - start[name]).norm()
        assert way > 1e-4, name
        assert (ours[name] - there).norm() < 1e-3 * way + 1e-6, name


@pytest.mark.parametrize("kind", [pytest.param("pairs", marks=pytest.mark.slow), "tokens"])
def test_two_processes_with_half_of_the_tokens_learn_what_one_does(kind, tmp_path):
    one = recipe(SPLIT, "accumulate=2", folder=tmp_path)
    two = recipe(SPLIT, "accumulate=2", "split_tokens=2", folder=tmp_path)
    whole(one, tmp_path / "one", splits=texts(kind))

    def run(rank):
        figures = model.figures

        def kept(sums):
            torch.save(sums, tmp_path / f"sums-{rank}.pt")
            return figures(sums)

        export = Trainer.export

        def exported(self):
            state = {name: hasher.state_dict() for name, hasher in hashers_of(self.bare).items()}
            torch.save(state, tmp_path / f"hashers-{rank}.pt")
            return export(self)

        model.figures, Trainer.export = kept, exported
        train(two, tmp_path / "two", show=False, splits=texts(kind))

    assert on_ranks(run) == [0, 0]
    assert_same_way(tmp_path / "two", tmp_path / "one", one, texts(kind))
    asked = int((texts(kind).test.targets != IGNORED).sum())
    for rank in range(2):
        assert torch.load(tmp_path / f"sums-{rank}.pt")[2] == asked  # no answer is counted twice
    first, second = (torch.load(tmp_path / f"hashers-{rank}.pt") for rank in range(2))
    assert len(first) == 2
    for name, state in first.items():
        assert all(torch.equal(value, second[name][key]) for key, value in state.items()), name


@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "tokens"])
def test_samples_and_tokens_split_over_four_processes(kind, tmp_path):
    softmax = recipe(SPLIT, "attention.name=softmax", "seed=5", folder=tmp_path)
    save(build_model(softmax, texts(kind)), tmp_path / "teacher.safetensors")
    taught = f"teacher.checkpoint={tmp_path / 'teacher.safetensors'}"
    one = recipe(SPLIT, taught, folder=tmp_path)
    four = recipe(SPLIT, taught, "split_tokens=2", folder=tmp_path)
    whole(one, tmp_path / "one", splits=texts(kind))
    run = lambda rank: train(four, tmp_path / "four", show=False, splits=texts(kind))  # noqa: E731
    assert on_ranks(run, ranks=4) == [0] * 4
    assert_same_way(tmp_path / "four", tmp_path / "one", one, texts(kind))


def assert_same_losses(folder: Path, other: Path) -> None:
    for ours, theirs in zip(lines(folder), lines(other), strict=True):
        assert ours.pop("split") == theirs.pop("split")
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_masks_averages_and_resuming(tmp_path):
    """A process dies; the run goes on with two that split tokens, and also with one that has all of them."""
    one = recipe(MASKED, "model.options.dropout=0.0", folder=tmp_path)
    two = recipe(MASKED, "model.options.dropout=0.0", "split_tokens=2", folder=tmp_path)

    def run(name, last=None, resume=False):
        def on_rank(rank):
            loss = Trainer._loss

            def deadly(self, *args):
                if rank == 1 and self.progress.step == last:
                    die()
                return loss(self, *args)

            Trainer._loss = deadly
            train(two, tmp_path / name, show=False, resume=resume)

        return on_ranks(on_rank)

    whole(one, tmp_path / "one")
    assert run("two") == [0, 0]
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert run("cut", last=7) == [1, -signal.SIGKILL]
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    assert run("cut", resume=True) == [0, 0]
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "two")
    whole(one, tmp_path / "alone", resume=True)
    assert_same_losses(tmp_path / "alone", tmp_path / "one")
    assert outcome(tmp_path / "alone")["result"]["changes"] == ["from step 6 on: split_tokens: 2 then, 1 now"]


@pytest.mark.slow
def test_half_precision(tmp_path):
    one = recipe(SPLIT, "precision=bf16", folder=tmp_path)
    two = recipe(SPLIT, "precision=bf16", "split_tokens=2", folder=tmp_path)
    whole(one, tmp_path / "one", splits=texts("text"))
    assert on_ranks(lambda rank: train(two, tmp_path / "two", show=False, splits=texts("text"))) == [0, 0]
    for ours, theirs in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)


@pytest.mark.slow
def test_split_weights_and_split_tokens(tmp_path):
    """FSDP over the processes that split tokens."""
    file = tmp_path / "split.yaml"
    file.write_text(yaml.safe_dump(SPLIT | {"split_tokens": 2}))
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}
    environment["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Block"
    sharded = str(Path(__file__).parent / "sharded_run.py")
    process = torchrun(sharded, str(file), str(tmp_path / "two"), **environment)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    one = recipe(SPLIT, folder=tmp_path)
    whole(one, tmp_path / "one")
    assert_same_way(tmp_path / "two", tmp_path / "one", one, load_splits(one))


def test_what_is_split_over_how_many(tmp_path):
    chosen = recipe(SPLIT, "split_tokens=2", folder=tmp_path)
    with pytest.raises(ValueError, match="split_tokens=2 must divide the number of processes, 1"):
        train(chosen, tmp_path / "run", show=False, splits=texts("text"))
    with pytest.raises(ValueError, match="split_tokens=2 is for texts"):
        divide(chosen, "images", SimpleNamespace(num_processes=2, process_index=0))


@pytest.mark.parametrize(
    "changes",
    [
        ["attention.name=softmax"],
        ["attention.name=performer"],
        ["attention.options.sigma=input"],
        ["attention.options.local=5", "split_tokens=3"],
        ["split_tokens=12"],
    ],
)
def test_what_cannot_be_split(changes, tmp_path):
    chosen = recipe(SPLIT, "split_tokens=2", *changes, folder=tmp_path)
    with pytest.raises(ValueError, match=f"^split_tokens={chosen.split_tokens}: "):
        check_model(build_model(chosen, texts("text")), chosen, texts("text"))


def test_models_of_others_are_not_split(tmp_path):
    chosen = recipe(SPLIT, "split_tokens=2", folder=tmp_path)
    with pytest.raises(
        ValueError, match="is for our text encoders, but start holds a Linear: set split_tokens=1"
    ):
        check_model(nn.Linear(2, 2), chosen, texts("text"))


def test_batches_are_divided_among_those_with_samples_of_their_own(tmp_path):
    chosen = recipe(SPLIT, "split_tokens=2", folder=tmp_path)
    cpu = torch.device("cpu")
    first = [next(iter(Loader(texts("text").train, chosen, cpu, rank, 4).epoch(0)))[0] for rank in range(4)]
    for a, b in [(0, 1), (2, 3)]:
        assert torch.equal(first[a][0], first[b][0])
    assert len(first[0][0]) == len(first[2][0]) == 4
    assert not torch.equal(first[0][0], first[2][0])
    with pytest.raises(
        ValueError, match=r"batch=9 must divide into 4 processes / split_tokens=2 x accumulate=1"
    ):
        Loader(texts("text").train, recipe(SPLIT, "split_tokens=2", "batch=9", folder=tmp_path), cpu, 0, 4)
