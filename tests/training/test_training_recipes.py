"""The recipes that come with the package: they load, hold the paper's values and run with any mechanism."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image
from timm.data import create_transform
from training_runs import MASKED, PICTURES, PLAIN, recipe

from ecoformer import list_attentions, load
from ecoformer.data.splits import Arrays, Splits
from ecoformer.hashing import hashers_of
from ecoformer.training import as_yaml, list_recipes, load_recipe, train
from ecoformer.training.batches import Task, seed_everything, transform_of
from ecoformer.training.folder import RunFolder
from ecoformer.training.loop import Trainer
from ecoformer.training.model import build_model, learning_rate
from ecoformer.training.recipe import Augment
from ecoformer.training.run import load_splits

# The paper's sections 5.1 (ImageNet), 5.3 (CIFAR-100) and 5.4 (from scratch).
PAPER = {
    "imagenet_msa": {"optimiser.lr": 2.5e-5, "batch": 256, "schedule.epochs": 100},
    "imagenet_eco": {"optimiser.lr": 2.5e-5, "batch": 256, "schedule.epochs": 30, "hashing.refit_every": 30},
    "imagenet_scratch": {"optimiser.lr": 2.5e-4, "batch": 256, "schedule.epochs": 300},
    "cifar100": {"optimiser.lr": 6.25e-6, "batch": 64, "schedule.epochs": 300, "hashing.refit_every": 300},
}


def value_of(chosen, key):
    for part in key.split("."):
        chosen = chosen[part] if isinstance(chosen, dict) else getattr(chosen, part)
    return chosen


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name):
    chosen = load_recipe(name)
    assert {key: value_of(chosen, key) for key in PAPER[name]} == PAPER[name]


@pytest.mark.parametrize("name", list_recipes())
def test_all_values_of_a_recipe_make_the_same_recipe(name, tmp_path):
    file = tmp_path / "again.yaml"
    file.write_text(as_yaml(load_recipe(name)))
    assert load_recipe(str(file)) == load_recipe(name)


def stand_in(name: str) -> Splits:
    """Noise of the kind that a recipe learns from, where its data must be fetched."""
    generator = torch.Generator().manual_seed(0)
    if name.startswith(("imagenet", "cifar100")):
        size, classes = (64, 1000) if name.startswith("imagenet") else (32, 100)
        images = torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8, generator=generator)
        part = Arrays(images, torch.arange(4))
        return Splits(part, part, "images", classes)
    shape = (4, 2, 4096) if name == "lra_retrieval" else (4, 4096)
    part = Arrays(torch.randint(1, 257, shape, dtype=torch.int16, generator=generator), torch.arange(4) % 2)
    return Splits(part, part, "pairs" if name == "lra_retrieval" else "text", 2, 257, 4096)


FETCHED = sorted({*list_recipes()} - {"digits", "mosaic", "recall", "lra_listops", "masked_bytes"})


@pytest.mark.parametrize("name", FETCHED)
def test_models_are_built_at_their_size(name):
    model = build_model(load_recipe(name), stand_in(name))
    assert bool(hashers_of(model)) == (name != "imagenet_msa")
    if name.startswith("lra"):
        embedding = next(module for key, module in model.named_modules() if key.endswith("embedding"))
        assert embedding.num_embeddings == 512


def small(name: str, folder) -> list[str]:
    """Changes that make a recipe small, and its data where they must be fetched."""
    changes = ["batch=4", "schedule.steps=1", "schedule.warmup=0", "hashing.samples=4", "eval_batch=4"]
    if name == "digits":
        return [*changes, "data.options.limit=8", "model.options.embed_dims=[8,8,8,8]"]
    if name == "mosaic":
        sizes = ["augment.size=32", "model.options.img_size=32", "model.options.embed_dims=[8]"]
        return [*changes, *sizes, "data.options={side: 8, count: 8, test_count: 4}"]
    changes += ["model.options.dim=16", "model.options.depth=1", "model.options.hidden=8"]
    if name == "recall":
        return [*changes, "data.options.count=8", "data.options.test_count=4", "data.options.pairs=8"]
    for place in ("train/pos", "train/neg", "test/pos", "test/neg"):
        (folder / place).mkdir(parents=True)
        for i in range(2):
            (folder / place / f"{i}.txt").write_text(f"a review of {place}, number {i}, of some length " * 3)
    return [*changes, f"data.root={folder}", "data.options.length=128", "data.options.cut=100"]


@pytest.mark.parametrize("name", ["digits", "lra_text", "recall"])
@pytest.mark.parametrize("mechanism", list_attentions())
@pytest.mark.slow
def test_any_mechanism_takes_a_step(name, mechanism, tmp_path):
    changes = [f"attention.name={mechanism}", *small(name, tmp_path / "data")]
    result = train(load_recipe(name, changes), tmp_path / "run", show=False)
    assert result["steps"] == 1
    assert result["recipe"]["attention"]["name"] == mechanism


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("digits", "eco"),
        ("mosaic", "native"),
        ("lra_text", "linformer"),
        ("recall", "softmax"),
        ("recall", "klsh_eco"),
    ],
)
def test_some_mechanisms_take_a_step(name, mechanism, tmp_path):
    test_any_mechanism_takes_a_step(name, mechanism, tmp_path)


def test_another_mechanism_forgets_the_options_of_the_first():
    assert load_recipe("cifar100", ["attention.name=softmax"]).attention.options == {}
    assert load_recipe("cifar100", ["attention.name=eco"]).attention.options == {"bits": 16, "support": 25}
    changes = ["attention.name=performer", "attention.options.features=256"]
    assert load_recipe("cifar100", changes).attention.options == {"features": 256}


WRONG = {
    "optimiser.rate=1": "optimiser.rate is not a key",
    "optimizer.lr=1": "optimizer is not a key",
    "batch=0": "batch ",
    "batch=many": "batch ",
    "optimiser.lr=.nan": "optimiser.lr ",
    "precision=fp8": "precision ",
    "data=5": "data ",
    "schedule.steps=": "schedule ",
    "optimiser.lr.value=3": "--set optimiser.lr.value=3: ",
    "lr": "--set takes key=value",
    ".lr=3": "--set takes key=value",
    "optimiser.lr=[1": "--set optimiser.lr: ",
}


@pytest.mark.parametrize("change", WRONG)
def test_wrong_changes(change):
    with pytest.raises(ValueError, match=re.escape(WRONG[change])) as caught:
        load_recipe("digits", [change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", "about: x", "1: 2"])
def test_wrong_files(text, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"recipe .*wrong\.yaml"):
        load_recipe(str(tmp_path / "wrong.yaml"))


def test_recipes_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="no recipe is called 'digit': there are cifar100, "):
        load_recipe("digit")
    with pytest.raises(FileNotFoundError, match="there is no recipe file"):
        load_recipe(str(tmp_path / "none.yaml"))


REFUSED = ["precision=fp16", "batch=64", "accumulate=3", "schedule.warmup=7", "model.name=pvt_v2_b0"]
REFUSED += ["optimiser.name=adamx", "start=none.safetensors", "teacher.checkpoint=~/none"]


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_run_is_said_before_anything_is_written(change, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=change.partition("=")[0]):
        train(recipe(PLAIN, change, folder=tmp_path), tmp_path / "run", show=False)
    assert not (tmp_path / "run/recipe.yaml").exists()


@pytest.mark.parametrize(
    ("part", "targets"),
    [("test", []), ("test", [-100, -100]), ("test", [7, 8]), ("train", [-1, 0]), ("train", [-100, 8])],
)
def test_targets_that_cannot_be_learned_are_said_before_anything_is_written(part, targets, tmp_path):
    chosen = recipe(PLAIN, folder=tmp_path)
    splits = load_splits(chosen)
    rows = torch.tensor(targets, dtype=torch.int16)[:, None].repeat(20, splits.length)
    wrong = Arrays(torch.ones_like(rows), rows)
    with pytest.raises(ValueError, match=f"the {part}.* targets"):
        train(chosen, tmp_path / "run", show=False, splits=replace(splits, **{part: wrong}))
    assert not (tmp_path / "run/recipe.yaml").exists()


ELSEWHERE = [
    {"checkpoint_path": "evil.pth"},
    {"pretrained": True},
    {"pretrained_cfg": {"url": "https://example.org/evil.pth"}},
    {"pretrained_cfg_overlay": {"file": "evil.pth"}},
    {"cache_dir": "cache"},
    {"backbone": ["hf-hub:somebody/evil"]},
]


@pytest.mark.parametrize("options", ELSEWHERE, ids=lambda options: next(iter(options)))
def test_options_of_a_model_open_no_files(options):
    change = f"model.options={json.dumps(options)}"
    with pytest.raises(ValueError, match=r"model\.options names files or code") as caught:
        load_recipe("digits", [change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("auto", ["rand-m10-n1-p1-inc1", "rand-m0", "v0", "original", "augmix-m10"])
def test_every_draw_of_an_augmentation_can_be_made(auto):
    """Those that timm and Pillow can make stay as they are."""
    ours = transform_of(Augment(size=8, auto=auto, flip=True, jitter=0.4), training=True)
    made = create_transform(8, is_training=True, auto_augment=auto)
    picture, failed = Image.effect_mandelbrot((9, 9), (-2, -1, 1, 1), 30).convert("RGB"), 0
    for seed in range(150):
        seed_everything(seed)
        found = ours(picture)
        seed_everything(seed)
        try:
            assert torch.equal(found, made(picture))
        except ValueError:
            failed += 1
    assert failed < 50


def test_training_and_testing_hide_the_same_share(tmp_path):
    chosen = recipe(MASKED, "data.options.rate=0.4", folder=tmp_path)
    splits = load_splits(chosen)
    clean = splits.train.batch(torch.arange(40))
    _, targets = Task(chosen, splits).training_batch(*clean, torch.Generator())
    for asked in (targets, splits.test.targets):
        assert float((asked != -100).float().mean()) == pytest.approx(0.4, abs=0.03)


def test_erasing_of_pictures_in_memory(tmp_path):
    chosen = recipe(PICTURES, "augment={size: 32, erase: 1.0}", folder=tmp_path)
    white, labels = torch.full((16, 3, 32, 32), 255, dtype=torch.uint8), torch.zeros(16)
    seed_everything(0)
    found, _ = Task(chosen, load_splits(chosen)).training_batch(white, labels, torch.Generator())
    shares = (found == 0).float().mean(dim=(1, 2, 3))
    assert 0.01 < shares.min() < shares.max() < 0.36


CONVOLUTIONS = {"name": "resnet18", "options": {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}}


def test_a_model_without_attention(tmp_path):
    chosen = recipe(PICTURES | {"model": CONVOLUTIONS, "attention": {"name": "native"}}, folder=tmp_path)
    train(chosen, tmp_path / "run", show=False)
    assert type(load(tmp_path / "run/model.safetensors")).__name__ == "ResNet"


def test_what_no_file_could_hold_is_not_trained(tmp_path, monkeypatch):
    def changed_by_hand(*args):
        model = build_model(*args)
        model.blocks[0].norm1.eps = 0.5
        return model

    monkeypatch.setattr("ecoformer.training.model.build_model", changed_by_hand)
    with pytest.raises(ValueError, match=r"model\.name=text: a file could not hold"):
        train(recipe(PLAIN, folder=tmp_path), tmp_path / "run", show=False)
    assert not (tmp_path / "run/recipe.yaml").exists()


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_no_step_has_a_rate_of_zero(name, warmup, tmp_path):
    chosen = recipe(PLAIN, f"schedule.name={name}", f"schedule.warmup={warmup}", folder=tmp_path)
    rates = [learning_rate(chosen, step, 7, 5) for step in range(7)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(0.01)
    assert rates[0] == pytest.approx(0.01 / 3 if warmup else 0.01)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if name == "linear":
        length = 7 - warmup
        assert rates[warmup:] == pytest.approx([0.01 * (1 - i / length) for i in range(length)])


def test_a_second_run_in_one_process_has_its_own_settings(tmp_path):
    first = recipe(PLAIN, "accumulate=2", folder=tmp_path)
    train(first, tmp_path / "first", show=False)
    second = recipe(PLAIN, "precision=bf16", folder=tmp_path)
    trainer = Trainer(second, load_splits(second), RunFolder(tmp_path / "second"))
    assert trainer.accelerator.gradient_accumulation_steps == 1
    assert trainer.accelerator.mixed_precision == "bf16"
