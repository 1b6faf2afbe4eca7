"""Complete models: the products of each layer, by hand for small ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.attention import SoftmaxAttention, create_attention
from ecoformer.bitfusion import simulate_model
from ecoformer.operations import Convolution, Counts, Product


def built(name, attention=None, **settings):
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    if attention is not None:
        ecoformer.convert(model, attention, example=torch.zeros(1, 3, 224, 224, device="meta"), **settings)
    return model


def products(model, size, **how):
    """(rows, inner, columns, times) and bits of every product, by layer."""
    found = {}
    for layer in simulate_model(model, size, **how).layers:
        assert all(isinstance(op, Product) for op, _ in layer.work)
        found[layer.name] = [(op.rows, op.inner, op.columns, op.times, *bits) for op, bits in layer.work]
    return found


def test_linear_layers_run_over_all_rows_of_all_samples():
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    found = products(model, (4, 10, 8), bits=(8, 4))
    assert found == {"0": [(40, 8, 24, 1, 8, 4)], "2": [(40, 24, 8, 1, 8, 4)]}
    result = simulate_model(model, (4, 10, 8))
    assert (result.macs, result.uncounted) == (2 * 40 * 8 * 24, ())


class Padding(nn.Conv2d):
    """Pads its input itself."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        (
            nn.Conv2d(4, 8, (3, 5), stride=2, padding=(1, 2), groups=2),
            (2, 4, 16, 12),
            Convolution(2, 4, 8, (16, 12), (8, 6), (3, 5), (2, 2), groups=2),
        ),
        (
            nn.Conv1d(4, 4, 3, padding=1, groups=4),
            (2, 4, 10),
            Convolution(2, 4, 4, (1, 10), (1, 10), (1, 3), groups=4),
        ),
        (Padding(3, 4, 3), (1, 3, 8, 8), Convolution(1, 3, 4, (8, 8), (8, 8), (3, 3))),
        (nn.Conv2d(3, 4, 3, padding="same"), (1, 3, 8, 8), Convolution(1, 3, 4, (8, 8), (8, 8), (3, 3))),
        (
            nn.Sequential(create_attention("eco", 32, 2, local=3)),
            (2, 50, 32),
            Convolution(2, 32, 32, (1, 50), (1, 50), (1, 3), groups=32),
        ),
    ],
)
def test_convolutions(model, size, expected):
    work = [item for layer in simulate_model(model, size).layers for item in layer.work]
    assert [item for item in work if isinstance(item[0], Convolution)] == [(expected, (8, 8))]


def test_projections_stored_as_one_matrix_are_separate_products():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

        def forward(self, x):
            return self.q(x) + self.kv(x)[..., :8]

    assert products(Layer(), (1, 5, 8)) == {"q": [(5, 8, 8, 1, 8, 8)], "kv": [(5, 8, 8, 2, 8, 8)]}


def test_codes_move_as_activations_or_as_what_they_are():
    model = nn.Sequential(create_attention("eco", 32, 2))
    assert products(model, (3, 100, 32), code_bits=1)["0"] == [
        (300, 16, 25, 2, 8, 8),  # hash functions of two heads, over all samples
        (300, 25, 16, 2, 8, 8),
        (16, 100, 16, 6, 1, 8),  # sums and reads of each sample and head
        (100, 16, 16, 6, 1, 8),
        (100, 16, 1, 6, 1, 8),
    ]
    assert products(model, (3, 100, 32), bits=(4, 4), code_bits=2)["0"][2][-2:] == (2, 4)
    assert products(model, (3, 100, 32), bits=(4, 4))["0"][2][-2:] == (4, 4)


def test_softmax_attention_of_each_sample_and_head():
    found = products(nn.Sequential(create_attention("softmax", 32, 2)), (3, 100, 32), bits=(8, 4))
    assert found["0.qkv"] == [(300, 32, 32, 3, 8, 4)]
    # Keys and values are activations, whichever side they are on.
    assert found["0"] == [(100, 16, 100, 6, 8, 8), (100, 100, 16, 6, 8, 8)]


