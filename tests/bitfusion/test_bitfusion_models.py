"""Whole models: the products of each layer, by hand for small ones and by the ledger for large ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.attention import SoftmaxAttention, create_attention
from ecoformer.bitfusion import (
    BitFusion,
    Convolution,
    FullyConnected,
    attention_layer,
    model_work,
    simulate_all,
    simulate_model,
)
from ecoformer.operations import Counts, Product


def built(name, attention=None, **settings):
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    if attention is not None:
        ecoformer.convert(model, attention, example=torch.zeros(1, 3, 224, 224, device="meta"), **settings)
    return model


def layer_of(work, name):
    return next(layer for layer in work.layers if layer.name == name)


def test_linear_layers_run_over_all_rows_of_all_samples():
    work = model_work(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)), (4, 10, 8), bits=(8, 4))
    assert work.work == [(FullyConnected(40, 8, 24, 8, 4), 1), (FullyConnected(40, 24, 8, 8, 4), 1)]
    assert work.macs == 2 * 40 * 8 * 24
    assert work.uncounted == ()


def test_convolutions_of_images_and_of_sequences():
    model = nn.Conv2d(4, 8, (3, 5), stride=2, padding=(1, 2), dilation=1, groups=2)
    expected = Convolution(2, 4, 8, 16, 12, (3, 5), 2, (1, 2), 1, 2)
    assert model_work(model, (2, 4, 16, 12)).work == [(expected, 1)]
    line = model_work(nn.Conv1d(4, 4, 3, padding=1, groups=4), (2, 4, 10)).work
    assert line == [(Convolution(2, 4, 4, 1, 10, (1, 3), 1, (0, 1), 1, 4), 1)]


def test_a_convolution_that_pads_by_itself_is_listed():
    class Padding(nn.Conv2d):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    assert model_work(nn.Sequential(Padding(3, 4, 3)), (1, 3, 8, 8)).uncounted == ("0 (Padding)",)
    same = nn.Conv2d(3, 4, 3, padding="same")
    assert model_work(nn.Sequential(same), (1, 3, 8, 8)).uncounted == ("0 (Conv2d)",)
    assert len(model_work(nn.Conv2d(3, 4, 3, padding="valid"), (1, 3, 8, 8)).work) == 1


@pytest.mark.parametrize("code_bits", [None, 1, 2])
@pytest.mark.parametrize(("mechanism", "cycles"), [("softmax", 288_468), ("eco", 67_316)])
def test_a_layer_and_a_model_of_that_layer_agree(mechanism, cycles, code_bits):
    model = nn.Sequential(create_attention(mechanism, 32, 1))
    of_model = simulate_model(model, (1, 784, 32), code_bits=code_bits).total
    of_layer = simulate_all(attention_layer(mechanism, batch=1, tokens=784, code_bits=code_bits))
    assert of_layer == of_model
    assert (of_layer.cycles == cycles) is (mechanism == "softmax" or code_bits is None)


def test_projections_stored_as_one_matrix_are_separate_products():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

        def forward(self, x):
            return self.q(x) + self.kv(x)[..., :8]

    assert model_work(Layer(), (1, 5, 8)).work == [(FullyConnected(5, 8, 8), 1), (FullyConnected(5, 8, 8), 2)]


def test_codes_move_as_activations_or_as_what_they_are():
    layer = create_attention("eco", 32, 2)
    work = layer_of(model_work(nn.Sequential(layer), (3, 100, 32), code_bits=1), "0").work
    assert work == [
        (FullyConnected(300, 16, 25), 2),  # hash functions of two heads, over all samples
        (FullyConnected(300, 25, 16), 2),
        (FullyConnected(16, 100, 16, 1, 8), 6),  # sums and reads of each sample and head
        (FullyConnected(100, 16, 16, 1, 8), 6),
        (FullyConnected(100, 16, 1, 1, 8), 6),
    ]
    wider = layer_of(model_work(nn.Sequential(layer), (3, 100, 32), bits=4, code_bits=2), "0").work
    assert wider[2] == (FullyConnected(16, 100, 16, 2, 4), 6)
    usual = layer_of(model_work(nn.Sequential(layer), (3, 100, 32), bits=4), "0").work
    assert usual[2] == (FullyConnected(16, 100, 16, 4, 4), 6)


def test_softmax_attention_of_each_sample_and_head():
    layer = create_attention("softmax", 32, 2)
    work = model_work(nn.Sequential(layer), (3, 100, 32), bits=(8, 4))
    assert layer_of(work, "0.qkv").work == [(FullyConnected(300, 32, 32, 8, 4), 3)]
    # Keys and values are activations, whichever side they stand on.
    assert layer_of(work, "0").work == [
        (FullyConnected(100, 16, 100, 8, 8), 6),
        (FullyConnected(100, 100, 16, 8, 8), 6),
    ]


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
    products = [op for op in layer.operations(3, 60) if isinstance(op, Product)]
    ours = sum(op.rows * op.inner * op.columns * op.times for op in products)
    assert ours == counter.get_total_flops() // 2 - 3 * 2 * 60 * sums


@pytest.mark.parametrize(
    ("name", "settings", "hashing"),
    [
        ("klsh_eco", {}, [(FullyConnected(300, 16, 25), 2), (FullyConnected(300, 25, 16), 2)]),
        ("lsh_eco", {"bits": 8}, [(FullyConnected(300, 16, 8), 2)]),
        ("bi_eco", {"bits": 64}, [(FullyConnected(300, 16, 64), 2)]),
        ("bi_eco", {"features": "channels"}, []),
    ],
)
def test_hash_functions(name, settings, hashing):
    layer = create_attention(name, 32, 2, **settings)
    work = layer_of(model_work(nn.Sequential(layer), (3, 100, 32)), "0").work
    assert work[:-3] == hashing
    assert work[-2] == (FullyConnected(100, layer.hasher.bits, 16), 6)


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


def test_a_users_mechanism_is_counted_by_adding_one_method(monkeypatch):
    unknown, known = nn.Sequential(Doubled(32, 2)), nn.Sequential(Described(32, 2))
    softmax = nn.Sequential(SoftmaxAttention(32, 2))
    size = (1, 10, 32)
    assert model_work(unknown, size).uncounted == ecoformer.cost(unknown, size).uncounted == ("0 (doubled)",)
    assert model_work(known, size).work == model_work(softmax, size).work
    assert model_work(known, size).uncounted == ecoformer.cost(known, size).uncounted == ()
    extra = Counts(mul=10 * 32)
    assert ecoformer.cost(known, size).total == ecoformer.cost(softmax, size).total + extra
    monkeypatch.setattr(SoftmaxAttention, "operations", lambda *_: None)
    with pytest.raises(ValueError, match=r"SoftmaxAttention\.operations"):
        attention_layer("softmax")
    layer = create_attention("eco", 32, 2)
    layer.hasher.__class__ = type("Mine", (type(layer.hasher),), {"project": lambda *_: None})
    assert model_work(nn.Sequential(layer), size).uncounted == ("0 (eco)",)


def test_pyramid_as_it_is_has_reduced_keys():
    work = model_work(built("pvt_v2_b0"), (2, 3, 224, 224))
    attention = layer_of(work, "stages.0.blocks.0.attn")
    assert attention.part == "attention"
    assert attention.work == [(FullyConnected(3136, 32, 49), 2), (FullyConnected(3136, 49, 32), 2)]
    depthwise = layer_of(work, "stages.0.blocks.0.mlp.dwconv")
    assert depthwise.part == "ffn"
    assert depthwise.work[0][0].groups == 256


def test_windows_are_counted_as_windows():
    work = model_work(built("twins_svt_small"), (1, 3, 224, 224))
    local = layer_of(work, "blocks.0.0.attn").work
    assert local == [(FullyConnected(49, 32, 49), 64 * 2), (FullyConnected(49, 49, 32), 64 * 2)]


def test_local_branches_are_convolutions():
    from ecoformer.attention.local import LocalBranch

    work = model_work(built("pvt_v2_b0", "eco", local=(3, 3)), (1, 3, 224, 224))
    local = [layer for layer in work.layers if layer.kind == LocalBranch.__name__]
    assert local[0].work == [(Convolution(1, 32, 32, 56, 56, (3, 3), 1, (1, 1), 1, 32), 1)]
    line = model_work(nn.Sequential(create_attention("eco", 32, 2, local=3)), (2, 50, 32))
    assert layer_of(line, "0.local").work == [(Convolution(2, 32, 32, 1, 50, (1, 3), 1, (0, 1), 1, 32), 1)]


def test_parts_and_layers_sum_to_the_whole():
    result = simulate_model(built("pvt_v2_b0", "eco"), (1, 3, 224, 224))
    facts = result.to_dict()
    for key in ("cycles", "energy_nj"):
        assert sum(part[key] for part in facts["parts"].values()) == pytest.approx(facts[key])
        assert sum(layer[key] for layer in facts["layers"]) == pytest.approx(facts[key])
    assert result.total == simulate_all(result.work.work)
    assert "softmax" in facts["not_simulated"]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(create_attention("eco", 32, 2, local=(3, 3)), nn.Dropout())
    model[0].local.train()
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(
        ValueError, match=r"Sequential cannot take an input of \(1, 9, 32\): local=\(3, 3\) needs"
    ):
        model_work(model, (1, 9, 32))
    assert not model[0].local._forward_pre_hooks
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_refusals():
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"activation_bits=16 is not a precision of this array"):
        _ = simulate_model(model, (1, 8), bits=(16, 8)).total
    with pytest.raises(ValueError, match="code_bits must be a whole number from 1, got 0"):
        model_work(model, (1, 8), code_bits=0)
    with pytest.raises(ValueError, match=r"Linear cannot take an input of \(1, 9\)"):
        model_work(model, (1, 9))


def test_an_array_from_a_file():
    assert BitFusion.from_dict(BitFusion(inputs=8).to_dict()) == BitFusion(inputs=8)
    assert BitFusion.from_dict({"energy": {"dram_bit": 4}}).energy.dram_bit == 4
    with pytest.raises(ValueError, match="array has no 'size': it has inputs, outputs"):
        BitFusion.from_dict({"size": 3})
    with pytest.raises(ValueError, match="energy has no 'dram': it has unit_cycle"):
        BitFusion.from_dict({"energy": {"dram": 3}})
    with pytest.raises(ValueError, match=r"array must be an object of .*, got list"):
        BitFusion.from_dict([1])
