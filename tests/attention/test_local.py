"""The local branch against a loop and against nn.Conv2d."""

import pytest
import torch
from torch import nn

from ecoformer import create_attention
from ecoformer.attention.local import LocalBranch

B, N, DIM = 2, 12, 6


def branch(size):
    module = LocalBranch(DIM, size)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module


def values(n=N):
    return torch.randn(B, n, DIM, generator=torch.Generator().manual_seed(0))


def by_loop(weight, v, is_causal):
    """Every token's sum over its k neighbours, or over itself and the k - 1 before."""
    k, n = weight.shape[-1], v.shape[1]
    first = -(k - 1) if is_causal else -(k // 2)
    out = torch.zeros_like(v)
    for t in range(n):
        for j in range(k):
            if 0 <= t + first + j < n:
                out[:, t] += weight[:, 0, j] * v[:, t + first + j]
    return out


@pytest.mark.parametrize("size", [1, 3, 7, (5,)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, N])
def test_sequence(size, is_causal, n):
    module = branch(size)
    out = module(values(n), is_causal=is_causal)
    torch.testing.assert_close(out, by_loop(module.weight.detach(), values(n), is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_reach(is_causal):
    v = values().requires_grad_()
    branch(5)(v, is_causal=is_causal)[:, 6].sum().backward()
    reached = v.grad.abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
    assert reached == ([2, 3, 4, 5, 6] if is_causal else [4, 5, 6, 7, 8])


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (3, 5), (7, 1)])
@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (1, 12), (12, 1)])
def test_image(size, grid):
    module = branch(size)
    conv = nn.Conv2d(DIM, DIM, size, padding=(size[0] // 2, size[1] // 2), groups=DIM, bias=False)
    conv.load_state_dict(module.state_dict())
    image = values().unflatten(1, grid).permute(0, 3, 1, 2)
    torch.testing.assert_close(module(values(), grid=grid), conv(image).permute(0, 2, 3, 1).flatten(1, 2))


@pytest.mark.parametrize("content", [3.0, float("nan")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_of_sequences(content, is_causal):
    module, padding = branch(5), torch.arange(N) >= torch.tensor([N, 8])[:, None]
    out = module(values().masked_fill(padding.unsqueeze(-1), content), padding, is_causal)
    torch.testing.assert_close(out[:1], module(values()[:1], is_causal=is_causal))
    torch.testing.assert_close(out[1:, :8], module(values()[1:, :8], is_causal=is_causal))


def test_padding_of_images():
    module, padding = branch((3, 3)), torch.arange(N).expand(B, N) % 4 == 3
    out = module(values().masked_fill(padding.unsqueeze(-1), torch.nan), padding, grid=(3, 4))
    cut = module(values()[~padding].view(B, 9, DIM), grid=(3, 3))
    torch.testing.assert_close(out[~padding].view(B, 9, DIM), cut)


@pytest.mark.parametrize("size", [3, (3, 3)])
def test_starts_at_zero_and_learns(size):
    module = LocalBranch(DIM, size)
    out = module(values(), grid=(3, 4))
    assert (out == 0).all()
    out.sum().backward()
    assert module.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_inside_attention(is_causal):
    """What the branch adds to a layer: the convolved values, projected."""
    module, x = create_attention("softmax", DIM, 2, local=3), values()
    plain = module(x, is_causal=is_causal)
    nn.init.normal_(module.local.weight)
    v = module.qkv(x).chunk(3, dim=-1)[2]
    added = by_loop(module.local.weight.detach(), v.detach(), is_causal) @ module.proj.weight.mT
    torch.testing.assert_close(module(x, is_causal=is_causal), plain + added)


@pytest.mark.parametrize("size", [2, -1, (3, 4), (0, 3), (3, 3, 3)])
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match=r"^local must be an odd k or a pair of odd numbers"):
        LocalBranch(DIM, size)


@pytest.mark.parametrize("grid", [None, (3, 3), (12, 0)])
def test_wrong_grids(grid):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        branch((3, 3))(values(), grid=grid)
    needs = "local=(3, 3) needs grid=(height, width) with height x width = N"
    assert str(caught.value) == f"{needs}, got grid={grid} for tokens (2, 12, 6)"


def test_images_have_no_causal_order():
    with pytest.raises(ValueError, match=r"^local=\(3, 3\) spans an image, which has no causal order"):
        branch((3, 3))(values(), is_causal=True, grid=(3, 4))
