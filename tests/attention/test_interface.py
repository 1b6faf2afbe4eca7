"""What every mechanism keeps to, whoever wrote it: all registered names go through the same tests."""

import importlib
import pkgutil

import pytest
import torch

from ecoformer import FitOptions, create_attention, hashers_of, list_attentions, register_attention
from ecoformer import attention as mechanisms
from ecoformer.attention import Attention, EcoAttention, attention_class, registry

for found in pkgutil.iter_modules(mechanisms.__path__, f"{mechanisms.__name__}."):
    importlib.import_module(found.name)

DIM, HEADS, B, N = 16, 2, 3, 11
NEEDED = {"linformer": {"seq_len": N}}
every_mechanism = pytest.mark.parametrize("name", list_attentions())


def make(name, seed=0, **kwargs):
    """A module in eval mode; its hashers, where it has any, are fitted."""
    torch.manual_seed(seed)
    module = create_attention(name, DIM, HEADS, **NEEDED.get(name, {}), **kwargs)
    for hasher in hashers_of(module).values():
        hasher.fit(torch.randn(4, HEADS, N, hasher.head_dim), seed=seed, options=FitOptions(steps=2))
    return module.eval()


def tokens(batch=B, n=N, seed=0):
    return torch.randn(batch, n, DIM, generator=torch.Generator().manual_seed(seed))


def padding(*lengths):
    return torch.arange(N) >= torch.tensor(lengths)[:, None]


@every_mechanism
def test_forward(name):
    module, x = make(name), tokens()
    out = module(x)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert torch.equal(module(x), out)
    torch.testing.assert_close(module(x[1:2]), out[1:2])
    assert not torch.allclose(module(x.flip(0)), out)
    assert module.name == name
    assert f"mechanism={name}" in repr(module)


@every_mechanism
def test_tokens_hear_of_each_other(name):
    module, x = make(name), tokens()
    changed = x.clone()
    changed[:, -1] = 3 * tokens(seed=1)[:, -1]
    assert (module(changed)[:, 0] != module(x)[:, 0]).any(dim=-1).all()


@every_mechanism
@pytest.mark.parametrize("is_causal", [False, True])
def test_backward(name, is_causal):
    module, x = make(name).train(), tokens().requires_grad_()
    module(x, is_causal=is_causal and module.supports_causal).square().sum().backward()
    for where, grad in [("x", x.grad), *((key, p.grad) for key, p in module.named_parameters())]:
        assert grad is not None, where
        assert grad.isfinite().all(), where
        assert grad.abs().sum() > 0, where


