"""`ecoformer info`: the machine without an argument, the attention layers of a model with one."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import ecoformer
import ecoformer.models
from ecoformer.ops import cpu, eager

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from things import SMALL  # noqa: E402

LAYERS = [f"stages.{stage}.blocks.0.attn" for stage in range(4)]


@pytest.fixture
def info(run):
    """What works, as JSON."""

    def command(*arguments):
        done = run("info", *arguments, "--json")
        assert (done.status, done.err) == (0, "")
        return json.loads(done.out)

    return command


@pytest.fixture
def refused(run, tmp_path):
    def command(*arguments, words):
        done = run("info", *arguments)
        assert (done.status, done.out) == (2, "")
        assert re.fullmatch(r"ecoformer: [^\n]+\n", done.err)
        for word in words:
            assert word in done.err
        return done.err

    return command


def pyramid(**kwargs):
    torch.manual_seed(0)
    config = {"bits": 4, "support": 3}
    return timm.create_model("ecoformer_pvt_v2_b0", **SMALL, **{"attention_config": config} | kwargs)


def fitted(model):
    options = ecoformer.FitOptions(steps=2, pairs=2)
    ecoformer.fit_hashers(model, [torch.randn(2, 3, 64, 64)], options=options, progress=False)
    return model


class TestTheMachine:
    def test_json(self, info):
        facts = info()
        assert set(facts) == {"versions", "kernels", "mechanisms"}
        assert facts["mechanisms"] == ecoformer.list_attentions()
        assert facts["versions"]["ecoformer"] == ecoformer.__version__
        assert facts["versions"]["torch"] == torch.__version__

    def test_which_kernels_run_and_why_not(self, info, monkeypatch):
        monkeypatch.setattr("ecoformer.ops.cpu.unavailable", lambda device: None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        shown = info()["kernels"]
        assert shown["cpu"] == "run on cpu"
        assert shown["triton"] == "do not run: no CUDA device"
        monkeypatch.setattr("ecoformer.ops.cpu.unavailable", lambda device: "they were not built")
        assert info()["kernels"]["cpu"] == "do not run: they were not built"

    def test_for_a_person(self, run):
        done = run("info")
        assert (done.status, done.err) == (0, "")
        assert {torch.__version__, ecoformer.__version__} <= set(done.out.split())


class TestAModel:
    def test_layer_by_layer(self, info):
        ecoformer.save(pyramid(), "eco.safetensors")
        facts = info("eco.safetensors")
        assert facts == {
            "model": "checkpoint eco.safetensors",
            "class": "EcoPyramidVisionTransformerV2",
            "parameters": sum(p.numel() for p in pyramid().parameters()),
            "layers": [
                {"name": name, "attention": "eco", "dim": dim, "heads": heads, "bits": 4, "fitted": False}
                for name, dim, heads in zip(LAYERS[:3], (8, 16, 24), (1, 2, 3), strict=True)
            ]
            + [{"name": LAYERS[3], "attention": "Attention", "dim": 32, "heads": 4}],
        }

    def test_for_a_person(self, info, run):
        name = "a_long[v2]_name_of_a_checkpoint.safetensors"
        ecoformer.save(fitted(pyramid(attention_config={"bits": 4, "support": 3, "local": (3, 3)})), name)
        assert [layer.get("local") for layer in info(name)["layers"]] == [*[[3, 3]] * 3, None]
        done = run("info", name, columns=120)
        assert (done.status, done.err) == (0, "")
        *_, rows = done.out.partition(f"checkpoint {name}")
        rows = [re.split(r"\s{2,}", line.strip()) for line in rows.splitlines()[-4:]]
        assert rows[0] == [LAYERS[0], "eco", "8", "1", "4 bits, fitted, local: (3, 3)"]
        assert rows[3] == [LAYERS[3], "Attention", "32", "4"]

    def test_what_cannot_be_converted_says_why(self, info):
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, vocab_size=9, bos_token_id=1, eos_token_id=1
        )
        transformers.utils.logging.disable_progress_bar()
        transformers.GPT2Model(config).save_pretrained("gpt")
        (layer,) = info("gpt")["layers"]
        assert layer["attention"] == "GPT2Attention"
        assert "decoders are not supported" in layer["cannot be converted"]


def test_the_program_tells_its_version_and_commands(run):
    done = run("--version")
    assert (done.status, done.out, done.err) == (0, f"ecoformer {ecoformer.__version__}\n", "")
    done = run("--help")
    assert done.status == 0
    assert {"convert", "info"} <= set(done.out.split())


def test_as_a_program(tmp_path):
    """The machine needs neither timm nor transformers, and JSON is all there is on stdout."""
    code = """
import runpy, sys
sys.modules["timm"] = sys.modules["transformers"] = None
sys.argv[1:] = ["info", "--json"]
runpy.run_module("ecoformer", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["mechanisms"] == ecoformer.list_attentions()


class TestCheck:
    """`--check`: kernels against eager in fp64, on this machine."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(sys.modules["ecoformer.cli.info"], "CHECKS", (((1, 2, 40, 16), 9, False),))

    @pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built")
    def test_right_kernels(self, run):
        done = run("info", "--check", "--json")
        rows = json.loads(done.out)
        assert done.status == 0
        assert [(row["kernels"], row["dtype"]) for row in rows] == [("cpu", "float32"), ("cpu", "bfloat16")]
        assert all(0 < row["error"] < 5e-2 and row["result"] == "right" for row in rows)
        assert "right" in run("info", "--check").out

    def test_wrong_kernels_end_with_status_one(self, run, monkeypatch):
        def wrong(*given):
            out, *others = eager.forward(*given)
            return out * 1.1, *others

        monkeypatch.setattr(cpu, "unavailable", lambda device: None)
        monkeypatch.setattr(cpu, "forward", wrong)
        monkeypatch.setattr(cpu, "backward", eager.backward)
        done = run("info", "--check")
        assert done.status == 1
        assert "wrong" in done.out

    def test_a_machine_without_kernels(self, run, monkeypatch):
        monkeypatch.setattr(sys.modules["ecoformer.cli.info"], "why_not", lambda name, device: "not built")
        done = run("info", "--check")
        assert (done.status, done.out[:19]) == (0, "no kernels can run ")

    def test_it_is_not_about_a_model(self, refused):
        refused("pvt_v2_b0", "--check", words=["--check"])
