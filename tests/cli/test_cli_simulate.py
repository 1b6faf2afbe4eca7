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


def test_a_product(cli, facts):
    product = ("fc", "--rows", "16", "--inputs", "32", "--outputs", "3136")
    assert (facts(*product)["cycles"], facts(*product)["stall_cycles"]) == (20929, 17793)
    assert "20,929" in cli(*product)[1]
    assert facts(*product, "--bits", "8x2")["compute_cycles"] < facts(*product)["compute_cycles"]


def test_a_layer(cli, facts):
    assert facts("layer", "--compare", "eco")["eco"]["cycles"] == 4_236_927
    both = facts("layer", "--batch", "1", "--tokens", "196")
    assert list(both) == ["softmax", "eco", "sharp_eco"]
    out = cli("layer", "--batch", "1", "--tokens", "196")[1]
    assert all(f"{total['cycles']:,}" in out for total in both.values())


def test_models_side_by_side(cli, facts):
    model = ("model", "pvt_v2_b0", "--compare", "native,softmax,eco", "--resolution", "64")
    found = facts(*model)
    assert list(found) == ["native", "softmax", "eco"]
    assert found["eco"]["macs"] < found["softmax"]["macs"]
    out = cli(*model)[1]
    assert all(
        f"{part} {each['energy_nj'] / found['eco']['energy_nj']:.0%}" in out
        for part, each in found["eco"]["parts"].items()
    )
    assert "not simulated: normalisation, activations, softmax" in out
    assert "not counted" not in out


def test_what_is_not_counted_is_listed(cli):
    out = cli("model", "swin_tiny_patch4_window7_224")[1]
    assert "not counted (native): layers.0.blocks.0.attn (WindowAttention), " in out


def test_precisions_and_batches_of_a_model(facts):
    def eco(*options):
        return facts("model", "pvt_v2_b0", "--compare", "eco", "--resolution", "64", *options)["eco"]

    eight, four = eco(), eco("--bits", "4x4")
    assert four["compute_cycles"] < eight["compute_cycles"]
    assert four["macs"] == eight["macs"]
    assert eco("--code-bits", "8")["dram_bits"] == eight["dram_bits"]
    assert eco("--code-bits", "1")["dram_bits"] != eight["dram_bits"]
    two = eco("--batch", "2")
    assert two["macs"] == 2 * eight["macs"]
    assert two["dram_bits"]["weights"] < 2 * eight["dram_bits"]["weights"]


def test_a_text_model(facts, tmp_path):
    path = tmp_path / "text.safetensors"
    ecoformer.save(TextEncoder(attention="eco", length=64, dim=16, hidden=8), path)
    one, two = (facts("model", str(path), "--tokens", n)["native"] for n in (32, 64))
    assert one["macs"] < two["macs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("layer", "--compare", "softmax,nope"), "unknown attention 'nope'"),
        (("layer", "--compare", ","), "--compare takes names"),
        (("model", "pvt_v2_b9"), "pvt_v2_b9"),
        (("model", "pvt_v2_b0", "--bits", "8"), "--bits takes activations x weights"),
        (("model", "pvt_v2_b0", "--bits", "16x8"), "activation bits must be at most 8, got 16"),
        (("model", "pvt_v2_b0", "--compare", "eco", "--code-bits", "9"), "activation bits"),
        (("model", "pvt_v2_b0", "--tokens", "9"), "--tokens is for texts"),
        (("model", "pvt_v2_b0", "--tokens", "9", "--resolution", "64"), "cannot be combined"),
    ],
)
def test_refusals(cli, arguments, words):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ecoformer: ")
    assert err.count("\n") == 1
    assert words in err
