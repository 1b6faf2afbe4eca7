"""`ecoformer tables` as a user meets it."""

import json
from functools import partial

import pytest


@pytest.fixture
def cli(run):
    return partial(run, "tables")


def test_one_table_for_people(cli):
    status, out, err = cli("cifar100_support_samples")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "m=10 0.53 = 0.55 = 2.46 = 70.73" in lines
    assert "= 12 equal ours is the printed figure, to its last digit" in lines


def test_differences_and_remarks(cli):
    out = cli("bitfusion")[1]
    assert "45770.61 ~ 46840.51" in out
    assert "the figures are nJ" in out


def test_for_machines(cli):
    (table,) = json.loads(cli("operation_energy_45nm", "--json")[1])
    assert (
        table["cells"][0] | {"row": "fp16_add", "printed": 0.4, "ours": 0.4, "status": "equal"}
        == table["cells"][0]
    )


def test_an_unknown_table(cli):
    status, out, err = cli("bitfusoin")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "did you mean 'bitfusion'?" in err
