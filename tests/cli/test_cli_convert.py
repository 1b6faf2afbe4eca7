"""`ecoformer convert`: from all that a user may name into a file that loads, or one line on why not."""

import argparse
import contextlib
import functools
import io
import json
import os
import pathlib
import pickle
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ecoformer
from ecoformer import hashers_of
from ecoformer.cli import main
from ecoformer.conversion.layers import find_layers

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
PIL_Image = pytest.importorskip("PIL.Image")
from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SMALL = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1), "num_classes": 5}
TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 20, "pad_token_id": 0}
VISION = {key: TEXT[key] for key in list(TEXT)[1:5]} | {"image_size": 32, "patch_size": 8}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(ord("a") + i) for i in range(26))]
OF_PYRAMID = [f"stages.{stage}.blocks.0.attn" for stage in range(4)]
OF_BERT = [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
QUICK = ("--set", "bits=2", "--set", "support=3")
"""For fitting within a second."""


def released(**kwargs):
    """A state dict in the authors' layout; the helper lies with the loader's tests."""
    path = pathlib.Path(__file__).parents[1] / "checkpoints" / "released.py"
    return runpy.run_path(str(path))["state_dict"]("pvt_v2_b0", num_classes=7, seed=1, **kwargs)


class Touch:
    """A pickle that would create a folder when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr("socket.socket.connect", forbidden)
    monkeypatch.setattr("socket.getaddrinfo", forbidden)


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
    whole = (folder / "ours.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture
def cli(things, tmp_path, monkeypatch, capsys):
    """Runs the command in a folder that holds only links to the things; gives status, stdout, stderr."""
    for thing in things.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["ecoformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(status=end.value.code or 0, out=out, err=err)

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
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith("ecoformer: ")
        assert done.err.endswith("\n")
        assert done.err.count("\n") == 1
        assert "Traceback" not in done.err
        for word in [words] if isinstance(words, str) else words:
            assert word in done.err
        assert sorted(tmp_path.rglob("*")) == before
        return done.err

    return run


def kinds(model):
    return {found.name: found.kind for found in find_layers(model)}


def names(layers):
    return [layer["name"] for layer in layers]


def same_state(one, two):
    one, two = (m if isinstance(m, dict) else m.state_dict() for m in (one, two))
    return one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())


class TestWhatIsWritten:
    def test_a_timm_model_as_a_person_sees_it(self, cli):
        done = cli("convert", "pvt_v2_b0", "eco.safetensors", "--attention", "eco")
        lines = done.out.splitlines()
        assert (done.status, done.err) == (0, "")
        assert lines[0] == "PyramidVisionTransformerV2: 6 of 8 attention layers are eco now"
        assert "left as they were" in lines
        assert "  stages.3.blocks.1.attn  Attention: last stage (256 channels)" in lines
        assert any(line.startswith("note: hash functions are not fitted: --fit takes") for line in lines)
        assert "note: the weights of pvt_v2_b0 are random: --pretrained starts from timm's" in lines
        assert lines[-1] == "wrote eco.safetensors"
        model = ecoformer.load("eco.safetensors")
        assert [kind == "eco" for kind in kinds(model).values()] == [True] * 6 + [False] * 2
        assert not any(hasher.fitted for hasher in hashers_of(model).values())

    def test_json_and_nothing_else(self, convert):
        done = convert("ours.safetensors", "--set", "bits=8")
        assert set(done.facts) == {
            *("model", "mechanism", "config", "replaced", "left", "notes", "source", "fitted", "written")
        }
        assert done.facts["model"] == "EcoPyramidVisionTransformerV2"
        assert (done.facts["mechanism"], done.facts["config"]) == ("eco", {"bits": 8})
        assert names(done.facts["replaced"]) == OF_PYRAMID[:3]
        assert done.facts["replaced"][1] == {
            "name": OF_PYRAMID[1],
            "was": "softmax",
            "dim": 16,
            "num_heads": 2,
            "left_behind": [],
        }
        assert done.facts["left"] == [
            {"name": OF_PYRAMID[3], "kind": "Attention", "why": "last stage (32 channels)"}
        ]
        assert done.facts["source"] == "checkpoint ours.safetensors"
        assert done.facts["fitted"] == []
        assert done.facts["written"] == "out.safetensors"
        assert any("--fit takes a folder of images" in note for note in done.facts["notes"])
        assert not any("random" in note for note in done.facts["notes"])

    @pytest.mark.parametrize(
        ("source", "arguments", "what", "layers"),
        [
            ("test_vit", (), "timm model test_vit", [f"blocks.{i}.attn" for i in range(6)]),
            ("ours.safetensors", (), "checkpoint ours.safetensors", OF_PYRAMID[:3]),
            ("our_folder", (), "checkpoint our_folder/", OF_PYRAMID[:3]),
            ("released.pth", (), "released checkpoint released.pth", OF_PYRAMID[:3]),
            *(
                (
                    name,
                    ("--model", "test_vit"),
                    f"timm model test_vit with the weights of {name}",
                    [f"blocks.{i}.attn" for i in range(6)],
                )
                for name in ("weights.pth", "weights.safetensors")
            ),
            ("bert", (), "transformers model bert/", OF_BERT),
            ("bert_with_words/", (), "transformers model bert_with_words/", OF_BERT),
            ("vit", (), "transformers model vit/", ["layers.0.attention", "layers.1.attention"]),
        ],
    )
    def test_every_source(self, convert, source, arguments, what, layers):
        done = convert(source, "--attention", "performer", *arguments)
        assert done.facts["source"] == what
        assert names(done.facts["replaced"]) == layers
        found = kinds(done.model)
        assert [name for name, kind in found.items() if kind == "performer"] == layers
        assert [name for name in found if name not in layers] == names(done.facts["left"])
        random = [note for note in done.facts["notes"] if "random" in note]
        assert bool(random) == (source == "test_vit")
        assert not done.model.training

    def test_weights_are_those_of_the_source(self, convert):
        source = ecoformer.load("ours.safetensors")
        ours = convert("ours.safetensors", "--layers", "stages.3.*", "--attention", "softmax").model
        x = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), source(x))
        weights = load_file("weights.safetensors")
        for name in ("weights.pth", "weights.safetensors"):
            model = convert(name, "--model", "test_vit", "--attention", "softmax", out=f"2{name[-3:]}").model
            inner = model.blocks[3].attn.attention
            assert torch.equal(inner.qkv.weight, weights["blocks.3.attn.qkv.weight"])
            assert torch.equal(model.head.weight, weights["head.weight"])
        bert = convert("bert", "--attention", "softmax", out="3.safetensors").model
        words = torch.randint(5, 31, (2, 9))
        with torch.no_grad():
            expected = transformers.BertModel.from_pretrained("bert").eval()(words).last_hidden_state
            torch.testing.assert_close(bert(words).last_hidden_state, expected)

    def test_a_released_model_keeps_what_is_not_chosen(self, convert):
        done = convert("released.pth", "--attention", "softmax", "--layers", "stages.0.*")
        source = ecoformer.load_official("released.pth")
        assert list(kinds(done.model).values()) == ["softmax", "eco", "eco", "Attention"]
        assert len(hashers_of(done.model)) == 2
        for name, hasher in hashers_of(done.model).items():
            assert hasher.fitted
            assert torch.equal(hasher.weight, source.get_submodule(name).weight)

    def test_there_and_back_again(self, convert):
        convert("ours.safetensors", "--attention", "performer", out="1.safetensors")
        done = convert("1.safetensors", "--attention", "softmax", out="2.safetensors")
        assert {layer["was"] for layer in done.facts["replaced"]} == {"performer"}
        assert same_state(done.model, ecoformer.load("ours.safetensors"))

    def test_a_checkpoint_that_was_saved_with_arguments(self, convert):
        model = timm.create_model("pvt_v2_b0", **SMALL)
        ecoformer.save(model, "with.safetensors", arguments=SMALL)
        assert names(convert("with.safetensors").facts["replaced"]) == OF_PYRAMID[:3]

    def test_a_path_with_blanks_and_brackets(self, convert, tmp_path):
        (tmp_path / "my [v2] models").mkdir()
        done = convert("ours.safetensors", out="my [v2] models/é.safetensors")
        assert done.facts["written"] == "my [v2] models/é.safetensors"
        assert convert("my [v2] models/é.safetensors").facts["source"] == "checkpoint é.safetensors"

    def test_what_was_written_can_be_read_whatever_its_name(self, convert):
        for out in ("eco", "eco.pth"):
            convert("ours.safetensors", out=out)
            assert convert(out, "--attention", "softmax").facts["source"] == f"checkpoint {out}"
            pathlib.Path("out.safetensors").unlink()


class TestOut:
    def test_is_not_overwritten_unasked(self, refused, tmp_path):
        (tmp_path / "out.safetensors").write_text("precious")
        refused("ours.safetensors", words=["out.safetensors", "--force"])
        assert (tmp_path / "out.safetensors").read_text() == "precious"

    def test_force(self, convert, tmp_path):
        (tmp_path / "out.safetensors").write_text("old")
        assert kinds(convert("ours.safetensors", "--force").model)[OF_PYRAMID[0]] == "eco"

    @pytest.mark.parametrize(
        "arguments",
        [
            ("missing.pth",),
            ("ours.safetensors", "--layers", "nothing.*"),
            ("ours.safetensors", "--set", "bits=0"),
            ("ours.safetensors", "--fit", "empty"),
        ],
    )
    def test_a_failure_leaves_the_old_one(self, refused, tmp_path, arguments):
        (tmp_path / "out.safetensors").write_text("old")
        refused(*arguments, "--force", words="")
        assert (tmp_path / "out.safetensors").read_text() == "old"

    def test_may_be_in(self, convert, tmp_path):
        shutil.copy("ours.safetensors", "model.safetensors")
        done = convert("model.safetensors", "--force", out="model.safetensors")
        assert kinds(done.model)[OF_PYRAMID[0]] == "eco"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def test_needs_its_folder(self, refused):
        refused("ours.safetensors", out="nowhere/out.safetensors", words="no folder nowhere")

    def test_is_no_folder(self, refused, tmp_path):
        (tmp_path / "out").mkdir()
        refused("ours.safetensors", out="out", words="out")
        refused("ours.safetensors", "--force", out="out", words="is a folder")

    def test_a_folder_is_not_to_be_forced(self, refused, tmp_path):
        (tmp_path / "out").mkdir()
        assert "--force" not in refused("ours.safetensors", out="out", words="folder")

    def test_a_folder_is_noticed_first(self, refused, tmp_path, monkeypatch):
        def never(*args, **kwargs):
            raise AssertionError("the model was opened")

        monkeypatch.setattr(sys.modules["ecoformer.cli.convert"], "open_model", never)
        (tmp_path / "out").mkdir()
        refused("ours.safetensors", "--force", out="out", words="folder")


class TestSources:
    @pytest.mark.parametrize(
        ("source", "arguments", "words"),
        [
            ("missing.pth", (), "no file missing.pth"),
            ("missing.safetensors", (), "no file missing.safetensors"),
            ("some/where", (), "no file some/where"),
            ("empty", (), ["empty", "config.json"]),
            ("config_only", (), ["config_only", "model.safetensors"]),
            ("pvt_v2_b9", (), ["'pvt_v2_b9'", "did you mean", "pvt_v2_b"]),
            ("qqqqqqqq", (), ["'qqqqqqqq'", "timm.list_models()"]),
            ("test_resnet", (), ["ResNet", "no attention layer"]),
            ("weights.pth", (), ["weights.pth", "--model"]),
            ("weights.safetensors", (), ["weights.safetensors", "no ecoformer config"]),
            ("weights.pth", ("--model", "test_vit9"), ["'test_vit9'", "did you mean", "test_vit"]),
            ("weights.pth", ("--model", "test_vit2"), ["weights.pth", "does not fit test_vit2"]),
            ("weights.safetensors", ("--model", "test_resnet"), ["does not fit test_resnet"]),
            ("released.pth", ("--model", "test_vit"), ["released.pth", "does not fit test_vit"]),
            ("junk.pth", (), ["junk.pth", "cannot be read"]),
            ("junk.safetensors", (), ["junk.safetensors", "not a safetensors file"]),
            ("zero.pth", (), "zero.pth"),
            ("zero.safetensors", (), ["zero.safetensors", "empty"]),
            ("cut.safetensors", (), ["cut.safetensors", "truncated"]),
            ("texts.txt", (), ["texts.txt", "cannot be read"]),
            *(
                (name, ("--model", "test_vit"), [name])
                for name in ("junk.pth", "junk.safetensors", "zero.safetensors", "cut.safetensors")
            ),
            ("zero.pth", ("--model", "test_vit"), ["zero.pth"]),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, *arguments, words=words)

    def test_weights_in_safetensors_hint_at_the_option_too(self, refused):
        refused("weights.safetensors", words="--model")

    def test_a_hint_is_a_sentence_of_its_own(self, refused):
        error = refused("junk.pth", words=" Weights of a timm model need its name: --model")
        assert error[: error.index(" Weights of a timm")].endswith(".")

    def test_a_misfit_is_told_briefly(self, refused):
        assert len(refused("weights.pth", "--model", "pvt_v2_b0", words="does not fit")) < 1000

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
    @pytest.mark.parametrize("name", ["evil.pth", "evil.bin", "evil.safetensors", "folder"])
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_code_in_a_pickle_never_runs(self, cli, tmp_path, name, options, protocol):
        trace, evil = tmp_path / "trace", tmp_path / name
        if name == "folder":
            shutil.copytree(tmp_path / "config_only", evil)
            evil = evil / "pytorch_model.bin"
        for content in (Touch(trace), {"model": {"head.weight": Touch(trace)}}):
            with open(evil, "wb") as file:
                pickle.dump(content, file, protocol=protocol)
            self._try(cli, name, options)
            torch.save(content, evil, pickle_protocol=protocol)
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
            assert cli("convert", name, "out.safetensors", *options).status == 1

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
        refused("gpt", words=["GPT2Attention", "cannot be converted", "register_conversion"])

    def test_damaged_weights(self, refused, folder):
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-50])
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
        whole = (tmp_path / "model" / "model.safetensors").read_bytes()
        (tmp_path / "model" / "model.safetensors").write_bytes(whole[:-50])
        refused("model", words="truncated")


class TestLayers:
    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [(["all"], [0, 1, 2, 3]), (["stages.[12].*"], [1, 2]), (["stages.0.*", "stages.3.*"], [0, 3])],
    )
    def test_are_chosen(self, convert, patterns, chosen):
        arguments = [part for pattern in patterns for part in ("--layers", pattern)]
        done = convert("ours.safetensors", "--attention", "performer", *arguments)
        assert names(done.facts["replaced"]) == [OF_PYRAMID[i] for i in chosen]
        assert [kind == "performer" for kind in kinds(done.model).values()] == [i in chosen for i in range(4)]
        assert all(layer["why"] == "not chosen" for layer in done.facts["left"])

    @pytest.mark.parametrize("patterns", [["stages.9.*"], ["all", "stages.9.*"]])
    def test_no_match(self, refused, patterns):
        arguments = [part for pattern in patterns for part in ("--layers", pattern)]
        refused("ours.safetensors", *arguments, words=["'stages.9.*'", OF_PYRAMID[0]])


class TestSettings:
    @pytest.mark.parametrize(
        ("source", "local", "size"),
        [("bert", "7", 7), ("ours.safetensors", "3x3", (3, 3)), ("vit", "5X3", (5, 3)), ("bert", "0", None)],
    )
    def test_local(self, convert, source, local, size):
        model = convert(source, "--local", local).model
        layers = [found.layer.attention.local for found in find_layers(model) if found.ours]
        assert layers
        assert [layer and layer.size for layer in layers] == [size] * len(layers)

    @pytest.mark.parametrize("local", ["a", "3x", "x", "3x3x3", "-1", "2.5", ""])
    def test_local_malformed(self, refused, local):
        refused("ours.safetensors", "--local", local, words=["--local takes 7 or 3x3", repr(local)])

    def test_local_with_an_odd_digit(self, refused):
        refused("ours.safetensors", "--local", "3²", words="--local takes 7 or 3x3")

    def test_local_that_cannot_be(self, refused):
        refused("ours.safetensors", "--local", "4", words=["odd", "got 4"])
        refused("bert", "--local", "3x3", words=["local=(3, 3)", "height and width"])

    def test_values_are_numbers_where_they_can_be(self, convert):
        done = convert("ours.safetensors", "--set", "bits=8", "--set", "bias=official", "--set", "support=5")
        assert done.facts["config"] == {"bits": 8, "bias": "official", "support": 5}
        layers = [found.layer.attention for found in find_layers(done.model) if found.ours]
        assert [(layer.bias, layer.hasher.bits) for layer in layers] == [("official", 8)] * 3
        assert all(hasher.support_samples.shape[-2] == 5 for hasher in hashers_of(done.model).values())

    def test_the_last_of_two_counts(self, convert):
        done = convert("ours.safetensors", "--set", "bits=8", "--set", "bits=4")
        assert {hasher.bits for hasher in hashers_of(done.model).values()} == {4}

    @pytest.mark.parametrize("setting", ["bits", "=8", "", "a b=1", "bits.x=1", "--bits=8"])
    def test_malformed(self, refused, setting):
        refused("ours.safetensors", "--set", setting, words=["--set takes KEY=VALUE", repr(setting)])

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("nothing=1", ["'nothing'", "EcoAttention"]),
            ("bits=0", "bits must be at least 1, got 0"),
            ("bits=65", "got 65"),
            ("bias=other", ['"paper"', "'other'"]),
            ("bits=many", ["bits", "'many'"]),
            ("bits=8.5", ["bits must", "8.5"]),
            ("layers=all", ["--set", "--layers"]),
            ("mechanism=softmax", ["--set", "--attention"]),
            ("example=3", ["'example'"]),
        ],
    )
    def test_refused(self, refused, setting, words):
        refused("ours.safetensors", "--set", setting, words=words)

    def test_an_unknown_mechanism(self, refused):
        refused("ours.safetensors", "--attention", "magic", words=["'magic'", "eco", "softmax"])


class TestFitting:
    def test_on_texts(self, convert):
        done = convert("bert_with_words", "--fit", "texts.txt", "--seed", "3", *QUICK)
        hashers = hashers_of(done.model)
        assert done.facts["fitted"] == list(hashers)
        assert [name.removesuffix(".attention.hasher") for name in hashers] == OF_BERT
        assert all(hasher.fitted for hasher in hashers.values())
        assert not any("--fit takes a folder of images" in note for note in done.facts["notes"])
        expected = transformers.BertModel.from_pretrained("bert_with_words").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained("bert_with_words")
        lines = [line for line in pathlib.Path("texts.txt").read_text().split("\n") if line]
        ecoformer.convert(expected, "eco", bits=2, support=3)
        batch = dict(tokenizer(lines, padding=True, return_tensors="pt"))
        assert batch["attention_mask"].min() == 0
        ecoformer.fit_hashers(expected, [batch], seed=3, progress=False)
        assert same_state(done.model, expected)

    def test_on_images(self, convert):
        done = convert("ours.safetensors", "--fit", "photos", *QUICK)
        hashers = hashers_of(done.model)
        assert done.facts["fitted"] == list(hashers)
        assert len(hashers) == 3
        assert all(hasher.fitted for hasher in hashers.values())
        expected = ecoformer.load("ours.safetensors")
        ecoformer.convert(expected, "eco", bits=2, support=3)
        config = timm.data.resolve_model_data_config(expected)
        assert config["input_size"] == (3, 32, 32)
        transform = timm.data.create_transform(**config)
        images = [PIL_Image.open(f"photos/{name}") for name in ("a.png", "b.PNG", "more/c.jpg")]
        ecoformer.fit_hashers(expected, [torch.stack([transform(i) for i in images])], progress=False)
        assert same_state(done.model, expected)

    def test_a_timm_model_by_its_name(self, cli):
        done = cli("convert", "test_vit", "out.safetensors", "--attention", "lsh_eco", "--fit", "photos")
        assert (done.status, done.err) == (0, "")
        assert set(kinds(ecoformer.load("out.safetensors")).values()) == {"lsh_eco"}

    def test_of_what_was_fitted_before(self, convert):
        convert("released.pth", "--attention", "softmax", "--layers", "stages.[01].*", out="1.safetensors")
        done = convert("1.safetensors", "--attention", "eco", *QUICK, out="2.safetensors")
        assert [bool(hasher.fitted) for hasher in hashers_of(done.model).values()] == [False, False, False]
        assert any("not fitted" in note for note in done.facts["notes"])

    def test_the_same_seed_gives_the_same_numbers(self, convert):
        def fit(seed, out):
            return convert("bert_with_words", "--fit", "texts.txt", "--seed", seed, *QUICK, out=out).model

        first = fit(1, "1.safetensors")
        torch.manual_seed(77)
        assert same_state(fit(1, "2.safetensors"), first)
        assert not same_state(fit(2, "3.safetensors"), first)

    def test_samples(self, convert, tmp_path):
        lines = (tmp_path / "texts.txt").read_text().split("\n\n")
        (tmp_path / "six.txt").write_text("\n".join(lines[:6]))
        fit = functools.partial(convert, "bert_with_words", *QUICK)
        six = fit("--fit", "six.txt", out="1.safetensors").model
        assert same_state(six, fit("--fit", "texts.txt", "--samples", 6, out="2.safetensors").model)
        assert not same_state(six, fit("--fit", "texts.txt", "--samples", 7, out="3.safetensors").model)

    @pytest.mark.parametrize(
        ("samples", "told"),
        [("2", "2 samples"), ("64", "3 samples")],
    )
    def test_what_a_person_is_told(self, cli, samples, told):
        done = cli("convert", "ours.safetensors", "o", "--fit", "photos", "--samples", samples, *QUICK)
        assert done.status == 0
        assert f"fitted 3 hashers on {told} of photos" in done.out.splitlines()
        assert "fit_hashers" not in done.out

    def test_random_hash_functions_are_not_told_to_be_fitted(self, convert):
        done = convert("ours.safetensors", "--attention", "lsh_eco", "--fit", "photos")
        assert done.facts["fitted"] == []

    @pytest.mark.parametrize(
        ("source", "arguments", "words"),
        [
            ("ours.safetensors", ["empty"], ["--fit empty", "no image", ".png"]),
            ("ours.safetensors", ["nowhere"], ["--fit", "nowhere"]),
            ("ours.safetensors", ["texts.txt"], ["--fit texts.txt", "folder of images"]),
            ("ours.safetensors", ["photos/a.png"], ["--fit photos/a.png", "folder of images"]),
            ("ours.safetensors", ["photos", "--attention", "softmax"], ["softmax", "no hash functions"]),
            ("bert", ["texts.txt"], ["--fit texts.txt", "bert/", "tokeniser"]),
            ("bert_with_words", ["photos"], ["--fit photos", "images"]),
            ("bert_with_words", ["blank.txt"], ["--fit blank.txt", "no text"]),
            ("bert_with_words", ["texts.txt", "--samples", "1"], ["support=25", "more tokens"]),
            ("vit", ["photos"], ["--fit photos", "vit/", "images"]),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, "--fit", *arguments, words=words)

    @pytest.mark.parametrize(
        ("name", "cut"),
        [("x.png", 0), ("x.png", 200)],
    )
    def test_an_unreadable_image_is_named(self, refused, tmp_path, name, cut):
        (tmp_path / "bad").mkdir()
        whole = (tmp_path / "photos" / "a.png").read_bytes()
        (tmp_path / "bad" / name).write_bytes(whole[:cut] or b"no image")
        refused("ours.safetensors", "--fit", "bad", words=f"bad/{name}")

    def test_a_text_in_another_encoding_is_named(self, refused, tmp_path):
        (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
        refused("bert_with_words", "--fit", "latin.txt", words="latin.txt")

    def test_texts_longer_than_the_model_takes(self, convert, tmp_path):
        (tmp_path / "long.txt").write_text("a b c d e f g h " * 20 + "\n")
        assert convert("bert_with_words", "--fit", "long.txt", *QUICK).facts["fitted"]


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ([], "Missing argument"),
            (["ours.safetensors"], "Missing argument"),
            (["a", "b", "c"], "unexpected extra argument"),
            (["a", "b", "--samples", "0"], "--samples"),
            (["a", "b", "--seed", "x"], "--seed"),
            (["a", "b", "--nothing"], "--nothing"),
            (["a", "b", "--fit"], "--fit"),
        ],
    )
    def test_errors(self, cli, arguments, word):
        done = cli("convert", *arguments)
        assert (done.status, done.out) == (2, "")
        assert word in done.err
        assert "Traceback" not in done.err

    def test_help_shows_an_example(self, cli):
        done = cli("convert", "--help")
        assert (done.status, done.err) == (0, "")
        assert "Example: ecoformer convert pvt_v2_b0 eco_b0.safetensors" in " ".join(done.out.split())
        for option in ("--attention", "--layers", "--local", "--set", "--fit", "--samples", "--seed"):
            assert option in done.out
        for option in ("--model", "--pretrained", "--force", "--json"):
            assert option in done.out

    def test_without_a_command(self, cli):
        assert "convert" in cli().out
        done = cli("transform")
        assert (done.status, done.out) == (2, "")
        assert "No such command 'transform'" in done.err


@pytest.fixture
def program(tmp_path):
    def run(*command):
        return subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run


def test_as_a_module(program, things, tmp_path):
    done = program(
        *(sys.executable, "-m", "ecoformer", "convert"), things / "ours.safetensors", "out", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["written"] == "out"
    assert list(kinds(ecoformer.load(tmp_path / "out")).values())[:3] == ["eco"] * 3


def test_as_a_script_that_fails(program, things, tmp_path):
    script, source = pathlib.Path(sys.executable).with_name("ecoformer"), things / "junk.safetensors"
    done = program(script, "convert", source, "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ecoformer: {source} is not a safetensors file. Weights of a timm model")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
