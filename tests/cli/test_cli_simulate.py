"""`ecoformer simulate` as a user meets it."""

import json
from functools import partial

import pytest

import ecoformer
from ecoformer.models.text import TextEncoder


@pytest.fixture
def cli(run):
    return partial(run, "simulate")


@pytest.fixture
def facts(cli):
    def run(*arguments):
        status, out, err = cli(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


CONV = ("conv", "--in-channels", "64", "--out-channels", "64", "--resolution", "14")


def test_alone_it_shows_its_commands(cli):
    _, out, err = cli()
    for command in ("fc", "conv", "layer", "model", "table"):
        assert command in out + err


def test_a_convolution_keeps_its_size_by_default(facts):
    depthwise = facts(*CONV, "--groups", "64")
    assert depthwise["op"]["padding"] == [1, 1]
    assert depthwise["op"]["groups"] == 64
    assert depthwise["tiling"]["repeats"] == 2
    assert facts(*CONV, "--padding", "0")["op"]["padding"] == [0, 0]
    small, large = facts(*CONV, "--sweep", "resolution=7,14")
    assert (small["resolution"], large["resolution"]) == (7, 14)
    assert small["cycles"] < large["cycles"]


def test_sweeps_of_a_layer(cli, facts):
    rows = facts("layer", "eco", "--batch", "1", "--sweep", "tokens=196,784")
    assert [(row["attention"], row["tokens"]) for row in rows] == [("eco", 196), ("eco", 784)]
    assert 3 < rows[1]["cycles"] / rows[0]["cycles"] < 4.1
    _, out, _ = cli("layer", "--compare", "softmax,eco", "--sweep", "tokens=196,784", "--batch", "1")
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in out.splitlines() if "│" in line]
    assert cells == [["softmax", "196"], ["softmax", "784"], ["eco", "196"], ["eco", "784"]]
    products = facts("fc", "--rows", "16", "--inputs", "32", "--outputs", "32", "--sweep", "outputs=32,3136")
    assert [product["cycles"] for product in products] == [268, 20929]
    _, out, _ = cli("fc", "--rows", "16", "--inputs", "32", "--outputs", "3136")
    assert "20,929 cycles (17,793 of them stalls)" in out
    assert facts("layer", "eco")["cycles"] == 4_236_927


def test_models_side_by_side(cli, facts):
    both = facts("model", "pvt_v2_b0", "--compare", "softmax,eco", "--resolution", "64")
    assert list(both) == ["softmax", "eco"]
    assert both["eco"]["macs"] < both["softmax"]["macs"]
    assert "softmax" in both["eco"]["not_simulated"]
    _, out, _ = cli("model", "pvt_v2_b0", "--compare", "softmax,eco", "--resolution", "64")
    assert "not simulated: normalisation, activations, softmax" in out


def test_a_model_as_it_is_beside_others(facts):
    found = facts("model", "pvt_v2_b0", "--compare", "native,eco", "--resolution", "64")
    assert list(found) == ["native", "eco"]
    alone = facts("model", "pvt_v2_b0", "--resolution", "64")
    assert {"attention": "native"} | found["native"] == alone


def test_a_model_its_parts_and_what_is_left_out(cli):
    status, out, _ = cli("model", "pvt_v2_b0", "--attention", "eco", "--resolution", "64", "--batch", "2")
    assert status == 0
    assert all(f"\n{part}" in out for part in ("attention", "ffn", "other"))
    assert "not simulated: normalisation" in out
    assert "not counted" not in out
    _, out, _ = cli("model", "swin_tiny_patch4_window7_224")
    assert "not counted (Native): layers.0.blocks.0.attn (WindowAttention), " in out


def test_precisions_and_batches_of_a_model(facts):
    model = ("model", "pvt_v2_b0", "--attention", "eco", "--resolution", "64")
    eight, four = facts(*model), facts(*model, "--bits", "4x4")
    assert four["compute_cycles"] < eight["compute_cycles"]
    assert four["macs"] == eight["macs"]
    assert facts(*model, "--code-bits", "8")["dram_bits"] == eight["dram_bits"]
    assert facts(*model, "--code-bits", "1")["dram_bits"] != eight["dram_bits"]
    one, two = facts(*model, "--sweep", "batch=1,2")
    assert two["macs"] == 2 * one["macs"]
    assert two["dram_bits"]["weights"] < 2 * one["dram_bits"]["weights"]