@every_mechanism
@pytest.mark.parametrize("content", [7.0, float("nan")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding(name, content, is_causal):
    module, x, mask = make(name), tokens(), padding(11, 7, 1)
    if not module.supports_padding:
        with pytest.raises(ValueError, match="key_padding_mask"):
            module(x, key_padding_mask=mask)
        return
    is_causal = is_causal and module.supports_causal
    out = module(x, key_padding_mask=mask, is_causal=is_causal)
    changed = module(x.masked_fill(mask.unsqueeze(-1), content), key_padding_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(changed[~mask], out[~mask])
    torch.testing.assert_close(out[:1], module(x[:1], is_causal=is_causal))


@every_mechanism
def test_sample_of_nothing_but_padding(name):
    module, x, mask = make(name), tokens().requires_grad_(), padding(11, 0, 4)
    if module.supports_padding:
        out = module(x, key_padding_mask=mask)
        out.sum().backward()
        torch.testing.assert_close(out[1], module.proj.bias.expand(N, DIM))
        assert x.grad.isfinite().all()


@every_mechanism
def test_causal_order(name):
    module, x = make(name), tokens()
    if not module.supports_causal:
        with pytest.raises(ValueError, match=f"^is_causal=True .* {name}$"):
            module(x, is_causal=True)
        return
    out = module(x, is_causal=True)
    for t in range(N - 1):
        changed = torch.cat([x[:, : t + 1], 3 * tokens(seed=t + 1)[:, t + 1 :]], dim=1)
        torch.testing.assert_close(module(changed, is_causal=True)[:, : t + 1], out[:, : t + 1])
    earlier = torch.cat([3 * tokens(seed=1)[:, :1], x[:, 1:]], dim=1)
    assert (module(earlier, is_causal=True)[:, -1] != out[:, -1]).any(dim=-1).all()


@every_mechanism
def test_nan_stays_in_its_sample(name):
    module, x = make(name), tokens()
    out = module(x)
    x[1, 4] = torch.nan
    broken = module(x)
    assert torch.equal(broken[[0, 2]], out[[0, 2]])
    assert broken[1].isnan().any()


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(name, dtype):
    module, x = make(name).to(dtype), tokens().to(dtype).requires_grad_()
    out = module(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == dtype
    assert out.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert make(name)(tokens()).isfinite().all()


@every_mechanism
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_token(name, is_causal):
    module = make(name)
    out = module(tokens(n=1), is_causal=is_causal and module.supports_causal)
    assert out.shape == (B, 1, DIM)
    assert out.isfinite().all()


@every_mechanism
def test_no_samples(name):
    assert make(name)(tokens(batch=0)).shape == (0, N, DIM)


@every_mechanism
def test_state_dict(name):
    first, second, x = make(name), make(name, seed=1), tokens()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


@every_mechanism
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_bias_of_projections(name, qkv_bias):
    biases = {key for key, _ in make(name, qkv_bias=qkv_bias).named_parameters() if key.endswith("bias")}
    assert "proj.bias" in biases
    assert (len(biases) > 1) == qkv_bias


@every_mechanism
def test_dropout(name):
    if attention_class(name).has_weights:
        module = make(name, attn_drop=0.5)
        assert torch.equal(module(tokens()), make(name)(tokens()))
        assert not torch.equal(module.train()(tokens()), module(tokens()))
    else:
        with pytest.raises(ValueError, match=f"^attn_drop must be 0, got 0.5: {name} "):
            make(name, attn_drop=0.5)
    module = make(name, proj_drop=0.5)
    assert torch.equal(module(tokens()), make(name)(tokens()))
    assert 0.3 < (module.train()(tokens()) == 0).float().mean() < 0.7


@every_mechanism
@pytest.mark.parametrize("local", [3, (3, 3)])
def test_local_branch_changes_nothing_at_first(name, local):
    plain, x = make(name), tokens()
    module = make(name, local=local)
    module.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(module(x, grid=(1, N)), plain(x))
    torch.nn.init.ones_(module.local.weight)
    assert not torch.allclose(module(x, grid=(1, N)), plain(x))


@every_mechanism
@pytest.mark.parametrize("shape", [(N, DIM), (B, N, DIM + 1), (B, 1, N, DIM)])
def test_wrong_tokens(name, shape):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make(name)(torch.zeros(shape))
    assert str(caught.value) == f"x must be (B, N, {DIM}), got {shape}"


@every_mechanism
@pytest.mark.parametrize(
    "mask",
    [torch.zeros(B, N), torch.zeros(N, N).bool(), torch.zeros(N).bool(), torch.zeros(B, N + 1).bool()],
    ids=["float", "square", "one sample", "too long"],
)
def test_wrong_mask(name, mask):
    with pytest.raises(ValueError, match="key_padding_mask") as caught:
        make(name)(tokens(), key_padding_mask=mask)
    assert "\n" not in str(caught.value)
    assert not attention_class(name).supports_padding or f"{mask.dtype} {tuple(mask.shape)}" in str(
        caught.value
    )


@every_mechanism
@pytest.mark.parametrize(("dim", "heads"), [(10, 3), (16, 0), (0, 2), (16, -2)])
def test_wrong_sizes(name, dim, heads):
    message = f"^dim must be a multiple of num_heads, got dim={dim} and num_heads={heads}$"
    with pytest.raises(ValueError, match=message):
        create_attention(name, dim, heads, **NEEDED.get(name, {}))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"^unknown attention 'sofmax': did you mean 'softmax'\?$"):
        create_attention("sofmax", 8, 2)
    with pytest.raises(ValueError, match=r"^unknown attention 'xyz': choose from .*eco, .*softmax"):
        create_attention("xyz", 8, 2)


def test_a_mechanism_of_ones_own(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @register_attention("mean_of_all")
    class MeanOfAll(Attention):
        supports_causal = supports_padding = False

        def attend(self, q, k, v, key_padding_mask, is_causal):
            return v.mean(dim=-2, keepdim=True).expand_as(v)

    assert "mean_of_all" in list_attentions()
    module, x = make("mean_of_all"), tokens()
    v = module.qkv(x).chunk(3, dim=-1)[2]
    torch.testing.assert_close(module(x), module.proj(v.mean(dim=1, keepdim=True).expand_as(v)))
    for kwargs in ({"is_causal": True}, {"key_padding_mask": padding(11, 7, 1)}):
        with pytest.raises(ValueError, match="mean_of_all"):
            module(x, **kwargs)
    with pytest.raises(ValueError, match="'mean_of_all' is already registered: MeanOfAll"):
        register_attention("mean_of_all")(MeanOfAll)
    with pytest.raises(ValueError, match="'softmax' is already registered: SoftmaxAttention"):
        register_attention("softmax")(MeanOfAll)
    assert MeanOfAll.name == "mean_of_all"


@pytest.mark.parametrize(
    ("layer", "given"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
)
def test_another_dtype_than_the_weights(layer, given):
    module, x = make("softmax").to(layer), tokens().to(given)
    with pytest.raises(ValueError, match=rf"^x is {given}, .* softmax are {layer}: pass x.to\({layer}\)"):
        module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype is torch.bfloat16


def test_unknown_settings_are_told_with_the_known_ones():
    known = r"choose from attn_drop, bias, bits, .*local, .*, support, trainable$"
    with pytest.raises(TypeError, match=rf"^unknown setting 'bit' of eco \(did you mean 'bits'\?\); {known}"):
        create_attention("eco", 32, 2, bit=8)
    with pytest.raises(TypeError, match=r"^unknown setting 'bits' of performer; choose from .*features"):
        create_attention("performer", 32, 2, bits=8)
    with pytest.raises(TypeError, match=r"^unknown setting 'bit' of eco"):
        EcoAttention(32, 2, bit=8)


def test_missing_arguments_name_the_mechanism():
    with pytest.raises(TypeError, match=r"^linformer: .*'seq_len'.*help\(ecoformer.attention.LinformerAtt"):
        create_attention("linformer", 32, 2)


def test_settings_of_a_mechanism():
    assert {"features", "seed", "temperature", "local"} <= attention_class("fp_eco").settings()
    assert {"bits", "support", "bias", "qkv_bias"} <= attention_class("eco").settings()
    assert "bits" not in attention_class("softmax").settings()
