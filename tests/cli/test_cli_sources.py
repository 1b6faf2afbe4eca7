"""`ecoformer convert` from names, files and folders, good and bad."""

import contextlib
import io
import json
import pickle
import shutil
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

import ecoformer
from ecoformer.cli import sources

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from safetensors import SafetensorError  # noqa: E402
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
            ("missing.safetensors", (), "missing.safetensors"),
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
            ("weights.safetensors", ("--model", "test_resnet"), ["does not fit test_resnet"]),
            ("released.pth", ("--model", "test_vit"), ["released.pth", "does not fit test_vit"]),
            ("junk.pth", (), ["junk.pth", "cannot be read"]),
            ("junk.safetensors", (), ["junk.safetensors", "not a safetensors file"]),
            ("zero.pth", (), "zero.pth"),
            ("zero.safetensors", (), "zero.safetensors"),
            ("cut.safetensors", (), ["cut.safetensors", "truncated"]),
            ("texts.txt", (), ["texts.txt", "cannot be read"]),
            *(
                (name, ("--model", "test_vit"), [name])
                for name in ("junk.pth", "junk.safetensors", "zero.safetensors", "cut.safetensors")
            ),
            ("zero.pth", ("--model", "test_vit"), ["zero.pth"]),
            ("texts.txt", ("--model", "test_vit"), ["texts.txt", "not a file of weights"]),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, *arguments, words=words)

    def test_commands_without_the_option_name_what_works(self, cli):
        error = cli("cost", "weights.safetensors").err
        assert "--model pvt_v2_b0 with convert" in error
        how = ("--model", "test_vit", "--attention", "softmax")
        assert cli("convert", "weights.safetensors", "out.safetensors", *how).status == 0
        for remedy in ("out.safetensors", "test_vit"):
            assert cli("cost", remedy, "--resolution", 160).status == 0

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
            with open(evil, "wb") as file:
                pickle.dump(content, file, protocol=2)
            self._try(cli, name, options)
            torch.save(content, evil)
            self._try(cli, name, options)
            assert not trace.exists()
            torch.load(io.BytesIO(evil.read_bytes()), weights_only=False)
            assert trace.exists()  # it would have run
            trace.rmdir()
        assert not (tmp_path / "out.safetensors").exists()

    @staticmethod
    def _try(cli, name, options):
        # How it is refused is another test's business.
        with contextlib.suppress(RuntimeError, UserWarning, pickle.UnpicklingError, SafetensorError):
            assert cli("convert", name, "out.safetensors", *options).status == 2

    @pytest.mark.parametrize("name", ["evil.pth", "folder"])
    def test_code_is_refused_in_one_line(self, refused, tmp_path, name):
        evil = tmp_path / name
        if name == "folder":
            shutil.copytree(tmp_path / "config_only", evil)
            evil = evil / "pytorch_model.bin"
        torch.save({"model": Touch("trace")}, evil)
        refused(name, *(() if name == "folder" else ("--model", "test_vit")), words=name)

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

    def test_an_unknown_architecture(self, refused, tmp_path):
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, vocab_size=9, bos_token_id=1, eos_token_id=1
        )
        transformers.GPT2Model(config).save_pretrained(tmp_path / "gpt")
        refused("gpt", words=["GPT2Attention", "cannot be converted", "decoders"])

    def test_damaged_weights(self, refused, folder):
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:-50])
        refused("model", words="model")

    def test_weights_of_another_size(self, refused, folder):
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 48}
        (folder / "config.json").write_text(json.dumps(config))
        refused("model", words="model")

    def test_weights_under_other_names(self, refused, folder):
        weights = load_file(folder / "model.safetensors")
        save_file({f"x.{k}": v for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        refused("model", words="model")

    def test_a_classifier_keeps_its_head(self, convert, tmp_path):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
        model.save_pretrained(tmp_path / "classifier")
        done = convert("classifier")
        assert hasattr(done.model, "classifier") or any("classifier" in note for note in done.facts["notes"])

    def test_our_own_folder_cut_short(self, refused, things, tmp_path):
        shutil.copytree(things / "our_folder", tmp_path / "model")
        content = (tmp_path / "model" / "model.safetensors").read_bytes()
        (tmp_path / "model" / "model.safetensors").write_bytes(content[:-50])
        refused("model", words="truncated")


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
        assert cli("simulate", "model", model, "--compare", "native,eco").status == 0

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
        assert "no layer of gpt" in cli("simulate", "model", "gpt").err
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


@pytest.mark.parametrize("reachable", [True, False])
def test_pretrained_weights_are_not_asked_for_again_and_again_without_a_network(monkeypatch, reachable):
    def connect(address, timeout):
        assert timeout < 10
        if not reachable:
            raise OSError("no route to host")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setattr(sources.socket, "create_connection", connect)
    sources._check_network()
    assert huggingface_hub.constants.HF_HUB_OFFLINE is not reachable
