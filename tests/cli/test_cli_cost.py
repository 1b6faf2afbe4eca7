"""`ecoformer cost` as a user meets it."""

import json
import re

import pytest

import ecoformer
from ecoformer.models.text import TextEncoder


def test_the_paper_s_figure(run):
    status, out, err = run("cost", "pvt_v2_b0", "--attention", "eco", "--resolution", "224", "--json")
    assert (status, err) == (0, "")
    total = json.loads(out)["total"]
    assert (total["mul"], total["add"]) == (535392840, 564786176)
    assert total["energy_pj"] == pytest.approx(2.489261e9, rel=1e-6)


def test_side_by_side(run):
    _, out, _ = run("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--json")
    both = json.loads(out)
    assert both["softmax"]["total"]["mul"] == 2015865904
    assert both["eco"]["total"]["mul"] == 535392840
    _, out, _ = run("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--accounting", "exact")
    assert [row[0] for row in rows_of(out)] == ["native", "softmax", "eco"]


def rows_of(out):
    """The rows of a table, without its head."""
    lines = out.splitlines()
    return [line.split() for line in lines[next(i for i, line in enumerate(lines) if "───" in line) + 1 :]]


def test_settings_go_to_the_mechanisms_that_have_them(run):
    common = ("cost", "pvt_v2_b0", "--compare", "softmax,linformer,eco", "--resolution", "64", "--json")
    few = json.loads(run(*common, "--set", "k=16", "--set", "support=10")[1])
    usual = json.loads(run(*common)[1])
    more = {name: ledger["total"]["mul"] - few[name]["total"]["mul"] for name, ledger in usual.items()}
    rows = 2 * (256 + 2 * 64 + 5 * 16)  # tokens of all heads, two layers a stage
    assert more == {"native": 0, "softmax": 0, "linformer": rows * 240 * 129, "eco": rows * 15 * 18}


def test_sweeps(run):
    _, out, _ = run("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--sweep", "resolution=64,224")
    assert [row[:3] for row in rows_of(out)] == [
        ["softmax", "64", "54.9"],
        ["softmax", "224", "2,016"],
        ["eco", "64", "43.8"],
        ["eco", "224", "535"],
    ]
    points = json.loads(run("cost", "pvt_v2_b0", "--attention", "eco", "--sweep", "support=25", "--json")[1])
    assert points[0] | {"support": 25, "attention": "eco", "mul": 535392840, "uncounted": 0} == points[0]


def test_tokens_of_a_text_model(run, tmp_path):
    path = tmp_path / "text.safetensors"
    ecoformer.save(TextEncoder(attention="softmax", length=64, dim=16, hidden=8), path)
    sweep = ("--attention", "lsh_eco", "--set", "bits=4", "--sweep", "tokens=16,32", "--json")
    one, two = json.loads(run("cost", str(path), *sweep)[1])
    assert (one["tokens"], two["tokens"]) == (16, 32)
    assert one["mul"] < two["mul"] < 2 * one["mul"]  # the head costs the same
    single = json.loads(run("cost", str(path), *sweep[:4], "--tokens", "16", "--json")[1])
    assert single["total"]["mul"] == one["mul"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cost", "pvt_v2_b0", "--attention", "ecoo"), "did you mean 'eco'?"),
        (("cost", "pvt_v2_b0", "--energy", "fp99"), "energy must be one of fp32|fp16"),
        (("cost", "pvt_v2_b0", "--attention", "eco", "--compare", "eco"), "cannot be combined"),
        (("cost", "pvt_v2_bo"), "did you mean pvt_v2_b"),
        (("cost", "pvt_v2_b0", "--resolution", "64", "--tokens", "8"), "cannot be combined"),
        (("cost", "pvt_v2_b0", "--compare", ","), "--compare takes names"),
        (("cost", "pvt_v2_b0", "--attention", "eco", "--set", "bits"), "--set takes KEY=VALUE"),
        (("cost", "pvt_v2_b0", "--attention", "softmax", "--set", "bits=8"), "'bits' of softmax"),
        (
            ("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--set", "bit=8"),
            "did you mean 'bits'?",
        ),
        (("cost", "pvt_v2_b0", "--set", "bits=8"), "needs a mechanism"),
        (("cost", "pvt_v2_b0", "--sweep", "resolution"), "--sweep takes KEY=VALUE,VALUE"),
        (("cost", "pvt_v2_b0", "--sweep", "bits=8"), "needs a mechanism"),
        (("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--sweep", "support=8"), "'support' of softmax"),
        (("cost", "pvt_v2_b0", "--sweep", "resolution=64", "--tokens", "8"), "cannot be combined"),
        (("cost", "pvt_v2_b0", "--sweep", "resolution=64,big"), "positive integers, got '64,big'"),
        (
            ("cost", "pvt_v2_b0", "--on", "bitfusion", "--energy", "7nm"),
            "--on and --energy cannot be combined",
        ),
        (("cost", "pvt_v2_b0", "--on", "bitfusion", "--sweep", "resolution=64,96"), "cannot be combined"),
        (("cost", "pvt_v2_b9", "--on", "bitfusion"), "pvt_v2_b9"),
    ],
)
def test_mistakes(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_on_bitfusion(run):
    model = ("cost", "pvt_v2_b0", "--resolution", "64", "--on", "bitfusion")
    found = json.loads(run(*model, "--compare", "softmax,eco", "--json")[1])
    assert list(found) == ["native", "softmax", "eco"]
    assert found["eco"]["macs"] < found["softmax"]["macs"]
    assert json.loads(run(*model, "--attention", "eco", "--json")[1]) == found["eco"]
    out = run(*model, "--compare", "softmax,eco")[1]
    assert [row[:2] for row in rows_of(out)[:3]] == [[name, f"{r['cycles']:,}"] for name, r in found.items()]
    share = found["eco"]["parts"]["ffn"]["energy_nj"] / found["eco"]["energy_nj"]
    assert re.search(f"energy of eco: attention [0-9]+%, ffn {share:.0%}, other [0-9]+%", out)
    assert "not simulated: normalisation, activations, softmax" in out
    assert "not counted" not in out


def test_what_is_not_counted_is_named_below_the_table(run):
    for options in (("--sweep", "resolution=224"), ("--on", "bitfusion")):
        out = run("cost", "swin_tiny_patch4_window7_224", *options)[1]
        assert "not counted (native): layers.0.blocks.0.attn (WindowAttention), " in out
    assert "not counted" not in run("cost", "pvt_v2_b0", "--compare", "eco", "--resolution", "64")[1]
