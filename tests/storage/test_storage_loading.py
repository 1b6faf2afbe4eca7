"""From a file into a model, or not at all."""

from __future__ import annotations

import re

import pytest
import torch
from files import all_bits, refused
from torch import nn

from ecoformer import FitOptions, KernelHasher
from ecoformer.storage import check_fit, load_into, read, write


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Mixed(nn.Module):
    """Floats, integers, booleans, normalisation and a hasher."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.rand(3) < 0.5)
        self.hasher = KernelHasher(2, 4, bits=8, support=5)


def fitted():
    model = Mixed()
    model.hasher.fit(torch.randn(2, 2, 30, 4), options=FitOptions(steps=1))
    return model


def test_values_are_copied_into_the_model_s_own_tensors(path):
    source, model = fitted(), Mixed()
    before = {name: x.data_ptr() for name, x in model.state_dict().items()}
    write(path, source.state_dict(), {})
    load_into(model, read(path)[0], source=str(path))
    assert {name: x.data_ptr() for name, x in model.state_dict().items()} == before
    assert all_bits(model.state_dict()) == all_bits(source.state_dict())
    tokens = torch.randn(1, 2, 6, 4)
    assert torch.equal(model.hasher(tokens), source.hasher(tokens))
    load_into(model, Mixed().state_dict(), source="fresh")
    assert not model.hasher.fitted


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precision_is_fine(dtype):
    model, tensors = nn.Linear(3, 4), nn.Linear(3, 4).to(dtype).state_dict()
    load_into(model, tensors, source="x")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, tensors["weight"].float())


BAD = {
    "missing": (lambda t: t.pop("linear.weight"), r"1 missing \('linear.weight'\)"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(1)), r"1 unexpected \('extra'\)"),
    "shape": (
        lambda t: t.update({"linear.bias": torch.zeros(5)}),
        r"1 of another shape \('linear.bias' \(5,\) instead of \(4,\)\)",
    ),
    "float for bool": (lambda t: t.update(flags=torch.ones(3)), "kind of number .'flags' torch.float32 inst"),
    "int for float": (lambda t: t.update({"linear.bias": torch.ones(4).int()}), "1 of another kind"),
    "float for int": (lambda t: t.update({"norm.num_batches_tracked": torch.tensor(3.0)}), "another kind"),
    "complex": (lambda t: t.update({"linear.bias": torch.ones(4).cfloat()}), "another kind"),
    "all": (lambda t: t.clear(), r"13 missing \('flags', 'linear.weight', 'linear.bias', \.\.\.\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_load_that_fails_leaves_the_model_untouched(case):
    spoil, says = BAD[case]
    model, tensors = fitted(), dict(Mixed().state_dict())
    spoil(tensors)
    before, tokens = all_bits(model.state_dict()), torch.randn(1, 2, 6, 4)
    codes = model.hasher(tokens)
    line = refused(load_into, model, tensors, source="some.safetensors")
    assert line.startswith("some.safetensors does not fit Mixed: ")
    assert re.search(says, line)
    assert all_bits(model.state_dict()) == before
    assert torch.equal(model.hasher(tokens), codes)


def test_fit_is_checked_without_numbers():
    """Of a model on the meta device, whose tensors have no addresses to tell them apart by."""
    model = nn.Sequential(nn.Linear(3, 3), Tied(), nn.Linear(3, 3))
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    before = all_bits(model.state_dict())
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(3, 3), Tied(), nn.Linear(3, 3))
    for fits in (bare, model):
        check_fit(fits, tensors, source="x")
    assert "Sequential is on the meta device" in refused(load_into, bare, tensors, source="x")
    tensors["1.head.weight"] += 1
    for torn in (bare, model):
        line = refused(load_into, torn, tensors, source="x")
        assert "1 tied in the model but not here ('1.embed.weight' and '1.head.weight')" in line
    assert all_bits(model.state_dict()) == before


def test_tied_weights_given_as_equal_copies():
    model = Tied()
    tensors = {name: torch.full_like(x, torch.nan) for name, x in model.state_dict().items()}
    load_into(model, tensors, source="x")
    assert all(x.isnan().all() for x in model.state_dict().values())
    assert model.head.weight is model.embed.weight
