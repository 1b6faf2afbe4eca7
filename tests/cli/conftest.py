"""What a user types, and what comes of it."""

import argparse
import json
import shutil
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import ecoformer
import ecoformer.models
from ecoformer.cli import main

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
PIL_Image = pytest.importorskip("PIL.Image")
from safetensors.torch import save_file  # noqa: E402
from things import (  # noqa: E402
    SMALL,
    TEXT,
    VISION,
    WORDS,
    released,
)


@pytest.fixture(autouse=True)
def _no_network(no_network, monkeypatch):
    """Whatever a user types."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """All that a user may name, made once and only read."""
    folder = tmp_path_factory.mktemp("things")
    torch.manual_seed(1)
    pyramid = timm.create_model("ecoformer_pvt_v2_b0", attention="softmax", **SMALL)
    pyramid.pretrained_cfg["input_size"] = (3, 32, 32)
    ecoformer.save(pyramid, folder / "ours.safetensors")
    timm.create_model("ecoformer_pvt_v2_b0", **SMALL).save_pretrained(folder / "our_folder")
    torch.save({"model": released(depths=(1, 1, 1, 1))}, folder / "released.pth")
    weights = timm.create_model("test_vit", num_classes=7).state_dict()
    torch.save({"model": weights, "args": argparse.Namespace(lr=0.1)}, folder / "weights.pth")
    save_file(weights, folder / "weights.safetensors")
    transformers.utils.logging.disable_progress_bar()
    bert = transformers.BertModel(transformers.BertConfig(**TEXT))
    for name in ("bert", "bert_with_words"):
        bert.save_pretrained(folder / name)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bert_with_words")
    transformers.ViTModel(transformers.ViTConfig(**VISION)).save_pretrained(folder / "vit")
    (folder / "photos" / "more").mkdir(parents=True)
    for i, place in enumerate(["a.png", "b.PNG", "more/c.jpg"]):
        noise = torch.randint(0, 256, (36, 40, 3), generator=torch.Generator().manual_seed(i))
        PIL_Image.fromarray(noise.byte().numpy()).save(folder / "photos" / place)
    (folder / "photos" / "readme.txt").write_text("not an image")
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [" ".join(letters[i : i + 3 + i % 4]) for i in range(20)]
    (folder / "texts.txt").write_text("\n\n".join(lines) + "\n")
    (folder / "empty").mkdir()
    (folder / "config_only").mkdir()
    shutil.copy(folder / "bert" / "config.json", folder / "config_only")
    (folder / "blank.txt").write_text(" \n\n")
    for name in ("junk.pth", "junk.safetensors"):
        (folder / name).write_bytes(b"junk" * 99)
    for name in ("zero.pth", "zero.safetensors"):
        (folder / name).write_bytes(b"")
    content = (folder / "ours.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(content[: len(content) // 2])
    return folder


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, columns=120):
        capsys.readouterr()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["ecoformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Done(end.value.code or 0, *capsys.readouterr())

    return command


@pytest.fixture
def cli(things, tmp_path, run):
    """Runs the command in a folder that holds only links to the things."""
    for thing in things.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    return run


@pytest.fixture
def convert(cli):
    """A conversion that works: the facts of --json, and the model in OUT."""

    def run(source, *arguments, out="out.safetensors"):
        done = cli("convert", source, out, "--json", *arguments)
        assert (done.status, done.err) == (0, "")
        return SimpleNamespace(facts=json.loads(done.out), model=ecoformer.load(out))

    return run


@pytest.fixture
def refused(cli, tmp_path):
    """A conversion that fails: one line that holds the words, and nothing written."""

    def run(source, *arguments, words, out="out.safetensors"):
        before = sorted(tmp_path.rglob("*"))
        done = cli("convert", source, out, *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("ecoformer: ")
        assert done.err.endswith("\n")
        assert done.err.count("\n") == 1
        assert "Traceback" not in done.err
        for word in [words] if isinstance(words, str) else words:
            assert word in done.err
        assert sorted(tmp_path.rglob("*")) == before
        return done.err

    return run
