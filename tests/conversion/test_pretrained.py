"""Converted Hugging Face models through `save_pretrained` and back, by transformers and by `load`."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ecoformer
from ecoformer import CheckpointError, FitOptions, convert, third_party

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
IDS = torch.randint(3, 50, (6, 9), generator=torch.Generator().manual_seed(0))
Classifier = transformers.BertForSequenceClassification


def build():
    torch.manual_seed(1)
    return Classifier(transformers.BertConfig(**SIZES)).eval()


def fit(model):
    options = FitOptions(steps=2, pairs=2)
    ecoformer.fit_hashers(model, [{"input_ids": IDS}], options=options, progress=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the logits of the model in it."""
    model, folder = build(), tmp_path_factory.mktemp("saved")
    convert(model, "eco", bits=8, support=4, local=3)
    fit(model)
    model.save_pretrained(folder)
    return folder, model(IDS).logits


@pytest.mark.parametrize("read", ["own class", "auto class", "load"])
def test_a_converted_model_comes_back(saved, read, tmp_path):
    folder, logits = saved
    auto = transformers.AutoModelForSequenceClassification.from_pretrained
    readers = {"own class": Classifier.from_pretrained, "auto class": auto, "load": ecoformer.load}
    model = readers[read](folder)
    assert torch.equal(model(IDS).logits, logits)
    model.save_pretrained(tmp_path)
    assert torch.equal(auto(tmp_path)(IDS).logits, logits)
    texts = [(path / "config.json").read_text() for path in (folder, tmp_path)]
    assert json.loads(texts[0])["quantization_config"] == json.loads(texts[1])["quantization_config"]
    file = ecoformer.save(model, tmp_path / "model.eco.safetensors")
    again = ecoformer.load(file)
    assert torch.equal(again(IDS).logits, logits)
    again.save_pretrained(tmp_path)
    assert torch.equal(auto(tmp_path)(IDS).logits, logits)
    model.half().float().train()(IDS, labels=IDS[:, 0] % 2).loss.backward()


def test_hash_functions_stay_in_fp32(saved):
    model = Classifier.from_pretrained(saved[0], dtype=torch.bfloat16)
    hashers = ecoformer.hashers_of(model).values()
    assert {t.dtype for h in hashers for t in h.state_dict().values()} == {torch.float32, torch.bool}
    assert model.dtype == torch.bfloat16


def test_with_and_without_a_head(saved, tmp_path):
    whole = Classifier.from_pretrained(saved[0])
    base = transformers.BertModel.from_pretrained(saved[0])
    assert torch.equal(base(IDS).last_hidden_state, whole.bert(IDS).last_hidden_state)
    base.save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path)
    assert torch.equal(again.bert(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_parts_wrappers_and_several_conversions_are_recorded(tmp_path):
    part, wrapped, twice = build(), nn.ModuleDict({"text": build()}), build()
    convert(part.bert, "softmax")
    convert(wrapped, "softmax")
    convert(twice, "softmax", layers="*.0.*")
    convert(twice, "lsh_eco", layers="*.1.*", seed=0)
    convert(twice, "lsh_eco", layers="*.0.*", bits=4, seed=0)
    for name, model in (("part", part), ("wrapped", wrapped["text"]), ("twice", twice)):
        model.save_pretrained(tmp_path / name)
        assert torch.equal(ecoformer.load(tmp_path / name)(IDS).logits, model(IDS).logits)


def trainer(model, folder, steps, **settings):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": int(row[0]) % 2} for row in IDS]
    settings = {"save_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 2} | settings
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, **settings
    )
    return transformers.Trainer(model, arguments, train_dataset=rows)


def converted(mechanism="lsh_eco"):
    model = build()
    convert(model, mechanism, **({"bits": 8, "seed": 0} if mechanism == "lsh_eco" else {}))
    return model


def test_a_trainer_checkpoint(tmp_path):
    model = converted()
    trainer(model, tmp_path, 2, gradient_checkpointing=True).train()
    file = ecoformer.save(model, tmp_path / "file.safetensors")  # runtime flags do not matter
    for again in (ecoformer.load(tmp_path / "checkpoint-2"), ecoformer.load(file)):
        assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)
    resumed = converted()
    trainer(resumed, tmp_path, 2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(resumed.eval()(IDS).logits, model(IDS).logits)
    # Without `strict`, transformers only warns of weights that are missing or unexpected.
    for other in (build(), converted("softmax")):
        with pytest.raises(RuntimeError, match=r"attention\.self\.query"):
            trainer(other, tmp_path, 2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer(build(), tmp_path / "original", 1).train()
    with pytest.raises(RuntimeError, match="converted to lsh_eco, but the weights are not converted"):
        trainer(model, tmp_path, 2).train(resume_from_checkpoint=str(tmp_path / "original" / "checkpoint-1"))


def test_shapes_that_the_config_does_not_have_are_refused(saved):
    with pytest.raises(ValueError, match=r"classifier.weight is \(2, 16\) .* \(5, 16\)"):
        Classifier.from_pretrained(saved[0], num_labels=5)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "ecoformer", "conversions": [{"mechanism": "eco"}]}},
        {"quantization_config": {"quant_method": "ecoformer", "conversions": 3}},
        {"quantization_config": {"quant_method": "ecoformer"}},
        {"auto_map": {"AutoModel": "code.Model"}},
        {"architectures": ["Nothing"]},
        {"architectures": ["nn"]},
    ],
)
def test_damaged_configs_are_refused(saved, tmp_path, change):
    config = json.loads((saved[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        ecoformer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "sdpa"}, {"config": "its own"}])
