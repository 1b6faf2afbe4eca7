"""`ecoformer tables` as a user meets it."""

import json
from functools import partial

import pytest


@pytest.fixture
def cli(run):
    return partial(run, "tables")


def test_for_people(cli):
    status, out, err = cli("cifar100_support_samples")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "m=10 0.53 = 0.55 = 2.46 = 70.73" in lines
    out = cli("bitfusion")[1]
    assert "45770.61 ~ 46840.51" in out
    assert "the figures are nJ" in out


def test_for_machines(cli):
    (table,) = json.loads(cli("operation_energy_45nm", "--json")[1])
    facts = {"row": "fp16_add", "printed": 0.4, "ours": 0.4, "status": "equal"}
    assert facts.items() <= table["cells"][0].items()


def test_figure_2(cli, tmp_path):
    rows = json.loads(cli("figure2", "--json")[1])
    assert [row["model"] for row in rows] == [f"pvt_v2_b{i}" for i in range(5)] * 2
    assert "78.5%" in cli("figure2")[1]
    assert cli("figure2", "--out", "a.png") == (0, "wrote a.png\n", "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bitfusoin",), "'bitfusoin': there are operation_energy_45nm, "),
        (("bitfusion", "--out", "a.png"), "--out draws figure2"),
        (("figure2", "--out", "a.jpg"), "a.jpg must end in .png, .svg, .pdf, got '.jpg'"),
    ],
)
def test_refusals(cli, arguments, words):
    status, out, err = cli(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
