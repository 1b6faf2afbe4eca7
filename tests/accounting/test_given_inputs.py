"""What `cost` takes as an input, and what it says of one that a model does not take."""

import copy

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.models.text import TextEncoder


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))


IDS = torch.ones(2, 12, dtype=torch.long)


@pytest.mark.parametrize("accounting", ["paper", "exact"])
@pytest.mark.parametrize("mechanism", [None, "eco"])
def test_a_mask_that_hides_nothing_costs_nothing(bert, accounting, mechanism):
    model = copy.deepcopy(bert)
    if mechanism is not None:
        ecoformer.convert(model, mechanism)
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    found = ecoformer.cost(model, given, accounting=accounting)
    assert found.total == ecoformer.cost(model, {"input_ids": IDS}, accounting=accounting).total


def test_a_mask_that_models_look_at(bert):
    mask = torch.ones_like(IDS)
    mask[:, 7:] = 0
    with pytest.raises(ValueError, match="without a mask") as caught:
        ecoformer.cost(bert, {"input_ids": IDS, "attention_mask": mask})
    message = str(caught.value)
    assert "of {input_ids: (2, 12), attention_mask: (2, 12)}: " in message
    assert "\n" not in message


def test_a_mask_that_a_model_needs_is_given_to_it():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask

    given = {"x": torch.zeros(2, 4), "mask": torch.ones(2, 1)}
    assert ecoformer.cost(Masked(4, 4), given, accounting="exact").total.mul == 32 + 8


@pytest.mark.parametrize(
    ("build", "given", "remedy"),
    [
        (lambda: TextEncoder(length=16), (1, 3, 8, 8), "--tokens 128"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 9, dtype=torch.long), "--resolution 224"),
        (lambda: nn.Linear(4, 4), 224, "cannot take an input of 224: "),
    ],
    ids=["text", "image", "number"],
)
def test_what_to_do(build, given, remedy):
    with pytest.raises(ValueError, match="cannot take an input") as caught:
        ecoformer.cost(build(), given)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