def test_an_unconverted_model_does_not_take_the_weights(saved, monkeypatch, options):
    from transformers.quantizers import auto

    if "config" not in options:
        for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
            monkeypatch.delitem(known, "ecoformer")
    else:
        options = {"config": transformers.BertConfig(**SIZES)}
    for cls in (Classifier, transformers.AutoModelForSequenceClassification):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            cls.from_pretrained(saved[0], **options)


@pytest.mark.parametrize("first", ["ecoformer", "transformers"])
def test_a_process_that_only_imports_us(saved, first):
    """transformers finds us if it was imported before, or refuses the weights."""
    second = {"ecoformer": "transformers", "transformers": "ecoformer"}[first]
    script = f"""
import runpy
repair = runpy.run_path({third_party.__file__!r})
repair["repair_torchvision"]()
import {first}, {second}
transformers.AutoModel.from_pretrained({str(saved[0])!r})
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if first == "transformers":
        assert run.returncode == 0, run.stderr
    else:
        assert run.returncode != 0
        assert "got ecoformer" in run.stderr
        assert "MISMATCH" in run.stderr


@pytest.mark.parametrize("name", ["Roberta", "DistilBert", "Electra", "ViT", "DeiT", "Dinov2", "ViTMSN"])
def test_every_family_comes_back(name, tmp_path):
    """transformers renames the weights of some families in its files."""
    sizes = SIZES | {"image_size": 32, "patch_size": 8, "pad_token_id": 0}
    if name == "DistilBert":
        sizes |= {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    x = torch.randn(2, 3, 32, 32) if model.main_input_name == "pixel_values" else IDS
    convert(model, "lsh_eco", local=3, seed=0)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 5)
    model.save_pretrained(tmp_path)
    again = ecoformer.load(tmp_path)
    assert torch.equal(again(x).last_hidden_state, model(x).last_hidden_state)
    # The Trainer does not rename them back.
    weights = load_file(tmp_path / "model.safetensors")
    if weights.keys() == model.state_dict().keys():
        assert not any(model.load_state_dict(weights, strict=False))
    else:
        with pytest.raises(RuntimeError, match=r"q_proj is missing.*ecoformer\.load"):
            model.load_state_dict(weights, strict=False)


def test_weights_of_another_model_with_the_same_config_are_refused(tmp_path):
    """Models that are built from one config object share it, and with it the record of a conversion."""
    config = transformers.BertConfig(**SIZES)
    first, second, third = (Classifier(config) for _ in range(3))
    convert(first, "softmax")
    convert(second, "lsh_eco", seed=0)
    for model, was in ((first, "converted to softmax"), (third, "not converted")):
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"quantization_config .* converted to lsh_eco, but .* {was}"):
            Classifier.from_pretrained(tmp_path)