@pytest.mark.parametrize(
    ("name", "settings", "sums"),
    [
        ("softmax", {}, 0),
        ("performer", {"features": 24}, 24),
        ("fp_eco", {"features": 24}, 24),
        ("linformer", {"seq_len": 60, "k": 8}, 0),
        ("reformer", {"bucket_size": 4}, 0),
        ("combiner", {}, 0),
    ],
)
def test_products_are_those_that_run(name, settings, sums):
    """By PyTorch's own counter, less the sum of the keys' features, there a product with a column of ones."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    layer = create_attention(name, 32, 2, **settings).eval()
    heads = torch.randn(3, 2, 60, 16)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        layer.attend(heads, heads, heads, None, False)
    ours = sum(op.macs for op in layer.operations(3, 60) if isinstance(op, Product))
    assert ours == counter.get_total_flops() // 2 - 3 * 2 * 60 * sums


class Doubled(SoftmaxAttention):
    """A user's mechanism."""

    name = "doubled"

    def attend(self, q, k, v, key_padding_mask, is_causal):
        return 2 * super().attend(q, k, v, key_padding_mask, is_causal)


class Described(Doubled):
    """The same, with its operations."""

    name = "described"

    def operations(self, batch, tokens):
        rows = batch * self.num_heads * tokens
        return [*SoftmaxAttention.operations(self, batch, tokens), Counts(mul=rows * self.head_dim)]


def test_a_users_mechanism_is_counted_by_adding_one_method():
    unknown, known = nn.Sequential(Doubled(32, 2)), nn.Sequential(Described(32, 2))
    softmax = nn.Sequential(SoftmaxAttention(32, 2))
    size = (1, 10, 32)
    for uncounted in (simulate_model(unknown, size).uncounted, ecoformer.cost(unknown, size).uncounted):
        assert uncounted == ("0 (doubled)",)
    assert products(known, size) == products(softmax, size)
    assert simulate_model(known, size).uncounted == ecoformer.cost(known, size).uncounted == ()
    extra = Counts(mul=10 * 32)
    assert ecoformer.cost(known, size).total == ecoformer.cost(softmax, size).total + extra
    layer = create_attention("eco", 32, 2)
    layer.hasher.__class__ = type("Mine", (type(layer.hasher),), {"project": lambda *_: None})
    assert simulate_model(nn.Sequential(layer), size).uncounted == ("0 (eco)",)


def test_pyramid_as_it_is_has_reduced_keys():
    layers = {layer.name: layer for layer in simulate_model(built("pvt_v2_b0"), (2, 3, 224, 224)).layers}
    attention = layers["stages.0.blocks.0.attn"]
    assert attention.part == "attention"
    assert [op for op, _ in attention.work] == [Product(3136, 32, 49, 2), Product(3136, 49, 32, 2)]
    depthwise = layers["stages.0.blocks.0.mlp.dwconv"]
    assert depthwise.part == "ffn"
    assert depthwise.work[0][0].groups == 256


def test_parts_and_layers_sum_to_the_total():
    result = simulate_model(built("pvt_v2_b0", "eco", local=(3, 3)), (1, 3, 224, 224))
    facts = result.to_dict()
    for key in ("cycles", "energy_nj"):
        assert sum(part[key] for part in facts["parts"].values()) == pytest.approx(facts[key])
        assert sum(layer[key] for layer in facts["layers"]) == pytest.approx(facts[key])
    assert "softmax" in facts["not_simulated"]
    local = next(layer for layer in result.layers if layer.kind == "LocalBranch")
    assert local.work[0][0] == Convolution(1, 32, 32, (56, 56), (56, 56), (3, 3), groups=32)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(create_attention("eco", 32, 2, local=(3, 3)), nn.Dropout())
    with pytest.raises(ValueError, match=r"Sequential cannot take an input of \(1, 9, 32\): local=\(3, 3\)"):
        simulate_model(model, (1, 9, 32))
    assert not model[0].local._forward_pre_hooks
    assert model.training


def test_a_model_without_products_is_refused():
    with pytest.raises(ValueError, match="BitFusion simulates no layer of Sequential"):
        simulate_model(nn.Sequential(nn.ReLU()), (1, 9, 32))
