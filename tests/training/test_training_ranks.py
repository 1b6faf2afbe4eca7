"""Several processes learn what one does, write once, count every test sample once, and can be resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from training_runs import MASKED, PLAIN, die, in_child, on_ranks, outcome, recipe, whole

from ecoformer import storage
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.hashing import hashers_of
from ecoformer.training import train
from ecoformer.training.batches import Loader, measured_batches
from ecoformer.training.folder import RunFolder
from ecoformer.training.loop import Trainer

QUIET = PLAIN["model"]["options"] | {"dropout": 0.0, "attn_drop": 0.0}
HASHED = PLAIN | {
    "model": {"name": "text", "options": QUIET},
    "attention": {"name": "eco", "options": {"bits": 4, "support": 4}},
    "hashing": {"samples": 5, "refit_every": 1},
    "eval_batch": 3,
    "log_every": 1,
}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_like(folder: Path, other: Path) -> None:
    """Same course up to rounding, line for line."""
    for ours, theirs in zip(lines(folder), lines(other), strict=True):
        assert ours.pop("split") == theirs.pop("split")
        assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = (storage.read(run / "model.safetensors")[0] for run in (folder, other))
    for name in ours.keys() - {"blocks.0.attn.qkv.bias"}:  # keys' has no gradient but rounding's
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-3, atol=2e-4, msg=name)


def test_two_processes_learn_what_one_does(tmp_path):
    # 19 test samples in batches of 3 leave the second process one batch short of the first's four, and the
    # processes meet in every forward pass.
    odd = HASHED | {"data": {"name": "recall", "options": HASHED["data"]["options"] | {"test_count": 19}}}
    chosen = recipe(odd, folder=tmp_path)
    whole(chosen, tmp_path / "one")

    def run(rank):
        export = Trainer.export

        def kept(self):
            state = {name: hasher.state_dict() for name, hasher in hashers_of(self.bare).items()}
            torch.save(state, tmp_path / f"hashers-{rank}.pt")
            return export(self)

        Trainer.export = kept
        train(chosen, tmp_path / "two", show=False)

    assert on_ranks(run) == [0, 0]
    assert_like(tmp_path / "two", tmp_path / "one")
    first, second = (torch.load(tmp_path / f"hashers-{rank}.pt") for rank in range(2))
    assert first.keys() == second.keys()
    for name, state in first.items():
        for key, value in state.items():
            assert torch.equal(value, second[name][key]), (name, key)
    assert outcome(tmp_path / "two")["result"]["processes"] == 2


def uneven() -> Splits:
    """Texts of which some ask for one token and others for all."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(1, 9, (32, 6), generator=generator)
    targets = inputs - 1
    targets[::2, 1:] = IGNORED
    targets[1::8] = IGNORED
    part = Arrays(inputs, targets)
    return Splits(part, Arrays(inputs[:7], targets[:7]), "tokens", 8, 9, 6)


def test_every_token_counts_alike_however_a_batch_is_divided(tmp_path):
    quiet = HASHED | {"attention": {"name": "softmax"}}
    one = recipe(quiet, folder=tmp_path)
    parts = recipe(quiet, "accumulate=8", folder=tmp_path)
    both = recipe(quiet, "accumulate=2", folder=tmp_path)
    whole(one, tmp_path / "one", splits=uneven())
    whole(parts, tmp_path / "parts", splits=uneven())
    run = lambda rank: train(both, tmp_path / "both", show=False, splits=uneven())  # noqa: E731
    assert on_ranks(run) == [0, 0]
    assert_like(tmp_path / "parts", tmp_path / "one")
    assert_like(tmp_path / "both", tmp_path / "one")


