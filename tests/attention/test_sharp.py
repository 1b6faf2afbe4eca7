"""sharp_eco: codes straight from the input, groups of bits, and weights of keys."""

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import create_attention, reference
from ecoformer.attention import KlshEcoAttention, SharpEcoAttention, SoftmaxAttention
from ecoformer.models.text import TextEncoder

DIM, HEADS, N = 24, 3, 13


def layer(seed=0, **kwargs):
    """A layer whose affinity and key weights are not those it starts with."""
    torch.manual_seed(seed)
    module = SharpEcoAttention(DIM, HEADS, **kwargs)
    with torch.no_grad():
        for parameter in (*module.affinity.parameters(), *(module.key_weights or nn.Module()).parameters()):
            parameter.normal_()
    return module.eval()


def tokens(batch=2, n=N, seed=1):
    return torch.randn(batch, n, DIM, generator=torch.Generator().manual_seed(seed))


def parts(module, x):
    """Projections of queries and keys, values (B, H, N, ...) and key weights, step by step."""
    heads = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
    width = module.qk.out_features // (2 if module.separate else 1)
    q, k = (heads(module.qk(x)[..., :width]), heads(module.qk(x)[..., -width:]))
    if module.key_weights is None:
        weight = torch.ones(len(x), HEADS, x.shape[1])
    else:
        exponent = module.key_weights.exponent(x)
        weight = 2.0 ** (12 * torch.tanh(exponent / 3)).round().transpose(1, 2)
    return q, k, heads(module.v(x)), weight


def by_reference(module, x, mask=None, is_causal=False):
    q, k, v, weight = parts(module, x)
    beta, omega = module.affinity.beta.sigmoid(), module.affinity.weight.softmax(dim=-1)
    signs = (reference.sign(q), reference.sign(k))
    padding = None if mask is None else mask[:, None].expand(weight.shape)
    out = reference.grouped_attention(*signs, v, module.groups, beta, omega, padding, is_causal, weight)
    return module.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bits": 12, "groups": 2}, {"separate": False}, {"key_weights": False}, {"bits": 48}]
)
def test_is_the_reference(options, is_causal):
    module, x = layer(**options), tokens()
    mask = torch.arange(N) >= torch.tensor([13, 8])[:, None]
    with torch.no_grad():
        out = module(x, key_padding_mask=mask, is_causal=is_causal)
        torch.testing.assert_close(out[~mask], by_reference(module, x, mask, is_causal)[~mask])


def test_key_weights_are_powers_of_two():
    module, x = layer(), 20 * tokens()
    weight = module.key_weights(x)
    mantissa, exponent = torch.frexp(weight)
    assert (mantissa == 0.5).all()
    assert (exponent.min(), exponent.max()) == (-11, 13)  # 2^-12 and 2^12
    weight.log2().sum().backward()
    assert module.key_weights.exponent.weight.grad.abs().sum() > 0


def test_every_ingredient_is_an_option_of_other_hashed_attention():
    for name, options in (("eco", {"support": 5}), ("lsh_eco", {})):
        module = create_attention(name, 24, 3, groups=4, separate=True, key_weights=True, **options)
        assert module.qk.out_features == 48
        hasher = module.hasher.fit(torch.randn(4, 3, 13, 8))
        x = tokens()
        with torch.no_grad():
            for parameter in (*module.affinity.parameters(), *module.key_weights.parameters()):
                parameter.normal_()
        beta, omega = module.affinity.beta.sigmoid(), module.affinity.weight.softmax(dim=-1)
        weight = 2.0 ** (12 * torch.tanh(module.key_weights.exponent(x) / 3)).round().transpose(1, 2)
        q, k = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in module.qk(x).chunk(2, dim=-1))
        v = module.v(x).unflatten(-1, (3, 8)).transpose(1, 2)
        out = reference.grouped_attention(
            hasher.codes(q), hasher.codes(k), v, 4, beta, omega, None, False, key_weight=weight
        )
        torch.testing.assert_close(module(x), module.proj(out.transpose(1, 2).flatten(2)))


def test_conversion_keeps_queries_and_keys_apart():
    torch.manual_seed(0)
    source, x = SoftmaxAttention(DIM, HEADS), tokens()
    module = SharpEcoAttention.from_softmax(source, seed=3)
    q, k, v = (y.unflatten(-1, (HEADS, 8)).transpose(1, 2) for y in source.qkv(x).chunk(3, dim=-1))
    planes = torch.randn(HEADS, 16, 8, generator=torch.Generator().manual_seed(3))
    found = parts(module, x)
    for expected, y in zip((q, k), found, strict=False):
        torch.testing.assert_close(y, expected @ planes.mT)
    torch.testing.assert_close(found[2], v)
    assert torch.equal(module.proj.weight, source.proj.weight)
    separate = KlshEcoAttention.from_softmax(source, separate=True)
    assert torch.equal(separate.qk.weight, source.qkv.weight[: 2 * DIM])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("bits=18 cannot be cut into groups of 4", {"bits": 18}),
        ("groups=5 must divide codes of 16 bits", {"groups": 5}),
        ("groups=1 must divide codes of 16 bits", {"groups": 1}),
        ("bias='tight' and groups=4 exclude each other", {"bias": "tight"}),
        ("bits must be a whole number of at least 1, got 0", {"bits": 0}),
        ("bits must be a whole number of at least 1, got '16'", {"bits": "16"}),
    ],
)
def test_mistakes(message, options):
    with pytest.raises(ValueError, match=message):
        SharpEcoAttention(DIM, HEADS, **options)


def encoder():
    torch.manual_seed(0)
    sizes = {"vocabulary": 9, "length": N, "dim": DIM, "num_heads": HEADS, "hidden": 16, "dropout": 0.0}
    return TextEncoder(attention="sharp_eco", **sizes)


def test_runs_without_fitting_and_cannot_be_converted_back():
    torch.manual_seed(0)
    sizes = {"vocabulary": 9, "length": N, "dim": DIM, "num_heads": HEADS, "hidden": 16}
    model = TextEncoder(attention="softmax", **sizes)
    ecoformer.convert(model, "sharp_eco", seed=1)
    assert model(torch.randint(1, 9, (2, N))).isfinite().all()
    with pytest.raises(ValueError, match="holds no queries and keys, only codes"):
        ecoformer.convert(model, "softmax")


def test_compiles_in_one_graph():
    torch.compiler.reset()
    module, x = layer().train(), tokens().requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x), module(x)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(*gradients)


def test_new_draws_keep_what_was_learned():
    torch.manual_seed(0)
    options = {"groups": 4, "separate": True, "key_weights": True}
    old = create_attention("lsh_eco", DIM, HEADS, **options)
    nn.init.normal_(old.key_weights.exponent.weight)
    new = type(old).from_softmax(old, seed=1, **options)
    assert torch.equal(new.key_weights.exponent.weight, old.key_weights.exponent.weight)
    assert not torch.equal(new.hasher.planes, old.hasher.planes)


def test_frozen_projections_stay_frozen():
    module = SharpEcoAttention.from_softmax(SoftmaxAttention(DIM, HEADS).requires_grad_(False))
    assert not any(p.requires_grad for p in (*module.qk.parameters(), *module.v.parameters()))
    assert module.affinity.beta.requires_grad


def test_layers_built_without_memory_load():
    state = create_attention("lsh_eco", DIM, HEADS).state_dict()
    with torch.device("meta"):
        module = create_attention("lsh_eco", DIM, HEADS)
    module.load_state_dict(state, assign=True)
    assert module(tokens()).isfinite().all()
