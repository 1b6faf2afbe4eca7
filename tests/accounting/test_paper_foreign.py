"""Attention of other libraries in the paper's accounting: by closed formulas, or listed as not counted."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ecoformer
from ecoformer.accounting import Counts, cost

timm = pytest.importorskip("timm")


def attention(tokens, keys, dim, heads):
    pairs = tokens * keys
    return Counts(mul=2 * pairs * dim + heads * pairs, add=2 * pairs * dim)


def products(count):
    return Counts(mul=count, add=count)


def row(ledger, name):
    (found,) = (row for row in ledger.rows if row.name == name)
    return found


@pytest.mark.parametrize(("batch_first", "size"), [(True, (3, 10, 16)), (False, (10, 3, 16))])
def test_pytorchs_own_layer(batch_first, size):
    layer = nn.TransformerEncoderLayer(16, 2, 40, batch_first=batch_first)
    ledger = cost(layer, size)
    assert row(ledger, "self_attn").counts == (attention(10, 10, 16, 2) + products(4 * 10 * 16 * 16)) * 3
    assert {r.name: r.part for r in ledger.rows} == {
        "self_attn": "attention",
        "norm1": "other",
        "linear1": "ffn",
        "linear2": "ffn",
        "norm2": "other",
    }
    assert ledger.uncounted == ()


class Crossing(nn.Module):
    """Keys of another length and width than queries, called by keywords in any order."""

    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, x, other):
        return self.attn(key=other, value=other, query=x)[0]


def test_keys_of_another_sequence():
    inputs = {"x": torch.zeros(3, 10, 16), "other": torch.zeros(3, 7, 12)}
    ledger = cost(Crossing(kdim=12, vdim=12), inputs)
    projections = products(2 * 10 * 16 * 16 + 2 * 7 * 12 * 16)
    assert row(ledger, "attn").counts == (attention(10, 7, 16, 2) + projections) * 3
    assert ledger.uncounted == ()


def test_keys_that_belong_to_the_layer():
    inputs = {"x": torch.zeros(1, 10, 16), "other": torch.zeros(1, 7, 16)}
    plain, more = (
        row(cost(Crossing(**options), inputs), "attn").counts
        for options in ({}, {"add_bias_kv": True, "add_zero_attn": True})
    )
    assert more.mul - plain.mul == attention(10, 9, 16, 2).mul - attention(10, 7, 16, 2).mul


def test_decoders_attend_to_what_encoders_gave():
    model = nn.Transformer(16, 2, 1, 1, 40, batch_first=True)
    ledger = cost(model, {"src": torch.zeros(1, 7, 16), "tgt": torch.zeros(1, 10, 16)})
    crossing = attention(10, 7, 16, 2) + products((2 * 10 + 2 * 7) * 16 * 16)
    assert row(ledger, "decoder.layers.0.multihead_attn").counts == crossing
    assert row(ledger, "decoder.layers.0.linear2").part == "ffn"
    assert ledger.uncounted == ()


@pytest.mark.parametrize("fused", [True, False])
def test_vit_by_its_formula(fused):
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224")
    for block in model.blocks:
        block.attn.fused_attn = fused
    ledger = cost(model, (2, 3, 224, 224))
    n, d, depth = 197, 192, 12
    one = attention(n, n, d, 3) + products(12 * n * d * d) + products(2 * 2 * n * d)
    around = products(196 * (768 * d + d) + 2 * n * d + d * 1000)  # patches, the last norm, the head
    assert ledger.total == (one * depth + around) * 2
    assert ledger.uncounted == ()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bert_by_its_formula(implementation):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 80}
    config = transformers.BertConfig(vocab_size=50, attn_implementation=implementation, **sizes)
    ledger = cost(transformers.BertModel(config), torch.zeros(3, 11, dtype=torch.long))
    attending = attention(11, 11, 32, 2) + products(4 * 11 * 32 * 32)
    ffn = products(2 * 11 * 32 * 80)
    norms = products(2 * 11 * 32)
    assert ledger.total == ((attending + ffn + norms * 2) * 2 + norms + products(32 * 32)) * 3
    # Either block's norm stands with its output.
    assert ledger.of("attention") == (attending + norms) * 6
    assert ledger.of("ffn") == (ffn + norms) * 6
    assert ledger.uncounted == ()


def test_attention_of_an_unknown_class_is_listed():
    with torch.device("meta"):
        model = timm.create_model("swin_tiny_patch4_window7_224")
    ledger = cost(model, (1, 3, 224, 224))
    assert len(ledger.uncounted) == 12
    assert "layers.0.blocks.0.attn (WindowAttention)" in ledger.uncounted
    assert row(ledger, "layers.0.blocks.0.attn.qkv").part == "attention"


class Inline(nn.Module):
    """Products that no submodule stands for."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(8, 24)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return {
            "matmul": lambda: (q @ k.mT).softmax(-1) @ v,
            "einsum": lambda: torch.einsum("bnc,bmc->bnm", q, k) @ v,
            "fused": lambda: F.scaled_dot_product_attention(q, k, v),
            "scaled by a parameter": lambda: v * self.weight.reshape(1, 1, 8),
            "a parameter added": lambda: v + self.weight,
            "scaled by a number": lambda: v / 2,
        }[self.how]()


@pytest.mark.parametrize("how", ["matmul", "einsum", "fused", "scaled by a parameter"])
def test_products_outside_of_layers_are_listed(how):
    assert cost(nn.Sequential(Inline(how)), (2, 5, 8)).uncounted == ("0 (Inline)",)
    assert cost(Inline(how), (2, 5, 8)).uncounted == ("the model itself (Inline)",)


@pytest.mark.parametrize("how", ["a parameter added", "scaled by a number"])
def test_sums_outside_of_layers_are_free(how):
    assert cost(Inline(how), (2, 5, 8)).uncounted == ()


def test_tokens_before_an_image_have_no_neighbours():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=1)
    ecoformer.convert(model, "eco", local=(3, 3))
    (branch,) = (r for r in cost(model, (2, 3, 224, 224)).rows if r.kind == "LocalBranch")
    assert branch.counts == products(2 * 196 * 192 * 9)


def test_an_image_without_a_batch():
    assert cost(nn.Conv2d(3, 8, 3), (3, 10, 12)).total == products(8 * 10 * (27 + 1) * 8)
