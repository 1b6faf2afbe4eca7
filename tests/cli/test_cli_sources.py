"""`ecoformer convert` from names, files and folders, good and bad."""

import io
import json
import pickle
import shutil
import sys

import pytest
import torch

import ecoformer

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402
from things import (  # noqa: E402
    TEXT,
    Touch,
)


class TestSources:
    @pytest.mark.parametrize(
        ("source", "arguments", "words"),
        [
            ("missing.pth", (), "missing.pth"),
            ("some/where", (), "some/where"),
            ("empty", (), ["empty", "config.json"]),
            ("config_only", (), ["config_only", "model.safetensors"]),
            ("pvt_v2_b9", (), ["'pvt_v2_b9'", "did you mean", "pvt_v2_b"]),
            ("qqqqqqqq", (), ["'qqqqqqqq'", "timm.list_models()"]),
            ("test_resnet", (), ["ResNet", "register_conversion"]),
            ("weights.pth", (), ["weights.pth", "--model"]),
            ("weights.safetensors", (), ["weights.safetensors", "no ecoformer config"]),
            ("weights.pth", ("--model", "test_vit9"), ["'test_vit9'", "did you mean", "test_vit"]),
            ("weights.pth", ("--model", "test_vit2"), ["weights.pth", "does not fit test_vit2"]),
            ("junk.pth", (), ["junk.pth", "cannot be read"]),
            ("junk.safetensors", (), ["junk.safetensors", "not a safetensors file"]),
            ("zero.safetensors", (), "zero.safetensors"),
            ("cut.safetensors", (), ["cut.safetensors", "truncated"]),
            ("texts.txt", (), ["texts.txt", "cannot be read"]),
            ("junk.pth", ("--model", "test_vit"), ["junk.pth", "not a file of weights"]),
            ("cut.safetensors", ("--model", "test_vit"), "cut.safetensors"),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, *arguments, words=words)

    @pytest.mark.parametrize(
        ("source", "arguments"),
        [
            ("test_vit", ("--model", "test_vit2")),
            ("bert", ("--model", "test_vit2")),
            ("bert", ("--pretrained",)),
        ],
    )
    def test_options_that_mean_nothing_here(self, refused, source, arguments):
        refused(source, *arguments, words=arguments[0])

    @pytest.mark.parametrize("options", [(), ("--model", "test_vit")], ids=["alone", "with --model"])
    @pytest.mark.parametrize("name", ["evil.pth", "evil.safetensors", "folder"])
    def test_code_in_a_pickle_never_runs(self, cli, tmp_path, name, options):
        trace, evil = tmp_path / "trace", tmp_path / name
        if name == "folder":
            shutil.copytree(tmp_path / "config_only", evil)
            evil = evil / "pytorch_model.bin"
        for content in (Touch(trace), {"model": {"head.weight": Touch(trace)}}):
            evil.write_bytes(pickle.dumps(content, protocol=2))
            assert cli("convert", name, "out.safetensors", *options).status == 2
            torch.save(content, evil)
            assert cli("convert", name, "out.safetensors", *options).status == 2
            assert not trace.exists()
            torch.load(io.BytesIO(evil.read_bytes()), weights_only=False)
            assert trace.exists()  # it would have run
            trace.rmdir()
        assert not (tmp_path / "out.safetensors").exists()

    def test_code_in_a_folder_never_runs(self, refused, things, tmp_path, monkeypatch):
        monkeypatch.setattr("builtins.input", lambda *prompt: "y")
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
        monkeypatch.setattr(sys, "path", [*sys.path])
        folder = tmp_path / "custom"
        shutil.copytree(things / "bert", folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
        (folder / "config.json").write_text(json.dumps(config))
        # It ends in an error, lest transformers keep what it learned from it for other tests.
        (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\nraise ImportError")
        try:
            refused("custom", words="custom")
        finally:
            assert not (tmp_path / "trace").exists()


class TestFolders:
    """Folders of transformers that are not quite right."""

    @pytest.fixture
    def folder(self, things, tmp_path):
        shutil.copytree(things / "bert", tmp_path / "model")
        return tmp_path / "model"

    @pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no such"}'])
    def test_a_config_that_says_nothing(self, refused, folder, text):
        (folder / "config.json").write_text(text)
        refused("model", words="model")

    @pytest.mark.parametrize("change", ["cut", "size", "names"])
    def test_weights_that_do_not_fit(self, refused, folder, change):
        weights, config = folder / "model.safetensors", folder / "config.json"
        if change == "cut":
            weights.write_bytes(weights.read_bytes()[:-50])
        elif change == "size":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 48}))
        else:
            save_file({f"x.{k}": v for k, v in load_file(weights).items()}, weights, {"format": "pt"})
        refused("model", words="model")

    def test_a_classifier_keeps_its_head(self, convert, tmp_path):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
        model.save_pretrained(tmp_path / "classifier")
        done = convert("classifier")
        assert hasattr(done.model, "classifier") or any("classifier" in note for note in done.facts["notes"])


