"""`ecoformer convert`: what it writes, and where."""

import os
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
        assert any("hash functions are not fitted" in line for line in lines)
        assert any("the weights of pvt_v2_b0 are random" in line for line in lines)
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
        of_second = {"name": OF_PYRAMID[1], "was": "softmax", "dim": 16, "num_heads": 2, "left_behind": []}
        assert done.facts["replaced"][1] == of_second
        assert names(done.facts["left"]) == OF_PYRAMID[3:]
        assert done.facts["source"] == "checkpoint ours.safetensors"
        assert done.facts["fitted"] == []
        assert done.facts["written"] == "out.safetensors"

    @pytest.mark.parametrize(
        ("source", "arguments", "what", "layers"),
        [
            ("test_vit", (), "timm model test_vit", [f"blocks.{i}.attn" for i in range(6)]),
            ("ours.safetensors", (), "checkpoint ours.safetensors", OF_PYRAMID[:3]),
            ("our_folder", (), "checkpoint our_folder/", OF_PYRAMID[:3]),
            ("released.pth", (), "released checkpoint released.pth", OF_PYRAMID[:3]),
            (
                "weights.pth",
                ("--model", "test_vit"),
                "timm model test_vit with the weights of weights.pth",
                [f"blocks.{i}.attn" for i in range(6)],
            ),
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

    def test_what_was_written_can_be_read_whatever_its_name(self, convert):
        for out in ("eco.pth", "my [v2] model é"):
            assert convert("ours.safetensors", "--attention", "eco", out=out).facts["written"] == out
            assert convert(out, "--force", "--attention", "softmax").facts["source"] == f"checkpoint {out}"


class TestOut:
    def test_is_not_overwritten_unasked(self, refused, tmp_path):
        (tmp_path / "out.safetensors").write_text("precious")
        refused("ours.safetensors", words=["out.safetensors", "--force"])
        assert (tmp_path / "out.safetensors").read_text() == "precious"

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

    def test_is_no_folder(self, refused, tmp_path):
        (tmp_path / "out").mkdir()
        refused("ours.safetensors", "--force", out="out", words="is a folder")


class TestLayers:
    def test_are_chosen(self, convert):
        arguments = ("--layers", "stages.0.*", "--layers", "stages.3.*")
        done = convert("ours.safetensors", "--attention", "performer", *arguments)
        assert names(done.facts["replaced"]) == [OF_PYRAMID[i] for i in (0, 3)]
        assert [kind == "performer" for kind in kinds(done.model).values()] == [True, False, False, True]


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

    def test_values_are_numbers_where_they_can_be(self, convert):
        settings = [f"--set={setting}" for setting in ("bits=8", "bias=tight", "support=5")]
        done = convert("ours.safetensors", "--attention", "eco", *settings)
        assert done.facts["config"] == {"bits": 8, "bias": "tight", "support": 5}
        assert all(hasher.support_samples.shape[-2] == 5 for hasher in hashers_of(done.model).values())

    @pytest.mark.parametrize("setting", ["bits", "=8", "a b=1"])
    def test_malformed(self, refused, setting):
        refused("ours.safetensors", "--set", setting, words=["--set takes KEY=VALUE", repr(setting)])

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("bit=8", "did you mean 'bits'?"),
            ("bits=0", ["bits", "at least 1, got 0"]),
            ("bits=many", ["bits", "'many'"]),
            ("layers=all", "unknown setting 'layers' of sharp_eco"),
        ],
    )
    def test_refused(self, refused, setting, words):
        refused("ours.safetensors", "--set", setting, words=words)


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ([], "Missing argument"),
            (["a", "b", "--samples", "0"], "--samples"),
            (["a", "b", "--nothing"], "--nothing"),
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
        assert {"--attention", "--data", "--teach", "--force"} <= set(done.out.split())


def test_as_a_program_that_fails(things, tmp_path):
    source = things / "junk.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "ecoformer", "convert", source, "out"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ecoformer: {source} is not a safetensors file")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
