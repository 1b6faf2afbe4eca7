"""Rules: a class nobody has seen, PyTorch's own layer, layers shared by several places, and refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ecoformer
from ecoformer import Projections, convert, register_conversion
from ecoformer.conversion import Adapter, rules

timm = pytest.importorskip("timm")
from timm.models.beit import Beit  # noqa: E402
from timm.models.swin_transformer import SwinTransformer  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

DIM, HEADS, B, N = 16, 2, 3, 9
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 8, "num_classes": 5}


@pytest.fixture(autouse=True)
def _rules_of_this_test_only(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


class Unheard(nn.Module):
    """Queries, keys and values under names of its own, in an order of its own."""

    def __init__(self, extra=False):
        super().__init__()
        self.heads = HEADS
        self.values, self.keys, self.queries = (nn.Linear(DIM, DIM) for _ in range(3))
        self.mix = nn.Linear(DIM, DIM)
        if extra:
            self.temper = nn.LayerNorm(DIM)

    def forward(self, tokens, hidden=None):
        q, k, v = (
            linear(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.queries, self.keys, self.values)
        )
        seen = None if hidden is None else ~hidden[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return {"tokens": self.mix(out.transpose(1, 2).flatten(2))}


class Block(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), attn

    def forward(self, x, hidden=None):
        return x + self.attn(self.norm(x), hidden=hidden)["tokens"]


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, hidden=None):
        for block in self.blocks:
            x = block(x, hidden)
        return x


def teach(**more):
    register_conversion(
        Unheard,
        projections=lambda layer: Projections.of_linears(
            layer.heads, layer.queries, layer.keys, layer.values, layer.mix
        ),
        call=lambda attention, tokens, hidden=None: {"tokens": attention(tokens, key_padding_mask=hidden)},
        **more,
    )


def tokens(batch=B, n=N):
    return torch.randn(batch, n, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def padding(*lengths):
    return torch.arange(N) >= torch.tensor(lengths)[:, None]


def same(x, y):
    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def refused(model, message, *args, error=ValueError, **kwargs):
    """A refusal is one line and leaves the model as it was: modules, weights, record, hooks."""
    modules, state = list(model.named_modules()), copy.deepcopy(model.state_dict())
    attributes = [set(vars(m)) for _, m in modules]
    with pytest.raises(error, match=message) as caught:
        convert(model, *args, **kwargs)
    assert "\n" not in str(caught.value)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in modules]
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [set(vars(m)) for _, m in modules] == attributes
    assert not any(m._forward_pre_hooks or m._forward_hooks for _, m in modules)


def test_a_class_that_was_never_seen():
    model, x, hidden = Stack(Block(Unheard()), Block(Unheard())).double(), tokens(), padding(9, 4, 1)
    refused(model, r"blocks.0.attn|register_conversion", "softmax")
    before = [model(x), model(x, hidden)]
    teach()
    report = convert(model, "softmax")
    assert [(layer.name, layer.was) for layer in report.replaced] == [
        ("blocks.0.attn", "Unheard"),
        ("blocks.1.attn", "Unheard"),
    ]
    same(model(x), before[0])
    same(model(x, hidden)[~hidden], before[1][~hidden])
    convert(model, "lsh_eco")
    assert model(x).isfinite().all()


def test_what_is_not_read_must_be_dropped_knowingly():
    teach()
    model = Stack(Block(Unheard(extra=True)))
    refused(model, r"^blocks.0.attn \(Unheard\) .*temper.weight, temper.bias", "softmax")
    teach(drops=("temper",))
    assert convert(model, "softmax").replaced[0].left_behind == ("temper",)


def test_a_rule_may_refuse():
    teach(refuse=lambda layer: "it is Monday")
    refused(
        Stack(Block(Unheard())), r"^blocks.0.attn \(Unheard\) cannot be converted: it is Monday", "softmax"
    )


def test_subclasses_need_rules_of_their_own():
    class Scaled(Unheard):
        def forward(self, tokens, hidden=None):
            return {"tokens": 2 * super().forward(tokens, hidden)["tokens"]}

    teach()
    model = Stack(Block(Unheard()), Block(Scaled()))
    assert [layer.name for layer in convert(model, "softmax").replaced] == ["blocks.0.attn"]
    assert isinstance(model.blocks[1].attn, Scaled)


def test_a_rule_by_name_and_with_bound_arguments():
    register_conversion(
        f"{Unheard.__module__}.Unheard",
        projections=lambda layer: Projections.of_linears(
            layer.heads, layer.queries, layer.keys, layer.values, layer.mix
        ),
        call=lambda attention, tokens, hidden=None, *, times: {"tokens": times * attention(tokens)},
        bind=lambda layer: {"times": layer.heads},
    )
    model, x = nn.Sequential(Unheard().double()), tokens()
    before = model(x)["tokens"]
    convert(model, "softmax")
    same(model(x)["tokens"], 2 * before)


@pytest.mark.parametrize("part", ["bind", "projections"])
def test_a_rule_that_fails_on_one_layer_changes_nothing(part):
    class Other(Unheard):
        pass

    def wrong(layer):
        raise KeyError("heads")

    working = {
        "projections": lambda m: Projections.of_linears(m.heads, m.queries, m.keys, m.values, m.mix),
        "call": lambda attention, tokens, hidden=None: {"tokens": attention(tokens)},
    }
    register_conversion(Unheard, **working)
    register_conversion(Other, **{**working, part: wrong})
    model = Stack(Block(Unheard()), Block(Other()))
    refused(
        model, "blocks.1.attn" if part == "projections" else "heads", "softmax", error=(ValueError, KeyError)
    )


def test_a_layer_shared_by_blocks_is_replaced_in_all():
    teach()
    shared = Unheard()
    model, x = Stack(Block(shared), Block(shared), Block(Unheard())).double(), tokens()
    before = model(x)
    report = convert(model, "softmax")
    assert [layer.name for layer in report.replaced] == ["blocks.0.attn", "blocks.2.attn"]
    first, second, third = (block.attn for block in model.blocks)
    assert isinstance(first, Adapter)
    assert first is second is not third
    same(model(x), before)
    convert(model, "lsh_eco")
    assert model.blocks[1].attn.attention.name == "lsh_eco"


def encoder(batch_first=True, **kwargs):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 24, batch_first=batch_first, **{"dropout": 0.0, **kwargs})
    nested = batch_first and not kwargs.get("norm_first")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).double()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 5)
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "causal bool", "causal and padding"])
def test_torchs_encoder(batch_first, norm_first, training, mask):
    model = encoder(batch_first, norm_first=norm_first).train(training)
    x, hidden = tokens(), padding(9, 4, 6) if "padding" in mask else None
    x = x if batch_first else x.transpose(0, 1)
    future = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    if mask == "causal bool" or hidden is not None:
        future = future.isinf()
    masks = {"mask": future if "causal" in mask else None, "src_key_padding_mask": hidden}
    with torch.no_grad():
        before = model(x, **masks)
        convert(model, "softmax")
        after = model(x, **masks)
        before, after = (y if batch_first else y.transpose(0, 1) for y in (before, after))
        seen = ~(torch.zeros(B, N).bool() if hidden is None else hidden)
        same(after[seen], before[seen])
        convert(model, "lsh_eco")
        assert model(x, **masks).isfinite().all()


def test_torchs_layer_refuses_what_it_cannot_do():
    model, x = encoder(dropout=0.3), tokens()
    convert(model, "softmax")
    layer = model.layers[0].self_attn
    assert layer.attention.attn_drop == 0.3
    with pytest.raises(ValueError, match="query, key and value"):
        layer(x, x.clone(), x)
    with pytest.raises(ValueError, match=r"^attn_mask must be None or the causal mask"):
        model(x, mask=torch.rand(N, N).double())
    with pytest.raises(ValueError, match=r"^attn_mask must be None or the causal mask"):
        model(x, mask=torch.eye(N).bool())
    for kwargs in ({"kdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        model = nn.Sequential(nn.MultiheadAttention(DIM, HEADS, **kwargs))
        refused(model, r"^0 \(MultiheadAttention\) .*cannot be carried over", "eco")
    refused(encoder(), r"^local=\(3, 3\) needs .*layers.0.self_attn", "eco", local=(3, 3))


def test_attention_to_another_sequence_is_not_converted():
    model = nn.Transformer(DIM, HEADS, 1, 1, 24, dropout=0.0, batch_first=True).double().eval()
    x, y = tokens(), tokens(n=5)
    before = model(x, y)
    report = convert(model, "softmax")
    assert "decoder.layers.0.multihead_attn" in [layer.name for layer in report.left]
    same(model(x, y), before)


def vit(**kwargs):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": DIM, "depth": 2, "num_heads": HEADS}
    return VisionTransformer(**{**sizes, "num_classes": 5, **kwargs}).eval()


def swin():
    return SwinTransformer(depths=(1,), num_heads=(1,), window_size=2, **SMALL)


def beit(**kwargs):
    return Beit(depth=1, num_heads=2, **SMALL, **kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (swin, r"^layers.0.blocks.0.attn .*relative_position_bias_table"),
        (lambda: beit(use_rel_pos_bias=True), "^blocks.0.attn .*relative position bias"),
        (lambda: beit(use_shared_rel_pos_bias=True), "^blocks.0.attn .*register_conversion"),
        (lambda: timm.create_model("eva02_tiny_patch14_224", depth=1), "^blocks.0.attn .*rope"),
        (lambda: vit(qk_norm=True), r"^blocks.0.attn .*normalises \(q_norm, k_norm\)"),
        (lambda: vit(scale_attn_norm=True), r"^blocks.0.attn .*normalises \(norm\)"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential has no .*register_conversion"),
        (lambda: nn.MultiheadAttention(16, 2), "itself an attention layer: use .*from_softmax"),
        (lambda: ecoformer.EcoAttention(16, 2), "itself an attention layer: use .*from_softmax"),
    ],
    ids=["swin", "beit", "beit shared", "eva", "qk_norm", "scale_norm", "no attention", "torch's", "ours"],
)
def test_models_that_are_refused(make, message):
    refused(make(), message, "eco")
    refused(make(), message, "eco", layers=lambda name, layer: True)


def test_mistakes():
    model, x = vit(), torch.randn(2, 3, 16, 16)
    before = model(x)
    refused(
        model, r"^layers='stages.\*' matches no .*there are blocks.0.attn, blocks.1", "eco", layers="stages.*"
    )
    refused(model, r"^layers='nope' matches no", "eco", layers=["blocks.0.*", "nope"])
    refused(model, "^layers", "eco", layers=lambda name, layer: False)
    refused(model, r"^unknown attention 'ecco': did you mean 'eco'\?$", "ecco")
    message = r"^unknown setting 'bit' of eco \(did you mean 'bits'\?\); choose from attn_drop, bias, bits"
    refused(model, message, "eco", bit=8, error=TypeError)
    for name in ("dim", "num_heads", "out_proj"):
        refused(model, f"^{name}=2: .* from each layer, leave it out", "eco", error=TypeError, **{name: 2})
    refused(model, "^qkv_bias=False would lose the biases of blocks.0.attn", "eco", qkv_bias=False)
    refused(model, "bits", "eco", bits=0)
    for local in (2, "7", (3, 3, 3)):
        refused(model, "^local must be an odd k", "eco", local=local)
    refused(model, "linformer is sized by .*seq_len=.* or example=", "linformer")
    assert torch.equal(model(x), before)
    assert len(convert(model, "softmax").replaced) == 2
