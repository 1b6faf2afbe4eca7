"""What a layer does that its parameters do not show is refused, not lost."""

import copy

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import Projections, convert, register_conversion
from ecoformer.conversion.layers import find_layers

timm = pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402


def vit(**kwargs):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**sizes | kwargs).eval()


def refused(model, message, *args, **kwargs):
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message) as caught:
        convert(model, "softmax", *args, **kwargs)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.register_buffer("slopes", torch.ones(2)), "the buffer slopes"),
        (lambda layer: setattr(layer, "is_causal", True), "causal"),
        (lambda layer: setattr(layer, "scale", 1.0), "scales scores by scale=1 instead of 0.35"),
        (lambda layer: setattr(layer, "qkv", OwnLinear(16, 48)), "qkv is a OwnLinear"),
    ],
)
def test_layers_that_do_more_are_refused(change, message):
    model = vit()
    change(model.blocks[1].attn)
    refused(model, f"^blocks.1.attn .*{message}")
    assert len(convert(model, "softmax", layers="blocks.0.*").replaced) == 1


def test_wrappers_of_many_processes_are_refused():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    refused(DistributedDataParallel(vit()), r"DistributedDataParallel: pass model\.module")
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        convert("pvt_v2_b0", "eco")


def test_a_compiled_model_is_converted_inside():
    model = vit()
    wrapped = torch.compile(model, backend="eager")
    convert(wrapped, "softmax")
    assert {layer.kind for layer in find_layers(model)} == {"softmax"}
    assert all(name.startswith("blocks") for name in model.ecoformer_conversions[0]["layers"])


def test_what_is_frozen_stays_frozen():
    model = vit()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.proj.bias.requires_grad_(True)
    convert(model, "eco")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == ["blocks.0.attn.attention.proj.bias", "blocks.1.attn.attention.proj.bias"]


def test_what_is_left_behind_is_told():
    model = vit(attn_drop_rate=0.1)
    assert any("dropout of attention weights" in note for note in convert(model, "lsh_eco").notes)
    convert(model, "softmax", local=7)
    assert any("a local branch" in note for note in convert(model, "softmax", local=5).notes)


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()


@pytest.mark.parametrize("low", [-torch.inf, -1e9])
def test_padding_that_is_added_to_scores(low):
    original, x = encoder(), torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    model = copy.deepcopy(original)
    parent = nn.Sequential(model)
    convert(parent, "softmax")
    added = torch.zeros(2, 5).masked_fill(padding, low)
    torch.testing.assert_close(
        model(x, src_key_padding_mask=added)[~padding], original(x, src_key_padding_mask=padding)[~padding]
    )
    with pytest.raises(ValueError, match="adds numbers to the scores"):
        model(x, src_key_padding_mask=torch.full((2, 5), -0.5))
    window = torch.ones(5, 5).triu(1).bool() | torch.ones(5, 5).tril(-2).bool()
    with pytest.raises(ValueError, match="None or the causal mask"):
        model(x, src_mask=window, is_causal=True)


def test_masks_are_checked_in_compiled_graphs():
    model = vit()
    convert(model, "softmax")
    layer = model.blocks[0].attn
    x = torch.randn(2, 17, 16)
    seen = torch.ones(2, 1, 17, 17, dtype=torch.bool)
    seen[1, :, :, 9:] = False
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, attn_mask=seen), layer(x, attn_mask=seen))
        with pytest.raises(RuntimeError, match="differs between queries"):
            compiled(x, attn_mask=seen.tril())


def test_buffers_may_be_dropped_knowingly():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(3))

    rule = {
        "projections": lambda layer: Projections.of_fused(2, layer.qkv, layer.proj),
        "call": lambda attention, x: attention(x),
    }
    register_conversion(Own, **rule)
    refused(nn.Sequential(Own()), "the buffer cache")
    register_conversion(Own, drops=("cache",), **rule)
    assert ecoformer.convert(nn.Sequential(Own()), "softmax").replaced
