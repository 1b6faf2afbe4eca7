"""`ecoformer bench` as a user meets it."""

import json
import sys
from functools import partial

import pytest

from ecoformer.attention import EcoAttention

QUICK = ("--seconds", "0.01", "--threads", "1")
SMALL = ("--shape", "1,2,50,8")


pytestmark = pytest.mark.usefixtures("old_objects_left_alone")


@pytest.fixture
def cli(run, monkeypatch):
    """With one backend, whatever others this machine has."""
    monkeypatch.setattr("ecoformer.benchmarking.contestants.available", lambda device: ["eager"])
    return partial(run, "bench")


def test_attention(cli):
    status, out, err = cli("attention", *SMALL, "--shape", "2,1,33,8", *QUICK, "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["shape"] for row in rows] == [[1, 2, 50, 8]] * 5 + [[2, 1, 33, 8]] * 5
    assert [row["mechanism"] for row in rows[:5]] == ["softmax", "eco", "performer", "linformer", "reformer"]
    assert rows[1]["ratio_to_sdpa"] == pytest.approx(rows[0]["median_ms"] / rows[1]["median_ms"])


def test_attention_for_people(cli):
    status, out, _ = cli("attention", *SMALL, *QUICK, "--mechanisms", "explicit,eco", "--dtype", "bf16")
    assert status == 0
    assert max(map(len, out.splitlines()[:-1])) <= 100
    assert "(1, 2, 50, 8), bfloat16" in out
    assert "N x N matrix" in out


def test_options_reach_the_run(cli):
    status, out, _ = cli("attention", *SMALL, *QUICK, "--backward", "--causal", "--dtype", "fp16", "--json")
    facts = json.loads(out)
    assert status == 0
    assert {(r["backward"], r["causal"], r["dtype"]) for r in facts["rows"]} == {(True, True, "float16")}
    assert facts["threads"] == 1


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_wrong_result(cli, monkeypatch, form):
    monkeypatch.setattr(EcoAttention, "attend", lambda self, q, k, v, mask, is_causal: v)
    status, out, err = cli("attention", *SMALL, *QUICK, *form)
    assert (status, err) == (1, "")
    assert "wrong result: error" in out
    if form:
        assert json.loads(out)["rows"][1]["median_ms"] is None


def test_the_environment_variable_is_read_and_reported(cli, backend_variable):
    backend_variable("eager")
    status, out, _ = cli("attention", *SMALL, *QUICK, "--mechanisms", "eco", "--json")
    assert status == 0
    assert any("ECOFORMER_BACKEND=eager" in note for note in json.loads(out)["notes"])
    backend_variable("foo")
    status, _, err = cli("attention", *SMALL, *QUICK)
    assert status == 2
    assert "ECOFORMER_BACKEND must be one of eager, cpu, triton, got 'foo'" in err


def test_fp64_is_run_by_eager_alone(cli):
    status, out, _ = cli("attention", *SMALL, *QUICK, "--mechanisms", "eco", "--dtype", "fp64", "--json")
    assert status == 0
    assert [row["backend"] for row in json.loads(out)["rows"]] == ["sdpa", "eager"]


def test_text_model(cli):
    options = ("--tokens", "64", "--batch", "1,2", "--attention", "explicit,eco")
    status, out, err = cli("model", "lra_text", *options, *QUICK, "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["batch"] for row in rows] == [1] * 3 + [2] * 3
    assert all(row["tokens_per_s"] > 0 and row["tokens"] == 64 for row in rows)


def test_image_model(cli):
    pytest.importorskip("timm")
    options = ("--resolution", "32", "--amp", "bf16", "--channels-last", "--train", "--attention", "eco")
    status, out, err = cli("model", "test_vit", *options, *QUICK)
    assert (status, err) == (0, "")
    assert "test_vit, resolution 32, train, channels last, autocast bfloat16, batch 1" in out
    assert "images/s" in out


@pytest.mark.parametrize("command", [("attention", *SMALL), ("model", "lra_text", "--tokens", "32")])
def test_graphs_without_a_gpu(cli, command):
    status, out, err = cli(*command, "--graphs", "--device", "cpu")
    assert (status, out) == (2, "")
    assert "--graphs needs a CUDA device, got cpu" in err


def test_fit(cli):
    status, out, err = cli(
        "fit", "--shape", "2,1,60,8", "--bits", 4, "--support", 9, "--repeats", 1, "--json"
    )
    assert (status, err) == (0, "")
    row = json.loads(out)["rows"][0]
    assert (row["mechanism"], row["backend"], row["bits"], row["support"]) == ("eco", "eager", 4, 9)
    assert row["median_ms"] > 0
    assert row["checked"]["error"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--shape", "1,1,32"), "--shape takes B,H,N,D"),
        (("attention", "--shape", "1,1,x,32"), "--shape takes positive integers"),
        (("attention", "--shape", "1,0,9,32"), "--shape takes positive integers"),
        (
            ("attention", "--mechanisms", "softmax,ecoo"),
            "--mechanisms: unknown attention 'ecoo': did you mean",
        ),
        (("model", "lra_text", "--attention", "xyzzy"), "softmax; also explicit, native"),
        (("model", "test_vit", "--tokens", "64"), "--tokens is for texts"),
        (
            ("attention", "--energy", "--device", "cpu"),
            "zeus is not installed: pip install 'ecoformer[energy]'",
        ),
        (("attention", "--mechanisms", ","), "--mechanisms takes names"),
        (("attention", "--device", "cuda:7"), "--device must be one of cpu, cuda"),
        (("attention", "--device", "tpu"), "--device must be one of cpu, cuda"),
        (
            ("model", "test_vit", "--resolution", "100"),
            "cannot take an input of (1, 3, 100, 100): Input height (100)",
        ),
        (("model", "lra_text", "--batch", "0"), "--batch takes positive integers"),
        (("model", "pvt_v2_bo"), "did you mean pvt_v2_b"),
    ],
)
def test_mistakes(cli, arguments, message):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_timm(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install 'ecoformer[vision]'" in cli("model", "pvt_v2_b0")[2]
    assert cli("attention", *SMALL, *QUICK)[0] == 0
