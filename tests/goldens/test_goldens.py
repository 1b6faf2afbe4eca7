"""The package still computes what it did before it was rebuilt; `make.py` says how the file was made."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("goldens_make", Path(__file__).with_name("make.py"))
make = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = make
_spec.loader.exec_module(make)

GOLDENS, FACTS = make.load()
CASES = dict(make.cases(GOLDENS))
FAMILIES = dict(make.families())
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}


@pytest.mark.parametrize("case", [name for name in CASES if name != "int8"])
def test_numbers(case):
    found = CASES[case]()
    frozen = {name.rpartition("/")[2]: x for name, x in GOLDENS.items() if name.rpartition("/")[0] == case}
    assert found.keys() == frozen.keys()
    for part, tensor in found.items():
        expected, tolerance = frozen[part], TOLERANCE.get(frozen[part].dtype, 0)
        size = max(expected.double().abs().amax().item(), 1e-3)  # what cancels leaves rounding errors
        found_part = tensor.to(expected.dtype)
        torch.testing.assert_close(
            found_part, expected, rtol=tolerance, atol=tolerance * size, msg=f"{case}/{part} changed"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_in_the_place_of_softmax_changes_nothing(family):
    model, given = FAMILIES[family]()
    with torch.no_grad():
        expected = model(**given)
        make.as_softmax(model)
        found = model(**given)
    if not isinstance(expected, torch.Tensor):
        expected, found = expected[0], found[0]
    if "attention_mask" in given:  # what padding itself holds is nobody's business
        seen = given["attention_mask"].bool()
        expected, found = expected[seen], found[seen]
    if "src_key_padding_mask" in given:
        seen = ~given["src_key_padding_mask"]
        expected, found = expected[seen], found[seen]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_integer_attention_is_within_one_unit_of_its_definition():
    found, exact = make.integers()
    assert found.dtype == torch.int8
    assert exact.abs().amax() > 20
    assert (found.double() - exact).abs().amax() <= 1


def test_logits_in_int8():
    found, frozen = make.int8()["logits"], GOLDENS["int8/logits"]
    assert (found - frozen).norm() < 0.02 * frozen.norm()


def test_autocast_changes_no_more_codes_than_before():
    for mechanism, share in make.equal_codes(GOLDENS).items():
        assert share >= FACTS["equal codes"][mechanism] - 0.01, mechanism


@pytest.mark.parametrize("model", FACTS["paper"])
def test_operations_as_the_paper_counts_them(model):
    assert list(make.paper_cost(*model.split())) == FACTS["paper"][model]


def test_tables_of_the_paper():
    found = make.paper_tables()
    assert found.keys() == FACTS["tables"].keys()
    for name, rows in found.items():
        for (*cell, ours), (*frozen_cell, frozen) in zip(rows, FACTS["tables"][name], strict=True):
            assert cell == frozen_cell
            if frozen is None:
                assert ours is None
                continue
            assert ours == pytest.approx(frozen, rel=1e-9), (name, *cell)


@pytest.mark.parametrize("model", FACTS["figure 2"])
def test_shares_of_figure_2(model):
    assert make.paper_shares(*model.split()) == pytest.approx(FACTS["figure 2"][model], rel=1e-9)


def test_bitfusion():
    for (name, *found), (frozen_name, *frozen) in zip(
        make.bitfusion_table(), FACTS["bitfusion"], strict=True
    ):
        assert name == frozen_name
        assert found == pytest.approx(frozen, rel=1e-9), name