class TestHuggingFace:
    """Models of transformers by a folder or a name, in every command that takes a model."""

    @pytest.fixture
    def hub(self, things, tmp_path, monkeypatch):
        """A cache of the Hub that holds two models, one of them without its weights."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        for name, files in (("bert_with_words", None), ("vit", ["config.json"])):
            repository = tmp_path / "cache" / f"models--someone--{name}"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs" / "main").write_text("a" * 40)
            snapshot = repository / "snapshots" / ("a" * 40)
            snapshot.mkdir(parents=True)
            for file in files or [path.name for path in (things / name).iterdir()]:
                shutil.copy(things / name / file, snapshot)

    @pytest.mark.parametrize("model", ["bert", "config_only", "someone/bert_with_words"])
    def test_texts(self, cli, hub, model):
        assert "BertSelfAttention" in cli("info", model).out
        whole = json.loads(cli("cost", model, "--json").out)["total"]["mul"]
        short = json.loads(cli("cost", model, "--tokens", 10, "--json").out)["total"]["mul"]
        assert json.loads(cli("cost", model, "--tokens", 20, "--json").out)["total"]["mul"] == whole > short
        # No weights are needed, so a longer text is no problem.
        swept = ("--compare", "softmax,linformer,eco", "--sweep", "tokens=10,40", "--json")
        assert [row["tokens"] for row in json.loads(cli("cost", model, *swept).out)] == [10, 40] * 3
        assert cli("cost", model, "--compare", "eco", "--on", "bitfusion").status == 0

    @pytest.mark.parametrize("model", ["vit", "someone/vit"])
    def test_images(self, cli, hub, model):
        own = json.loads(cli("cost", model, "--json").out)["total"]["mul"]
        assert json.loads(cli("cost", model, "--resolution", 32, "--json").out)["total"]["mul"] == own
        assert json.loads(cli("cost", model, "--resolution", 64, "--json").out)["total"]["mul"] > 3 * own

    def test_conversion_by_name(self, convert, refused, hub, things):
        done = convert("someone/bert_with_words", "--pretrained", "--attention", "softmax")
        assert done.facts["notes"] == []
        weights = load_file(things / "bert" / "model.safetensors")
        name = "embeddings.word_embeddings.weight"
        assert torch.equal(done.model.state_dict()[name], weights[name])
        done = convert("someone/vit", "--attention", "softmax", "--force")
        assert any("--pretrained" in note for note in done.facts["notes"])
        refused(
            "someone/vit", "--pretrained", out="x.safetensors", words=["someone/vit", "model.safetensors"]
        )

    @pytest.mark.parametrize("size", [{"num_hidden_layers": 10**6}, {"vocab_size": 10**12}])
    def test_a_config_alone_cannot_ask_for_a_huge_model(self, cli, things, tmp_path, size):
        (tmp_path / "huge").mkdir()
        config = json.loads((things / "bert" / "config.json").read_text()) | size
        (tmp_path / "huge" / "config.json").write_text(json.dumps(config))
        done = cli("info", "huge")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert "config.json" in done.err

    def test_other_models(self, cli, tmp_path):
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 32}
        config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
        transformers.GPT2Model(config).save_pretrained(tmp_path / "gpt")
        assert cli("cost", "gpt").status == 0
        assert "simulates no layer of GPT2Model" in cli("cost", "gpt", "--on", "bitfusion").err
        (tmp_path / "gpt" / "tokenizer.json").write_text("{")  # which only --data reads
        assert "GPT2Attention" in cli("info", "gpt").out

    def test_a_converted_model_stays_converted(self, cli, tmp_path):
        model = transformers.BertModel(transformers.BertConfig(**TEXT))
        ecoformer.convert(model, "lsh_eco", seed=0)
        model.save_pretrained(tmp_path / "converted")
        full = json.loads(cli("cost", "converted", "--json").out)
        (tmp_path / "converted" / "model.safetensors").unlink()
        assert json.loads(cli("cost", "converted", "--json").out) == full
        assert "lsh_eco" in cli("info", "converted").out

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("cost", "bert", "--resolution", 32), ["--resolution", "BertModel takes texts", "--tokens"]),
            (("cost", "vit", "--tokens", 9), ["--tokens", "ViTModel takes images", "--resolution"]),
            (("cost", "bert-base-uncased"), ["'bert-base-uncased'", "no network", "folder"]),
            (("info", "someone/else"), ["'someone/else'", "no network", "folder"]),
            (("info", "some/where/else"), ["no such file: some/where/else"]),
            (("convert", "bert", "o.safetensors", "--attention", "linformer"), ["--set seq_len=128"]),
        ],
    )
    def test_mistakes(self, cli, hub, arguments, words):
        done = cli(*arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert all(word in done.err for word in words)
