"""The same figures on a CUDA device; run with `pytest -m gpu`."""

import pytest
import torch

from ecoformer import EcoAttention, KernelHasher, fit_hashers, hash_attention, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        "cuda", dtype
    )


def codes(*shape, seed=1):
    return reference.sign(draw(*shape, seed=seed))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", ["paper", "tight"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(dtype, bias, is_causal):
    h, v = codes(2, 3, 500, 16), draw(2, 3, 500, 40, dtype=dtype)
    mask = torch.arange(500, device="cuda") >= torch.tensor([[500], [333]], device="cuda")
    out = hash_attention(h, h, v, key_padding_mask=mask, is_causal=is_causal, bias=bias)
    truth = reference.hash_attention(h.double(), h.double(), v.double(), mask[:, None], is_causal, bias)
    assert out.dtype == dtype
    assert (out.double() - truth).abs().max() <= 16 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    inputs = [
        x.requires_grad_() for x in (codes(1, 2, 130, 5).double(), draw(1, 2, 130, 3, dtype=torch.float64))
    ]
    grads = []
    for function in (hash_attention, reference.hash_attention):
        out = function(inputs[0], inputs[0], inputs[1], is_causal=is_causal)
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fit_is_repeatable_and_as_good_as_on_the_cpu():
    def objective(hasher, x):
        return float(reference.objective(hasher(x), reference.pairwise_labels(x, 10)).mean())

    tokens = draw(4, 2, 400, 8).tanh()
    hashers = [KernelHasher(2, 8).cuda().fit(tokens) for _ in range(2)]
    for first, second in zip(*(h.state_dict().values() for h in hashers), strict=True):
        assert torch.equal(first, second)
    on_cpu = KernelHasher(2, 8).fit(tokens.cpu())
    assert objective(hashers[0], tokens) == pytest.approx(objective(on_cpu, tokens.cpu()), rel=0.05)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_layer_under_autocast_and_compile():
    layer = EcoAttention(64, 2).cuda()
    x = draw(2, 196, 64)
    fit_hashers(layer, [x], progress=False)
    with torch.autocast("cuda", torch.bfloat16):
        plain = layer(x)
        compiled = torch.compile(layer, fullgraph=True)(x)
    assert plain.dtype == torch.bfloat16
    torch.testing.assert_close(plain, compiled, rtol=0.02, atol=0.02)
    compiled.float().sum().backward()
    assert layer.qk.weight.grad.isfinite().all()
