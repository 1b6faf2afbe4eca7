"""`ecoformer convert`: what it writes, and where."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import ecoformer
from ecoformer import hashers_of
from ecoformer.conversion.layers import find_layers

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402
from things import (  # noqa: E402
    OF_BERT,
    OF_PYRAMID,
    kinds,
    names,
    same_state,
)


class TestWhatIsWritten:
    def test_a_timm_model_as_a_person_sees_it(self, cli):
        done = cli("convert", "pvt_v2_b0", "eco.safetensors", "--attention", "eco")
        lines = done.out.splitlines()
        assert (done.status, done.err) == (0, "")
        assert lines[0] == "PyramidVisionTransformerV2: 6 of 8 attention layers converted to eco"
        assert "not converted" in lines
        assert "  stages.3.blocks.1.attn  Attention: last stage (256 channels)" in lines
        assert any(line.startswith("note: hash functions are not fitted: --data takes") for line in lines)
        assert "note: the weights of pvt_v2_b0 are random: --pretrained starts from timm's" in lines
        assert lines[-1] == "wrote eco.safetensors"
        model = ecoformer.load("eco.safetensors")
        assert [kind == "eco" for kind in kinds(model).values()] == [True] * 6 + [False] * 2
        assert not any(hasher.fitted for hasher in hashers_of(model).values())

    def test_json_and_nothing_else(self, convert):
        done = convert("ours.safetensors", "--attention", "eco", "--set", "bits=8")
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
        assert any("--data takes a folder of images" in note for note in done.facts["notes"])
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
        assert list(kinds(done.model).values()) == ["softmax", "official_eco", "official_eco", "Attention"]
        assert len(hashers_of(done.model)) == 2
        for name, hasher in hashers_of(done.model).items():
            assert hasher.fitted
            assert torch.equal(hasher.weight, source.get_submodule(name).weight)

    def test_there_and_back_again(self, convert):
        convert("ours.safetensors", "--attention", "performer", out="1.safetensors")
        done = convert("1.safetensors", "--attention", "softmax", out="2.safetensors")
        assert {layer["was"] for layer in done.facts["replaced"]} == {"performer"}
        assert same_state(done.model, ecoformer.load("ours.safetensors"))

    def test_a_path_with_blanks_and_brackets(self, convert, tmp_path):
        (tmp_path / "my [v2] models").mkdir()
        done = convert("ours.safetensors", "--attention", "eco", out="my [v2] models/é.safetensors")
        assert done.facts["written"] == "my [v2] models/é.safetensors"
        assert (
            convert("my [v2] models/é.safetensors", "--attention", "softmax").facts["source"]
            == "checkpoint é.safetensors"
        )

    def test_what_was_written_can_be_read_whatever_its_name(self, convert):
        for out in ("eco", "eco.pth"):
            convert("ours.safetensors", "--attention", "eco", out=out)
            assert convert(out, "--attention", "softmax").facts["source"] == f"checkpoint {out}"
            pathlib.Path("out.safetensors").unlink()


class TestOut:
    def test_is_not_overwritten_unasked(self, refused, tmp_path):
        (tmp_path / "out.safetensors").write_text("precious")
        refused("ours.safetensors", words=["out.safetensors", "--force"])
        assert (tmp_path / "out.safetensors").read_text() == "precious"

    def test_force(self, convert, tmp_path):
        (tmp_path / "out.safetensors").write_text("old")
        assert kinds(convert("ours.safetensors", "--force").model)[OF_PYRAMID[0]] == "sharp_eco"

    @pytest.mark.parametrize(
        "arguments",
        [
            ("missing.pth",),
            ("ours.safetensors", "--layers", "nothing.*"),
            ("ours.safetensors", "--set", "bits=0"),
            ("ours.safetensors", "--data", "empty"),
        ],
    )
    def test_a_failure_leaves_the_old_one(self, refused, tmp_path, arguments):
        (tmp_path / "out.safetensors").write_text("old")
        refused(*arguments, "--force", words="")
        assert (tmp_path / "out.safetensors").read_text() == "old"

    def test_may_be_in(self, convert, tmp_path):
        shutil.copy("ours.safetensors", "model.safetensors")
        done = convert("model.safetensors", "--force", out="model.safetensors")
        assert kinds(done.model)[OF_PYRAMID[0]] == "sharp_eco"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def test_needs_its_folder(self, refused):
        refused("ours.safetensors", out="nowhere/out.safetensors", words="OUT: no such folder")

    def test_is_no_folder(self, refused, tmp_path):
        (tmp_path / "out").mkdir()
        refused("ours.safetensors", out="out", words="out")
        refused("ours.safetensors", "--force", out="out", words="is a folder")


class TestLayers:
    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [(["all"], [0, 1, 2, 3]), (["stages.0.*", "stages.3.*"], [0, 3])],
    )
    def test_are_chosen(self, convert, patterns, chosen):
        arguments = [part for pattern in patterns for part in ("--layers", pattern)]
        done = convert("ours.safetensors", "--attention", "performer", *arguments)
        assert names(done.facts["replaced"]) == [OF_PYRAMID[i] for i in chosen]
        assert [kind == "performer" for kind in kinds(done.model).values()] == [i in chosen for i in range(4)]
        assert all(layer["why"] == "not chosen" for layer in done.facts["left"])

    def test_no_match(self, refused):
        arguments = ("--layers", "all", "--layers", "stages.9.*")
        refused("ours.safetensors", *arguments, words=["'stages.9.*'", OF_PYRAMID[0]])


class TestSettings:
    @pytest.mark.parametrize(
        ("source", "local", "size"),
        [("bert", "7", 7), ("ours.safetensors", "3,3", (3, 3)), ("bert", "0", None)],
    )
    def test_local(self, convert, source, local, size):
        model = convert(source, "--set", f"local={local}").model
        layers = [found.layer.attention.local for found in find_layers(model) if found.ours]
        assert layers
        assert [layer and layer.size for layer in layers] == [size] * len(layers)

    def test_local_that_cannot_be(self, refused):
        refused("ours.safetensors", "--set", "local=4", words=["odd", "got 4"])
        refused("bert", "--set", "local=3,3", words=["local=(3, 3)", "height and width"])

    def test_values_are_numbers_where_they_can_be(self, convert):
        settings = [f"--set={setting}" for setting in ("bits=8", "bias=tight", "support=5")]
        done = convert("ours.safetensors", "--attention", "eco", *settings)
        assert done.facts["config"] == {"bits": 8, "bias": "tight", "support": 5}
        layers = [found.layer.attention for found in find_layers(done.model) if found.ours]
        assert [(layer.bias, layer.hasher.bits) for layer in layers] == [("tight", 8)] * 3
        assert all(hasher.support_samples.shape[-2] == 5 for hasher in hashers_of(done.model).values())

    @pytest.mark.parametrize("setting", ["bits", "=8", "a b=1"])
    def test_malformed(self, refused, setting):
        refused("ours.safetensors", "--set", setting, words=["--set takes KEY=VALUE", repr(setting)])

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("nothing=1", "unknown setting 'nothing' of sharp_eco; choose from attn_drop, bias, bits"),
            ("bit=8", "did you mean 'bits'?"),
            ("bits=0", ["bits", "at least 1, got 0"]),
            ("bits=many", ["bits", "'many'"]),
            ("layers=all", ["--set", "--layers"]),
            ("mechanism=softmax", ["--set", "--attention"]),
            ("example=3", ["--set example"]),
        ],
    )
    def test_refused(self, refused, setting, words):
        refused("ours.safetensors", "--set", setting, words=words)

    def test_an_unknown_mechanism(self, refused):
        refused("ours.safetensors", "--attention", "magic", words=["'magic'", "eco", "softmax"])


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
            (["a", "b", "--data"], "--data"),
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
        assert "Example: ecoformer convert pvt_v2_b0 sharp_b0.safetensors" in " ".join(done.out.split())
        for option in (
            "--attention",
            "--layers",
            "--set",
            "--data",
            "--teach",
            "--steps",
            "--samples",
            "--seed",
        ):
            assert option in done.out
        for option in ("--model", "--pretrained", "--force", "--json"):
            assert option in done.out

    def test_without_a_command(self, cli):
        assert "convert" in cli().out
        done = cli("transform")
        assert (done.status, done.out) == (2, "")
        assert "No such command 'transform'" in done.err


def test_as_a_script_that_fails(things, tmp_path):
    script, source = pathlib.Path(sys.executable).with_name("ecoformer"), things / "junk.safetensors"
    done = subprocess.run(
        [script, "convert", source, "out"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    *starting, error = done.stderr.splitlines()
    assert error.startswith(f"ecoformer: {source} is not a safetensors file")
    assert starting in ([], ["ecoformer: importing PyTorch"])
    assert list(tmp_path.iterdir()) == []
