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
        assert set(facts) == {"versions", "backends", "mechanisms"}
        assert facts["mechanisms"] == ecoformer.list_attentions()
        assert facts["versions"]["ecoformer"] == ecoformer.__version__
        assert facts["versions"]["torch"] == torch.__version__

    def test_which_backend_runs_and_why(self, info, monkeypatch, backend_variable):
        choice = sys.modules["ecoformer.cli.info"]
        monkeypatch.setattr(choice, "why_not_on", lambda name, device: None)
        monkeypatch.setattr(choice, "available", lambda device: ["cpu", "eager"])
        shown = info()["backends"]
        assert (shown["cpu"], shown["for cpu"]) == ("can run on cpu", "cpu")
        backend_variable("triton")
        assert info()["backends"]["for cpu"] == "eager (ECOFORMER_BACKEND=triton)"
        backend_variable(None)
        monkeypatch.setattr(choice, "why_not_on", lambda name, device: "numba is not installed")
        monkeypatch.setattr(choice, "available", lambda device: ["eager"])
        shown = info()["backends"]
        assert (shown["cpu"], shown["for cpu"]) == ("cannot run: numba is not installed", "eager")

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
