"""The paper's accounting; the integers of all its models are in tests/report/test_tables.py."""

import json

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.accounting import Counts, EnergyTable, cost, energy_table, list_energy_tables
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")

IMAGE = (1, 3, 224, 224)


def build(name, mechanism):
    with torch.device("meta"):
        return timm.create_model(f"ecoformer_{name}", attention=mechanism)


@pytest.mark.parametrize(
    ("mechanism", "expected"), [("softmax", (4633133056, 4566024192)), ("eco", (245678080, 288096256))]
)
def test_exact_integers_of_text(mechanism, expected):
    ledger = cost(TextEncoder(attention=mechanism, classes=0), torch.zeros(1, 4096, dtype=torch.long))
    assert (ledger.total.mul, ledger.total.add) == expected


def test_a_converted_model_costs_what_a_built_one_does():
    model = timm.create_model("pvt_v2_b0")
    assert cost(model, IMAGE).total.mul < 2015865904  # spatial reduction is cheaper
    ecoformer.convert(model, "softmax")
    total = cost(model, IMAGE).total
    assert (total.mul, total.add) == (2015865904, 1993315712)


def test_a_batch_costs_its_samples():
    model = build("pvt_v2_b0", "eco")
    assert cost(model, (3, *IMAGE[1:])).total == cost(model, IMAGE).total * 3


def test_the_model_is_left_as_it_was():
    model = timm.create_model("ecoformer_pvt_v2_b0", depths=(1, 1, 1, 1)).train()
    before = {name: (tensor.clone(), tensor.device) for name, tensor in model.state_dict().items()}
    cost(model, (1, 3, 64, 64))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("attend" in vars(module) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert tensor.device == before[name][1]
        assert torch.equal(tensor, before[name][0])


def test_what_is_unknown_is_told():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    model = nn.Sequential(nn.Linear(4, 4), Odd())
    ledger = cost(model, (2, 4))
    assert ledger.uncounted == ("1 (Odd)",)
    assert "not counted: 1 (Odd)" in str(ledger)


def test_a_mechanism_without_a_rule_is_told():
    class Mine(ecoformer.attention.PerformerAttention):
        name = "mine"

        def attend(self, q, k, v, key_padding_mask, is_causal):
            return v

    ledger = cost(nn.Sequential(Mine(16, 2)), (1, 8, 16))
    assert ledger.uncounted == ("0 (mine)",)
    assert [row.kind for row in ledger.rows] == ["Linear", "Linear"]


def test_an_input_that_the_model_cannot_take():
    model = build("pvt_v2_b0", "eco")
    for accounting in ("paper", "exact"):
        with pytest.raises(ValueError, match=r"^EcoPyramid.* cannot take an input of \(1, 5, 64, 64\): "):
            cost(model, (1, 5, 64, 64), accounting=accounting)
    with pytest.raises(ValueError, match='accounting must be "paper" or "exact"'):
        cost(model, IMAGE, accounting="rough")


def test_forms_of_a_ledger():
    ledger = cost(build("pvt_v2_b0", "eco"), IMAGE)
    facts = json.loads(ledger.to_json())
    assert facts["total"]["mul"] == ledger.total.mul == sum(layer["mul"] for layer in facts["layers"])
    assert facts["total"]["energy_pj"] == pytest.approx(ledger.energy_pj)
    assert sum(facts["shares"].values()) == pytest.approx(1)
    lines = ledger.to_csv().splitlines()
    assert lines[0] == "name,kind,part,mul,add,shift,lookup,compare,exp,bytes,energy_pj"
    assert len(lines) == 1 + len(facts["layers"])
    text = str(ledger)
    assert f"{ledger.total.mul:,}" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_energy_tables(tmp_path):
    counts = Counts(mul=10, add=20, shift=4)
    assert energy_table("fp32-45nm").energy_pj(counts) == pytest.approx(37 + 18 + 4 * 0.13)
    assert energy_table({"mul": 2, "add": 1}).energy_pj(counts) == 40
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"mul": 1, "add": 0}))
    assert energy_table(path) == EnergyTable("own", {"mul": 1, "add": 0})
    for content, message in (
        ("[1]", "must hold a JSON object"),
        ("{", "is not valid JSON"),
        ('{"mul": 1}', "lacks 'add'"),
        ('{"mul": 1, "add": -1}', "add must be a number >= 0"),
        ('{"mul": 1, "add": 1, "mull": 1}', "has 'mull'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            energy_table(path)
    for name in ("fp99", "bf16-45nm", "fp32-45nm-hbm", "fp32-7nm-sram-dram", "7nm-fp32", "fp32"):
        with pytest.raises(ValueError, match=rf"energy must be one of .* or a JSON file, got '{name}'"):
            energy_table(name)


def test_every_process_and_width():
    counts = Counts(mul=100, add=1000, bytes=64)
    found = {name: energy_table(name).energy_pj(counts) for name in list_energy_tables()}
    assert found["fp32-7nm"] == pytest.approx(131 + 380)
    assert found["int8-7nm"] == pytest.approx(7 + 7)
    assert found["bf16-7nm-sram"] == pytest.approx(21 + 110 + 8 * 7.5)
    assert found["fp32-7nm-hbm"] == pytest.approx(131 + 380 + 8 * 250)
    assert found["fp32-45nm-dram"] == pytest.approx(370 + 900 + 8 * 1300)
    assert energy_table("7nm").pj == energy_table("fp32-7nm").pj
    assert energy_table("45nm-dram").pj == energy_table("fp32-45nm-dram").pj
    assert (found["7nm"], found["45nm-dram"]) == (found["fp32-7nm"], found["fp32-45nm-dram"])
    for name in (name for name in found if "7nm" in name and name.replace("7nm", "45nm") in found):
        assert found[name] <= found[name.replace("7nm", "45nm")]
