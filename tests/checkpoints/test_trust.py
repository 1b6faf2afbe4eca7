"""A file from a stranger opens no other file, fetches nothing, imports nothing and stays small."""

import json
import pickle
import socket

import pytest
import torch

import ecoformer
from ecoformer import CheckpointError, storage
from ecoformer.cli.samples import check_target
from ecoformer.cli.sources import open_model
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def written(path, model):
    description = {"model": model, "conversions": [], "settings": {}}
    return storage.write(path, {"a": torch.zeros(1)}, description)


def refused(path, *args):
    with pytest.raises(CheckpointError) as caught:
        ecoformer.load(path, *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BERT = {"library": "transformers", "name": "BertModel", "config": SIZES}
TIMM = {"library": "timm", "name": "pvt_v2_b0", "arguments": {}}


@pytest.mark.parametrize(
    "model",
    [
        BERT | {"attention": "someone/kernel"},
        BERT | {"attention": "flash_attention_2"},
        BERT | {"config": SIZES | {"attn_implementation": "someone/kernel"}},
        BERT | {"config": SIZES | {"_attn_implementation": "someone/kernel"}},
        BERT | {"config": SIZES | {"auto_map": {"AutoModel": "x.Y"}}},
        BERT | {"name": "TimmWrapperModel", "config": {"architecture": "local-dir:/tmp/x"}},
        BERT | {"name": "TimmWrapperModel", "config": {"model_args": {"checkpoint_path": "/tmp/x.pth"}}},
        BERT | {"name": "TimmWrapperModel", "config": {}},
        TIMM | {"name": "hf-hub:someone/model"},
        TIMM | {"name": "local-dir:/tmp/x"},
        TIMM | {"arguments": {"pretrained": True}},
        TIMM | {"arguments": {"checkpoint_path": "/tmp/x.pth"}},
        TIMM | {"arguments": {"pretrained_cfg_overlay": {"file": "/tmp/x.pth"}}},
    ],
    ids=str,
)
def test_nothing_else_is_opened(tmp_path, monkeypatch, model):
    def forbidden(*args, **kwargs):
        raise AssertionError(f"called with {args} {kwargs}")

    monkeypatch.setattr(timm, "create_model", forbidden)
    monkeypatch.setattr(transformers.PreTrainedModel, "_from_config", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    refused(written(tmp_path / "x.safetensors", model))


@pytest.mark.usefixtures("no_network")
def test_no_pickle_and_no_network(tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError(f"called with {args}")

    path = ecoformer.save(timm.create_model("ecoformer_pvt_v2_b0"), tmp_path / "model")
    for target in ((torch, "load"), (pickle, "Unpickler")):
        monkeypatch.setattr(*target, forbidden)
    ecoformer.load(path)


@pytest.fixture
def asked(monkeypatch):
    """Hosts that were asked for; there is no network."""
    hosts = []

    def lookup(host, *args, **kwargs):
        hosts.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    return hosts


@pytest.fixture
def folder(tmp_path):
    """A model of transformers; beside its folder, weights of such a model."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=50))
    model.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "model"


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "upernet", "architectures": ["UperNetForSemanticSegmentation"]},
        {"model_type": "detr", "architectures": ["DetrModel"], "use_pretrained_backbone": True},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_backbone_is_not_looked_for_on_the_hub(folder, asked, config):
    backbone = {"backbone": "someone/model", "use_timm_backbone": False, "backbone_config": None}
    edit(folder, **config, **backbone)
    refused(folder)
    for needs_weights in (False, True):
        with pytest.raises(CheckpointError):
            open_model(str(folder), needs_weights=needs_weights, shapes_only=not needs_weights)
    described = {"library": "transformers", "name": config["architectures"][0], "config": config | backbone}
    refused(written(folder / "x", described))
    assert not asked


@pytest.mark.parametrize("name", ["../other/model.safetensors", "{}/other/model.safetensors", "..", 3])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_of_other_folders_are_not_opened(folder, name, kind):
    weights = folder / "model.safetensors"
    state = ecoformer.load(folder).state_dict()
    name = name.format(folder.parent) if isinstance(name, str) else name
    stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    if kind == "bin":
        torch.save(state, folder.parent / "other" / "model.safetensors")
    weights.rename(folder / "shard.safetensors")
    for shard in (name, "shard.safetensors"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(state, shard)}
        (folder / f"{stem}.index.json").write_text(json.dumps(index))
        if shard == name:
            refused(folder)
            with pytest.raises(CheckpointError, match="no file in the folder"):
                open_model(str(folder), needs_weights=True)
    if kind == "safetensors":
        assert isinstance(ecoformer.load(folder), transformers.BertModel)
        (folder / "sub").mkdir()
        (folder / "sub" / "x.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, "../other/model.safetensors")})
        )
        edit(folder, transformers_weights="sub/x.safetensors.index.json")
        refused(folder)


def test_a_file_does_not_say_where_weights_come_from(tmp_path):
    """timm keeps such settings beside those of images, and would download by them later."""
    path = ecoformer.save(timm.create_model("pvt_v2_b0", num_classes=3), tmp_path / "x")
    tensors, description = storage.read(path)
    description["model"]["images"] |= {"crop_pct": 0.5, "file": "x.pth"}
    settings = ecoformer.load(storage.write(path, tensors, description)).pretrained_cfg
    assert settings["crop_pct"] == 0.5
    assert settings.get("file") != "x.pth"
    description["model"]["images"]["url"] = "https://example.com/x.pth"
    refused(storage.write(path, tensors, description))


@pytest.mark.parametrize(
    "settings", [{"input_size": [3, 8000, 8000]}, {"crop_pct": 0.012}, {"crop_pct": "1"}], ids=str
)
def test_pictures_stay_small(settings, tmp_path):
    model = timm.create_model("ecoformer_pvt_v2_b0", attention="softmax")
    path = ecoformer.save(model, tmp_path / "x")
    tensors, description = storage.read(path)
    description["model"]["images"] |= settings
    assert "for images" in refused(storage.write(path, tensors, description))
    model.pretrained_cfg.update(settings)
    with pytest.raises(CheckpointError, match="for images"):
        ecoformer.save(model, path)


@pytest.mark.parametrize(
    "settings", [{"size": {"height": 8000, "width": 8}}, {"size": 8000}, {"crop_pct": 0.012}], ids=str
)
def test_pictures_of_transformers_stay_small(settings, tmp_path):
    config = transformers.ConvNextConfig(hidden_sizes=[4] * 4, depths=[1] * 4)
    transformers.ConvNextModel(config).save_pretrained(tmp_path)
    transformers.ConvNextImageProcessor().save_pretrained(tmp_path)
    assert callable(open_model(str(tmp_path)).images)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(CheckpointError, match="for images"):
        _ = open_model(str(tmp_path)).images


def test_tied_tensors_do_not_become_several(tmp_path):
    """A file that stores a layer once must not become a model of many layers."""
    sizes = {"attention": "softmax", "dim": 32, "num_heads": 2, "hidden": 32, "length": 4, "vocabulary": 4}
    path = ecoformer.save(TextEncoder(depth=8, **sizes), tmp_path / "x")
    (tensors, description), first = storage.read(path), {}
    tied = {name: first.setdefault(tensor.shape, tensor) for name, tensor in tensors.items()}
    assert "its tied tensors hold" in refused(storage.write(path, tied, description))
    by_hand = TextEncoder(depth=2, **sizes)
    by_hand.blocks[1].norm1.weight = by_hand.blocks[0].norm1.weight
    with pytest.raises(ValueError, match="its tied tensors hold"):
        ecoformer.save(by_hand, tmp_path / "x")
    path = ecoformer.save(by_hand, tmp_path / "y", standalone=False)
    assert ecoformer.load(path, by_hand) is by_hand


@pytest.mark.parametrize("target", ["mine", "nothing"])
def test_links_are_replaced(target, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    model = TextEncoder(depth=1, dim=16, num_heads=2, hidden=16)
    (tmp_path / "folder").mkdir()
    names = ["x.safetensors", "folder/model.safetensors", "folder/config.json", "folder/README.md"]
    for name in names:
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(FileExistsError, match="--force"):
        check_target(tmp_path / "x.safetensors", force=False)
    check_target(tmp_path / "x.safetensors", force=True)
    ecoformer.save(model, tmp_path / "x.safetensors")
    model.save_pretrained(tmp_path / "folder")
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    for name in names[: 3 if target == "mine" else 4]:  # a README.md that is there is kept
        assert not (tmp_path / name).is_symlink()
    ecoformer.load(tmp_path / "x.safetensors")
    ecoformer.load(tmp_path / "folder")
