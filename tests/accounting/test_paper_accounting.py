"""The paper's accounting gives the paper's figures: exact integers, and printed tables to their digits."""

import json

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.accounting import Counts, EnergyTable, cost, energy_table
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")

IMAGE = (1, 3, 224, 224)
# (multiplications, additions) at 224 x 224, 1000 classes, 25 support samples, 16 bits
INTEGERS = {
    ("pvt_v2_b0", "softmax"): (2015865904, 1993315712),
    ("pvt_v2_b0", "eco"): (535392840, 564786176),
    ("pvt_v2_b1", "softmax"): (5019124144, 4996573952),
    ("pvt_v2_b1", "eco"): (2029620424, 2088843392),
    ("pvt_v2_b2", "softmax"): (8640611832, 8604980992),
    ("pvt_v2_b2", "eco"): (3852777536, 3965112192),
    ("pvt_v2_b3", "softmax"): (11861205432, 11823269632),
    ("pvt_v2_b3", "eco"): (6541431056, 6715070592),
    ("pvt_v2_b4", "softmax"): (15972298376, 15927716608),
    ("pvt_v2_b4", "eco"): (9571194156, 9823508288),
    ("twins_svt_small", "softmax"): (5957848896, 5910366720),
    ("twins_svt_small", "eco"): (2718878336, 2808034816),
}
# Attention alone, as printed: multiplications, additions (10^9), energy (10^9 pJ). B4's softmax
# multiplications are printed as 8.63 where the count is 8.638.
ATTENTION = {
    ("pvt_v2_b0", "softmax"): (1.58, 1.56, 7.26),
    ("pvt_v2_b0", "eco"): (0.10, 0.13, 0.50),
    ("pvt_v2_b1", "softmax"): (3.38, 3.36, 15.52),
    ("pvt_v2_b1", "eco"): (0.39, 0.45, 1.84),
    ("pvt_v2_b4", "eco"): (2.24, 2.49, 10.52),
    ("twins_svt_small", "softmax"): (4.01, 3.96, 18.41),
    ("twins_svt_small", "eco"): (0.77, 0.86, 3.63),
}


def build(name, mechanism):
    with torch.device("meta"):
        return timm.create_model(f"ecoformer_{name}", attention=mechanism)


@pytest.mark.parametrize(("name", "mechanism"), INTEGERS)
def test_exact_integers(name, mechanism):
    ledger = cost(build(name, mechanism), IMAGE)
    assert (ledger.total.mul, ledger.total.add) == INTEGERS[name, mechanism]
    assert ledger.uncounted == ()
    assert ledger.energy_pj == pytest.approx(3.7 * ledger.total.mul + 0.9 * ledger.total.add)
    if (name, mechanism) in ATTENTION:
        part = ledger.of("attention")
        ours = (part.mul / 1e9, part.add / 1e9, ledger.energy.energy_pj(part) / 1e9)
        assert tuple(round(x, 2) for x in ours) == ATTENTION[name, mechanism]


@pytest.mark.parametrize(
    ("mechanism", "expected"), [("softmax", (4633133056, 4566024192)), ("eco", (245678080, 288096256))]
)
def test_exact_integers_of_text(mechanism, expected):
    ledger = cost(TextEncoder(attention=mechanism, classes=0), torch.zeros(1, 4096, dtype=torch.long))
    assert (ledger.total.mul, ledger.total.add) == expected


def test_a_converted_model_costs_what_a_built_one_does():
    model = timm.create_model("pvt_v2_b0")
    assert cost(model, IMAGE).total.mul < INTEGERS["pvt_v2_b0", "softmax"][0]  # spatial reduction is cheaper
    ecoformer.convert(model, "softmax")
    total = cost(model, IMAGE).total
    assert (total.mul, total.add) == INTEGERS["pvt_v2_b0", "softmax"]


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
    text = str(ledger)
    assert "total" in text.splitlines()[-1]
    assert f"{ledger.total.mul:,}" in text


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
    with pytest.raises(ValueError, match=r"energy must be one of .* or a JSON file, got 'fp99'"):
        energy_table("fp99")
