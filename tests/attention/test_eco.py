"""Hashed attention as a module: the paper's equation by hand, and its start from a softmax layer."""

import copy

import pytest
import torch
from torch import nn

from ecoformer import EcoAttention, FitOptions, KernelHasher, reference
from ecoformer.attention import (
    BiEcoAttention,
    HashedAttention,
    KlshEcoAttention,
    LshEcoAttention,
    SoftmaxAttention,
)

DIM, HEADS, B, N = 12, 3, 2, 9
QUICK = FitOptions(steps=5, pairs=2)


def tokens(dtype=torch.float64):
    return torch.randn(B, N, DIM, generator=torch.Generator().manual_seed(0), dtype=dtype)


def heads(x):
    return x.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2)


def fitted(layer):
    with torch.no_grad():
        layer.hasher.fit(heads(layer.qk(tokens().to(layer.qk.weight))), options=QUICK)
    return layer


def eco(**kwargs):
    torch.manual_seed(0)
    return fitted(EcoAttention(DIM, HEADS, **{"bits": 6, "support": 4, **kwargs}).double())


@pytest.mark.parametrize("bias", ["paper", "tight"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_equations(bias, is_causal, padded):
    layer, x = eco(bias=bias), tokens()
    padding = torch.arange(N) >= torch.tensor([N, 5])[:, None] if padded else None
    state = layer.state_dict()
    qk, v = (heads(x @ state[f"{name}.weight"].mT + state[f"{name}.bias"]) for name in ("qk", "v"))
    hasher = {key: state[f"hasher.{key}"] for key in ("support_samples", "sigma", "mean", "weight")}
    codes = reference.hash_codes(
        qk,
        hasher["support_samples"],
        hasher["sigma"].view(-1, 1, 1),
        hasher["mean"].unsqueeze(-2),
        hasher["weight"],
    )
    mask = None if padding is None else padding[:, None].expand(B, HEADS, N)
    out = reference.hash_attention(codes, codes, v, mask, is_causal, bias).transpose(1, 2).flatten(2)
    out = out @ state["proj.weight"].mT + state["proj.bias"]
    torch.testing.assert_close(layer(x, key_padding_mask=padding, is_causal=is_causal), out)


def test_defaults_are_the_papers():
    layer = EcoAttention(64, 2)
    assert (layer.hasher.bits, layer.hasher.support) == (16, 25)
    assert (layer.bias, layer.local, layer.hasher.trainable) == ("paper", None, False)
    assert not hasattr(layer, "qkv")


def test_hasher_arguments_reach_the_hasher():
    layer = EcoAttention(DIM, HEADS, bits=3, support=2, trainable=True)
    hasher = layer.hasher
    assert (hasher.num_heads, hasher.head_dim, hasher.bits, hasher.support) == (HEADS, DIM // HEADS, 3, 2)
    assert hasher.trainable
    assert "hasher.weight" in dict(layer.named_parameters())
    assert BiEcoAttention(DIM, HEADS).hasher.bits == 256
    assert BiEcoAttention(DIM, HEADS, features="channels").hasher.bits == DIM // HEADS
    assert LshEcoAttention(DIM, HEADS, bits=5).hasher.planes.shape == (HEADS, DIM // HEADS, 5)
    assert type(KlshEcoAttention(DIM, HEADS).hasher).__name__ == "KlshHasher"


def test_a_hasher_of_ones_own():
    class Hashed(HashedAttention):
        name = "hashed"

    torch.manual_seed(0)
    layer = fitted(Hashed(DIM, HEADS, KernelHasher(HEADS, DIM // HEADS, 6, 4)).double())
    assert torch.equal(layer(tokens()), eco()(tokens()))


def test_gradients_reach_what_is_hashed():
    layer = eco(trainable=True)
    layer(tokens()).square().sum().backward()
    grads = {name: parameter.grad.abs().sum() for name, parameter in layer.named_parameters()}
    assert grads.keys() >= {"qk.weight", "v.weight", "proj.weight", "hasher.weight"}
    assert all(value > 0 for value in grads.values())


def test_mistakes():
    with pytest.raises(ValueError, match=r"^bias must be .paper. or .tight., got 'none'$"):
        EcoAttention(DIM, HEADS, bias="none")
    with pytest.raises(ValueError, match=r"^attn_drop must be 0"):
        EcoAttention(DIM, HEADS, attn_drop=0.1)
    with pytest.raises(TypeError, match="unknown setting 'bit'"):
        EcoAttention(DIM, HEADS, bit=4)


class TimmLike(nn.Module):
    """What timm's Attention looks like from outside."""

    def __init__(self, bias=True, width=DIM):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * width, bias=bias)
        self.proj = nn.Linear(width, DIM)


def fused(layer):
    """in-projection and out-projection of a softmax layer: weight, bias, weight, bias."""
    if isinstance(layer, nn.MultiheadAttention):
        return layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    return layer.qkv.weight, layer.qkv.bias, layer.proj.weight, layer.proj.bias


SOURCES = {
    "torch": lambda bias: nn.MultiheadAttention(DIM, HEADS, bias=bias),
    "ours": lambda bias: SoftmaxAttention(DIM, HEADS, qkv_bias=bias),
    "timm": TimmLike,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [EcoAttention, LshEcoAttention])
def test_from_softmax(source, bias, dtype, cls):
    torch.manual_seed(0)
    layer = SOURCES[source](bias).to(dtype).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    before = copy.deepcopy(layer.state_dict())
    new = cls.from_softmax(layer, bits=5)
    weight, in_bias, out_weight, out_bias = fused(layer)
    assert torch.equal(new.qk.weight, weight[:DIM])
    assert torch.equal(new.v.weight, weight[2 * DIM :])
    assert torch.equal(new.proj.weight, out_weight)
    if bias:
        assert torch.equal(new.qk.bias, in_bias[:DIM])
        assert torch.equal(new.v.bias, in_bias[2 * DIM :])
    else:
        assert new.qk.bias is new.v.bias is None
    assert torch.equal(new.proj.bias, torch.zeros(DIM, dtype=dtype) if out_bias is None else out_bias)
    assert (new.num_heads, new.hasher.bits, new.training) == (HEADS, 5, False)
    assert all(parameter.requires_grad for parameter in new.parameters())
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    new.qk.weight.data.zero_()
    assert torch.equal(fused(layer)[0], weight)
    out = fitted(cls.from_softmax(layer.train(), local=3, **({"support": 4} if cls is EcoAttention else {})))
    assert out.training
    assert out(tokens(dtype)).dtype == dtype


def test_from_softmax_on_another_device():
    with torch.device("meta"):
        layer = nn.MultiheadAttention(DIM, HEADS)
    new = EcoAttention.from_softmax(layer)
    assert {tensor.device.type for tensor in new.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.Linear(DIM, DIM), TypeError, "^cannot read the projections of Linear: it is neither"),
        (
            nn.MultiheadAttention(DIM, HEADS, kdim=4, vdim=4),
            ValueError,
            "kdim, vdim, .* cannot be carried over$",
        ),
        (
            nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True),
            ValueError,
            "add_bias_kv .* cannot be carried over$",
        ),
        (nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True), ValueError, "cannot be carried over$"),
        (TimmLike(width=24), ValueError, "^TimmLike projects 12 to 72 channels"),
    ],
)
def test_layers_that_cannot_be_read(layer, error, message):
    with pytest.raises(error, match=message) as caught:
        EcoAttention.from_softmax(layer)
    assert "\n" not in str(caught.value)


def test_from_softmax_refuses_parameters_it_would_drop():
    layer = SoftmaxAttention(16, 2)
    layer.relative_position_bias_table = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="also holds relative_position_bias_table, which cannot be carried"):
        EcoAttention.from_softmax(layer)


def test_the_way_back_to_softmax():
    eco = EcoAttention(DIM, HEADS, local=3)
    torch.nn.init.normal_(eco.local.weight)
    softmax = SoftmaxAttention.from_softmax(eco)
    q, k, v = softmax.qkv.weight.chunk(3)
    assert torch.equal(q, eco.qk.weight)
    assert torch.equal(k, eco.qk.weight)
    assert torch.equal(v, eco.v.weight)
    assert torch.equal(softmax.local.weight, eco.local.weight)


def test_from_softmax_keeps_dropout():
    assert EcoAttention.from_softmax(SoftmaxAttention(16, 2, proj_drop=0.4)).proj_drop.p == 0.4
