"""Tiny recipes, runs in a child process that can be killed, and the comparison of two runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import yaml

from ecoformer import storage
from ecoformer.training import Recipe, load_recipe, train
from ecoformer.training.loop import Trainer
from ecoformer.training.run import RunStopped

PLAIN = {
    "about": "the smallest run: softmax, no hashing",
    "data": {"name": "recall", "options": {"pairs": 3, "queries": 2, "keys": 8, "values": 8, "count": 40}},
    "model": {"name": "text", "options": {"dim": 8, "depth": 1, "num_heads": 1, "hidden": 8, "dropout": 0.1}},
    "attention": {"name": "softmax"},
    "optimiser": {"lr": 0.01},
    "schedule": {"steps": 7, "warmup": 2},
    "batch": 8,
    "save_every": 2,
    "log_every": 3,
}
PLAIN["data"]["options"]["test_count"] = 20

MASKED = {
    "about": "hashed attention refitted, dropout, averaged weights, accumulation, masks drawn anew",
    "data": {"name": "masked_sample", "options": {"length": 32, "limit": 40}},
    "model": {"name": "text", "options": {"dim": 8, "depth": 1, "num_heads": 1, "hidden": 8, "dropout": 0.2}},
    "attention": {"name": "eco", "options": {"bits": 4, "support": 4}},
    "optimiser": {"lr": 0.01, "clip": 1.0},
    "schedule": {"steps": 9, "warmup": 2},
    "hashing": {"samples": 4, "refit_every": 1},
    "ema": 0.9,
    "batch": 10,
    "accumulate": 2,
    "eval_batch": 7,
    "save_every": 3,
    "log_every": 4,
}

PICTURES = {
    "about": "pictures: drop path, mixup, cutmix, erasing",
    "data": {"name": "digits", "options": {"size": 32, "limit": 40}},
    "model": {
        "name": "pvt_v2_b0",
        "options": {
            "depths": [1, 1, 1, 1],
            "embed_dims": [8, 8, 8, 8],
            "num_heads": [1, 1, 1, 1],
            "drop_path_rate": 0.3,
            "drop_rate": 0.1,
        },
    },
    "attention": {"name": "softmax"},
    "optimiser": {"lr": 0.002},
    "schedule": {"steps": 7, "warmup": 1},
    "augment": {"size": 32, "pad": 3, "flip": True, "erase": 0.5, "mixup": 0.3, "cutmix": 0.5},
    "smoothing": 0.1,
    "ema": 0.8,
    "batch": 8,
    "save_every": 2,
    "log_every": 3,
}


def recipe(base: dict, *changes: str, folder: Path) -> Recipe:
    file = folder / "recipe-for-test.yaml"
    file.write_text(yaml.safe_dump(base))
    return load_recipe(str(file), changes)


def in_child(run, before=lambda: None) -> int:
    """Run a function in a copy of this process; returns its exit status, negative for a signal."""
    return status_of(child(run, before))


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def child(run, before=lambda: None) -> int:
    """Start a function in a copy of this process; returns its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            before()
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def file_operations(folder: Path, act) -> None:
    """Call `act(number)` before each operation on files of a folder, for the rest of this process."""
    count, inside = 0, str(folder)

    def hook(event, args):
        nonlocal count
        writes = event == "open" and str(args[0]).startswith(inside) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}:
            count += 1
            act(count)

    sys.addaudithook(hook)
    fsync = os.fsync

    def synced(descriptor):
        hook("os.rename", ())
        fsync(descriptor)

    os.fsync = synced


def model_of(folder: Path) -> dict:
    """The trained model bit by bit; safetensors writes the keys of its header in an order of its own."""
    tensors, config = storage.read(folder / "model.safetensors")
    return {name: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()} | {
        "config": config
    }


def outcome(folder: Path) -> dict:
    """All of a run that must not hang on interruptions; times are left out."""
    result = json.loads((folder / "result.json").read_text())
    for name in ("seconds", "samples_per_second"):
        result.pop(name)
    return {
        "model": model_of(folder),
        "metrics": (folder / "metrics.jsonl").read_text(),
        "result": result,
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def whole(recipe: Recipe, folder: Path, **options) -> dict:
    train(recipe, folder, show=False, **options)
    return outcome(folder)


def on_ranks(run, *, ranks: int = 2) -> list[int]:
    """Run a function in copies of this process, as torchrun would start them; returns their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def before(rank: int):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in where.items()})

    children = [child(lambda rank=rank: run(rank), lambda rank=rank: before(rank)) for rank in range(ranks)]
    return [status_of(pid) for pid in children]


def in_step(monkeypatch, step, act):
    """Call `act(trainer, loss)` for the loss of one step, and use what it returns."""
    original = Trainer._loss

    def changed(self, *args):
        loss = original(self, *args)
        return act(self, loss) if self.progress.step == step else loss

    monkeypatch.setattr(Trainer, "_loss", changed)


def stopped(chosen, folder, kind=RunStopped, **options):
    with pytest.raises(kind) as caught:
        train(chosen, folder, show=False, **options)
    return str(caught.value)


def fail(trainer, loss):
    raise RuntimeError("power cut")


def contents(folder):
    """All files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