def test_a_text_model(facts, tmp_path):
    path = tmp_path / "text.safetensors"
    ecoformer.save(TextEncoder(attention="eco", length=64, dim=16, hidden=8), path)
    one, two = facts("model", str(path), "--sweep", "tokens=32,64")
    assert (one["tokens"], two["tokens"]) == (32, 64)
    assert one["macs"] == facts("model", str(path), "--tokens", "32")["macs"] < two["macs"]


def test_the_papers_table(cli, facts):
    rows = {row["method"]: row for row in facts("table")}
    assert round(rows["eco"]["energy_nj"], 2) == rows["eco"]["printed_energy"] == 24990.75
    assert rows["performer"]["reading"] == "ours"
    _, out, _ = cli("table")
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "+0.0%" in lines["transformer"]
    assert "the paper's" in lines["eco"]
    assert "57,305.47" in lines["reformer"]
    assert "-80.4%" in lines["reformer"]
    assert "the figures are nJ, of 16 query rows" in out


def test_an_array_of_ones_own(facts, tmp_path):
    path = tmp_path / "array.json"
    path.write_text(json.dumps({"dram_bits_per_cycle": 1920}))
    usual, wide = facts(*CONV), facts(*CONV, "--array", str(path))
    assert wide["stall_cycles"] < usual["stall_cycles"]
    assert wide["array"]["inputs"] == 16


@pytest.mark.parametrize(
    "arguments",
    [
        ("layer", "--compare", "softmax,eco", "--batch", "1"),
        ("model", "pvt_v2_b0", "--attention", "eco", "--resolution", "64"),
        ("table",),
        CONV,
    ],
    ids=lambda arguments: arguments[0],
)
def test_pictures(cli, tmp_path, arguments):
    status, _, err = cli(*arguments, "--figure", str(tmp_path / "a.png"))
    assert (status, err) == (0, f"wrote {tmp_path / 'a.png'}\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("layer", "--sweep", "foo=1"),
            "tokens=1,2,4, whole numbers from 1, got 'foo=1'",
        ),
        (("layer", "--sweep", "tokens=1,x"), "got 'tokens=1,x'"),
        (("layer", "--compare", "softmax,nope"), "unknown attention 'nope'"),
        (("layer", "--compare", ","), "--compare takes names"),
        (("layer", "--array", "none.json"), "none.json"),
        (("layer", "--sweep", "tokens=0"), "whole numbers from 1, got 'tokens=0'"),
        (("layer", "--figure", "a.gif"), "a.gif must end in .png, .svg, .pdf"),
        (("model", "pvt_v2_b9"), "pvt_v2_b9"),
        (("model", "pvt_v2_b0", "--bits", "16x8"), "activation_bits=16 is not a precision of this array"),
        (("model", "pvt_v2_b0", "--code-bits", "9"), "--attention eco"),
        (("model", "pvt_v2_b0", "--attention", "eco", "--compare", "eco"), "exclude each other"),
        (("model", "pvt_v2_b0", "--tokens", "9"), "cannot take an input of (1, 9)"),
        ((*CONV, "--groups", "3"), "in_channels=64 must be a multiple of groups=3"),
        ((*CONV, "--array", "nowhere.json"), "nowhere.json"),
    ],
)
def test_refusals(cli, arguments, words):
    if words == "--attention eco":  # codes of 9 bits are refused only where there are codes
        assert cli(*arguments, "--resolution", "64")[0] == 0
        arguments, words = (*arguments, "--attention", "eco"), "activation_bits=9"
    status, out, err = cli(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("ecoformer: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_array_that_is_no_json(cli, tmp_path):
    (tmp_path / "array.json").write_text("{")
    status, _, err = cli(*CONV, "--array", str(tmp_path / "array.json"))
    assert status == 1
    assert "is not valid JSON" in err