def test_a_process_that_dies(tmp_path):
    chosen = recipe(MASKED, "batch=12", folder=tmp_path)

    def run(folder, last=None, resume=False):
        def on_rank(rank):
            loss = Trainer._loss

            def deadly(self, *args):
                if rank == 1 and self.progress.step == last:
                    die()
                return loss(self, *args)

            Trainer._loss = deadly
            try:
                train(chosen, folder, show=False, resume=resume)
            except Exception as error:
                (tmp_path / f"said-{rank}").write_text(str(error))
                raise

        return on_ranks(on_rank)

    assert run(tmp_path / "whole") == [0, 0]
    assert run(tmp_path / "run", last=7) == [1, -signal.SIGKILL]
    assert "the state of step 6 is kept" in (tmp_path / "said-0").read_text()
    assert RunFolder(tmp_path / "run").newest_good() == 6
    assert run(tmp_path / "run", resume=True) == [0, 0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_what_two_processes_cannot_share(tmp_path):
    with pytest.raises(ValueError, match="batch=9 must divide into 2 processes x accumulate=1"):
        Loader(uneven().train, recipe(HASHED, "batch=9", folder=tmp_path), torch.device("cpu"), 1, 2)


@pytest.mark.parametrize(
    ("samples", "ranks", "size"), [(7, 2, 3), (5, 3, 2), (4, 2, 2), (1, 2, 4), (9, 4, 1)]
)
def test_every_test_sample_counts_once(samples, ranks, size, tmp_path):
    part = Arrays(torch.arange(samples).unsqueeze(1), torch.arange(samples))
    chosen = recipe(HASHED, f"eval_batch={size}", folder=tmp_path)
    cpu = torch.device("cpu")
    shares = [list(measured_batches(part, chosen, cpu, rank, ranks)) for rank in range(ranks)]
    counted = torch.cat([targets for share in shares for _, targets in share])
    assert counted[counted != IGNORED].sort().values.tolist() == list(range(samples))
    assert len({len(share) for share in shares}) == 1  # processes meet in every batch
    assert all(len(inputs) <= size for share in shares for inputs, _ in share)


def test_fsdp_is_not_left_out_in_silence(tmp_path):
    chosen = recipe(PLAIN, folder=tmp_path)

    def run():
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        with pytest.raises(ValueError, match="FSDP on several GPUs"):
            train(chosen, tmp_path / "run", show=False)

    assert in_child(run) == 0


def torchrun(*arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )


@pytest.fixture
def hashed_file(tmp_path):
    file = tmp_path / "hashed.yaml"
    file.write_text(yaml.safe_dump(HASHED))
    return str(file)


@pytest.mark.slow
def test_the_recipes_of_imagenet(tmp_path):
    """An epoch of each, the second from the model of the first."""
    noise = random.Random(0)
    for part, count in (("train", 24), ("val", 5)):
        for label in "abc":
            (tmp_path / "imagenet" / part / label).mkdir(parents=True)
            for i in range(count):
                picture = Image.frombytes("RGB", (48, 56), noise.randbytes(3 * 48 * 56))
                picture.save(tmp_path / "imagenet" / part / label / f"{i}.jpg")
    changes = [f"data.root={tmp_path / 'imagenet'}", "data.workers=1", "batch=8", "augment.size=64"]
    changes += ["schedule.epochs=1", "schedule.warmup=0.5", "model.options.embed_dims=[8,8,8,8]"]
    changes += ["model.options.depths=[1,1,1,1]", "model.options.num_heads=[1,1,1,1]", "hashing.samples=8"]
    for name in ("imagenet_msa", "imagenet_eco", "imagenet_scratch"):
        own = [] if name == "imagenet_msa" else ["attention.options.support=4"]
        own += [f"start={tmp_path}/imagenet_msa/model.safetensors"] if name == "imagenet_eco" else []
        options = [word for change in (*changes, *own) for word in ("--set", change)]
        process = torchrun("-m", "ecoformer", "train", name, *options, "--out", str(tmp_path / name))
        said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
        assert outcome(tmp_path / name)["result"]["steps"] == 9


@pytest.mark.slow
def test_torchrun_asked_to_stop(hashed_file, tmp_path):
    command = ("-m", "ecoformer", "train", hashed_file, "--out", str(tmp_path / "run"))
    for change in ("schedule.steps=20000", "save_every=100000", "evaluate_every=100000"):
        command += ("--set", change)
    started = torchrun(*command)
    while not (tmp_path / "run/metrics.jsonl").exists():
        time.sleep(0.2)
        assert started.poll() is None, started.stdout.read()
    started.send_signal(signal.SIGTERM)
    said = started.communicate(timeout=60)[0]
    assert started.returncode != 0
    assert "is kept" in said
    assert said.count("continue with the same command and --resume") == 2
    step = RunFolder(tmp_path / "run").newest_good()
    assert step is not None
    assert f"stopped at step {step} of 20000" in said


@pytest.mark.slow
def test_split_weights(hashed_file, tmp_path):
    sharded = str(Path(__file__).parent / "sharded_run.py")
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}
    environment |= {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }

    def run(name, *options):
        process = torchrun(sharded, hashed_file, str(tmp_path / name), *options, **environment)
        said = process.communicate(timeout=200)[0]
        return process.returncode, said

    whole(recipe(HASHED, folder=tmp_path), tmp_path / "one")
    assert run("two")[0] == 0
    assert_like(tmp_path / "two", tmp_path / "one")
    status, said = run("cut", "--stop-at=5")
    assert status != 0
    assert "the state of step 5 is kept" in said
    status, said = run("cut", "--resume")
    assert status == 0, said
    assert outcome(tmp_path / "cut")["metrics"] == outcome(tmp_path / "two")["metrics"]
    assert outcome(tmp_path / "cut")["model"] == outcome(tmp_path / "two")["model"]
    status, said = run("averaged", "--ema")
    assert status != 0
    assert "FSDP splits them: set ema=0" in said
