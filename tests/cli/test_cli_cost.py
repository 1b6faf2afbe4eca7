"""`ecoformer cost` and `ecoformer simulate` as a user meets them."""

import json
import sys

import pytest

from ecoformer.cli import main


@pytest.fixture
def cli(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ecoformer", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_the_paper_s_figure(cli):
    status, out, err = cli("cost", "pvt_v2_b0", "--attention", "eco", "--resolution", "224", "--json")
    assert (status, err) == (0, "")
    total = json.loads(out)["total"]
    assert (total["mul"], total["add"]) == (535392840, 564786176)
    assert total["energy_pj"] == pytest.approx(2.489261e9, rel=1e-6)


def test_side_by_side(cli):
    _, out, _ = cli("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--json")
    both = json.loads(out)
    assert both["softmax"]["total"]["mul"] == 2015865904
    assert both["eco"]["total"]["mul"] == 535392840
    _, out, _ = cli("cost", "pvt_v2_b0", "--compare", "softmax,eco", "--accounting", "exact")
    assert [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")] == [
        "softmax",
        "eco",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cost", "pvt_v2_b0", "--attention", "ecoo"), "did you mean 'eco'?"),
        (("cost", "pvt_v2_b0", "--accounting", "rough"), 'must be "paper" or "exact"'),
        (("cost", "pvt_v2_b0", "--energy", "fp99"), "energy must be one of fp16-45nm"),
        (("cost", "pvt_v2_b0", "--attention", "eco", "--compare", "eco"), "exclude each other"),
        (("cost", "pvt_v2_bo"), "did you mean pvt_v2_b"),
        (
            ("simulate", "fc", "--rows", "16", "--inputs", "8", "--outputs", "8", "--bits", "8"),
            "--bits takes",
        ),
        (
            ("simulate", "fc", "--rows", "16", "--inputs", "8", "--outputs", "8", "--bits", "16x8"),
            "precision",
        ),
        (("simulate", "fc", "--rows", "0", "--inputs", "8", "--outputs", "8"), "rows"),
        (("simulate", "layer", "performer"), "softmax or eco"),
    ],
)
def test_mistakes(cli, arguments, message):
    status, out, err = cli(*arguments)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_simulated(cli):
    operation = ("--rows", "16", "--inputs", "32", "--outputs", "3136", "--bits", "8x8")
    facts = json.loads(cli("simulate", "fc", *operation, "--json")[1])
    assert facts["cycles"] == 20929
    assert facts["energy_nj"] == pytest.approx(62413.16, rel=1e-6)
    assert "20,929 cycles (17,793 of them stalls)" in cli("simulate", "fc", *operation)[1]
    assert json.loads(cli("simulate", "layer", "eco", "--json")[1])["cycles"] == pytest.approx(
        4.24e6, rel=1e-3
    )
