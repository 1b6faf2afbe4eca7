"""The same figures on a CUDA device; run with `pytest -m gpu`."""

import pytest
import torch

from ecoformer import (
    EcoAttention,
    KernelHasher,
    affinity,
    fit_hashers,
    hash_attention,
    reference,
    use_kernels,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        "cuda", dtype
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("f", [None, affinity.tight(16), affinity.grouped(0.5, 1.0, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_is_as_exact_as_eager(dtype, f, is_causal):
    """Output and gradients, by the kernels in Triton and by eager, against fp64."""
    given = draw(2, 3, 500, 16), draw(2, 3, 500, 16, seed=1), draw(2, 3, 500, 40, seed=2)
    f = None if f is None else f.cuda()
    mask = torch.arange(500, device="cuda") >= torch.tensor([[500], [333]], device="cuda")
    given, grad = [x.to(dtype) for x in given], draw(2, 3, 500, 40, seed=3)

    def results(kernels, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        with use_kernels(kernels):
            out = hash_attention(*leaves, f, key_padding_mask=mask, is_causal=is_causal)
            return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = results("eager", torch.float64)
    for ours, near, truth in zip(results("triton", dtype), results("eager", dtype), exact, strict=True):
        assert ours.dtype == dtype
        errors = [float((x.double() - truth).norm() / truth.norm()) for x in (ours, near)]
        assert errors[0] <= 2 * errors[1] + 1e-6


def test_fit_is_repeatable_and_as_good_as_on_the_cpu():
    def objective(hasher, x):
        return float(reference.objective(hasher.codes(x), reference.pairwise_labels(x, 10)).mean())

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
