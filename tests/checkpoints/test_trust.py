"""A file from a stranger opens no other file, fetches nothing, imports nothing and stays small."""

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import storage

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def description(**model):
    return {"model": model, "conversions": [], "settings": {}}


def refused(path, *args):
    with pytest.raises(ecoformer.CheckpointError) as caught:
        ecoformer.load(path, *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BERT = {"library": "transformers", "name": "BertModel", "config": SIZES}


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
        {"library": "timm", "name": "hf-hub:someone/model", "arguments": {}},
        {"library": "timm", "name": "pvt_v2_b0", "arguments": {"pretrained": True}},
        {"library": "timm", "name": "pvt_v2_b0", "arguments": {"checkpoint_path": "/tmp/x.pth"}},
    ],
    ids=str,
)
def test_nothing_else_is_opened(tmp_path, monkeypatch, model):
    def forbidden(*args, **kwargs):
        raise AssertionError(f"called with {args} {kwargs}")

    monkeypatch.setattr(timm, "create_model", forbidden)
    monkeypatch.setattr(transformers.PreTrainedModel, "_from_config", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    refused(storage.write(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, description(**model)))


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


def test_settings_that_tensors_do_not_show(tmp_path):
    def layer(**kwargs):
        return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **kwargs))

    path = ecoformer.save(layer(activation="gelu"), tmp_path / "x.safetensors")
    ecoformer.load(path, layer(activation="gelu"))
    assert "norm_first" in refused(path, layer(activation="gelu", norm_first=True))
    assert "activation" in refused(path, layer(activation="relu"))


def test_parts_that_were_converted(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).eval()
    ecoformer.convert(model.bert, "lsh_eco", seed=0)
    tokens = torch.randint(0, 99, (2, 7))
    path = ecoformer.save(model, tmp_path / "x.safetensors")
    again = ecoformer.load(path)
    assert type(again) is type(model)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_what_was_loaded_can_be_saved(tmp_path):
    arguments = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4)}
    model = timm.create_model("pvt_v2_b0", **arguments)
    first = ecoformer.load(ecoformer.save(model, tmp_path / "a", arguments=arguments))
    second = ecoformer.load(ecoformer.save(first, tmp_path / "b"))
    assert second.state_dict().keys() == model.state_dict().keys()
    compiled = torch.compile(second, backend="eager")
    assert (
        ecoformer.load(ecoformer.save(compiled, tmp_path / "c")).state_dict().keys()
        == first.state_dict().keys()
    )
