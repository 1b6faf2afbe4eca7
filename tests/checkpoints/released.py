"""Checkpoints laid out like the released ones, and what the released code computes from them.

Written from the facts page about that code and from nothing of ecoformer, with plain dense operators, so that
the loader has something independent to agree with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


class Variant(NamedTuple):
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    ratios: tuple[int, ...]
    head_dim: int

    @property
    def twins(self) -> bool:
        # Only Twins has heads that are narrower than its first stage.
        return self.head_dim < self.dims[0]


WIDE = (64, 128, 320, 512)
VARIANTS = {
    "pvt_v2_b0": Variant((32, 64, 160, 256), (2, 2, 2, 2), (8, 8, 4, 4), 32),
    "pvt_v2_b1": Variant(WIDE, (2, 2, 2, 2), (8, 8, 4, 4), 64),
    "pvt_v2_b2": Variant(WIDE, (3, 4, 6, 3), (8, 8, 4, 4), 64),
    "pvt_v2_b3": Variant(WIDE, (3, 4, 18, 3), (8, 8, 4, 4), 64),
    "pvt_v2_b4": Variant(WIDE, (3, 8, 27, 3), (8, 8, 4, 4), 64),
    "pvt_v2_b5": Variant(WIDE, (3, 6, 40, 3), (4, 4, 4, 4), 64),
    "twins_svt_small": Variant((64, 128, 256, 512), (2, 2, 10, 4), (4, 4, 4, 4), 32),
}


class _Draw:
    """Random tensors, sized so that activations keep their scale and every one of them matters."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.state: State = {}

    def normal(self, *shape: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(*shape, device="meta")
        return torch.randn(*shape, generator=self.generator)

    def weights(self, name: str, *shape: int) -> None:
        """A linear layer or a convolution."""
        self.state[f"{name}.weight"] = self.normal(*shape) / math.sqrt(math.prod(shape[1:]))
        self.state[f"{name}.bias"] = 0.1 * self.normal(shape[0])

    def norm(self, name: str, dim: int) -> None:
        self.state[f"{name}.weight"] = 1 + 0.1 * self.normal(dim)
        self.state[f"{name}.bias"] = 0.1 * self.normal(dim)

    def attention(self, name: str, dim: int, hashing: tuple[int, int, int] | None) -> None:
        """A softmax layer, or an eco layer for `hashing` = (head_dim, bits, support)."""
        if hashing is None:
            self.weights(f"{name}.qkv", 3 * dim, dim)
        else:
            self.weights(f"{name}.to_qk", dim, dim)
            self.weights(f"{name}.to_v", dim, dim)
            self._hashing(f"{name}.fast_attention", dim // hashing[0], *hashing)
        self.weights(f"{name}.proj", dim, dim)

    def _hashing(self, name: str, heads: int, head_dim: int, bits: int, support: int) -> None:
        self.state[f"{name}.projection_matrix"] = self.normal(head_dim * 2, head_dim)
        a = self.normal(heads, bits, support)
        a[0, 0] = 0  # a bit whose projection is exactly zero shows what sign(0) is
        self.state[f"{name}.ksh.A"] = a
        # exp(-d^2 / (2 sigma)) is about exp(-1/2) on average, so both signs come up.
        mean = math.exp(-0.5) + 0.02 * self.normal(heads, support)
        self.state[f"{name}.ksh.mvec"] = mean[None, :, None, :]
        self.state[f"{name}.ksh.anchor"] = self.normal(1, heads, support, head_dim) / math.sqrt(head_dim)


def state_dict(
    variant: str,
    *,
    mechanism: str = "eco",
    num_classes: int,
    bits: int = 16,
    support: int = 25,
    seed: int,
    depths: tuple[int, ...] | None = None,
    in_chans: int = 3,
    device: str = "cpu",
) -> State:
    """A random checkpoint in the released layout; `depths` shrinks it, device "meta" leaves only shapes."""
    dims, full, ratios, head_dim = VARIANTS[variant]
    twins, draw, before = VARIANTS[variant].twins, _Draw(seed, device), in_chans
    for i, (dim, depth, ratio) in enumerate(zip(dims, depths or full, ratios, strict=True)):
        embed = f"patch_embeds.{i}" if twins else f"patch_embed{i + 1}"
        size = ((4, 2, 2, 2) if twins else (7, 3, 3, 3))[i]
        draw.weights(f"{embed}.proj", dim, before, size, size)
        draw.norm(f"{embed}.norm", dim)
        if twins:
            draw.weights(f"pos_block.{i}.proj.0", dim, 1, 3, 3)
        else:
            draw.norm(f"norm{i + 1}", dim)
        hashing = (head_dim, bits, support) if mechanism == "eco" and i < 3 else None
        for j in range(depth):
            block = f"blocks.{i}.{j}" if twins else f"block{i + 1}.{j}"
            draw.norm(f"{block}.norm1", dim)
            draw.attention(f"{block}.attn", dim, hashing)
            draw.norm(f"{block}.norm2", dim)
            draw.weights(f"{block}.mlp.fc1", ratio * dim, dim)
            if not twins:
                draw.weights(f"{block}.mlp.dwconv.dwconv", ratio * dim, 1, 3, 3)
            draw.weights(f"{block}.mlp.fc2", dim, ratio * dim)
        before = dim
    if twins:
        draw.norm("norm", dims[-1])
    draw.weights("head", num_classes, dims[-1])
    return draw.state


def forward(state: State, images: Tensor, head_dim: int) -> Tensor:
    """Logits that the released code computes, in the images' dtype."""
    state = {key: value.to(images.dtype) for key, value in state.items()}
    return _twins(state, images, head_dim) if "norm.weight" in state else _pvt_v2(state, images, head_dim)


def codes(state: State, layer: str, heads: Tensor) -> Tensor:
    """Hash codes (B, H, N, b) of queries (B, H, N, D)."""
    ksh = f"{layer}.fast_attention.ksh"
    unit = heads / heads.norm(dim=-1, keepdim=True)
    anchors = state[f"{ksh}.anchor"].to(heads)
    distances = (unit.unsqueeze(-2) - anchors.unsqueeze(-3)).square().sum(dim=-1)
    sigma = distances.mean(dim=(-2, -1), keepdim=True)
    features = torch.exp(-distances / (2 * sigma)) - state[f"{ksh}.mvec"].to(heads)
    return torch.sign(torch.einsum("bhnm,hrm->bhnr", features, state[f"{ksh}.A"].to(heads)))


def eco_attention(state: State, layer: str, x: Tensor, head_dim: int) -> Tensor:
    qk = _split(_linear(state, f"{layer}.to_qk", x), head_dim)
    v = _split(_linear(state, f"{layer}.to_v", x), head_dim)
    h = codes(state, layer, qk)
    products, bias = h @ h.mT, h.shape[-1] + 1
    numerator = products @ v + bias * v
    denominator = products.sum(dim=-1, keepdim=True) + bias * h.shape[-2]
    return _linear(state, f"{layer}.proj", _merge(numerator / denominator))


def softmax_attention(state: State, layer: str, x: Tensor, head_dim: int) -> Tensor:
    q, k, v = (_split(part, head_dim) for part in _linear(state, f"{layer}.qkv", x).chunk(3, dim=-1))
    weights = torch.softmax(q @ k.mT / math.sqrt(head_dim), dim=-1)
    return _linear(state, f"{layer}.proj", _merge(weights @ v))


def _pvt_v2(state: State, x: Tensor, head_dim: int) -> Tensor:
    for i in range(1, 5):
        embed, stride = f"patch_embed{i}", 4 if i == 1 else 2
        x, grid = _patches(state, embed, x, stride, padding=3 if i == 1 else 1)
        for block in _blocks(state, f"block{i}."):
            x = _attend(state, block, x, head_dim)
            x = x + _mlp(state, f"{block}.mlp", _norm(state, f"{block}.norm2", x), grid)
        x = _image(_norm(state, f"norm{i}", x), grid)
    return _linear(state, "head", x.mean(dim=(2, 3)))


def _twins(state: State, x: Tensor, head_dim: int) -> Tensor:
    for i in range(4):
        x, grid = _patches(state, f"patch_embeds.{i}", x, 4 if i == 0 else 2, padding=0)
        for j, block in enumerate(_blocks(state, f"blocks.{i}.")):
            x = _attend(state, block, x, head_dim)
            x = x + _mlp(state, f"{block}.mlp", _norm(state, f"{block}.norm2", x), None)
            if j == 0:
                x = x + _depthwise(state, f"pos_block.{i}.proj.0", x, grid)
        x = _image(x, grid)
    return _linear(state, "head", _norm(state, "norm", x.flatten(2).mT).mean(dim=1))


def _attend(state: State, block: str, x: Tensor, head_dim: int) -> Tensor:
    layer, normed = f"{block}.attn", _norm(state, f"{block}.norm1", x)
    attend = softmax_attention if f"{layer}.qkv.weight" in state else eco_attention
    return x + attend(state, layer, normed, head_dim)


def _mlp(state: State, name: str, x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    x = _linear(state, f"{name}.fc1", x)
    if grid is not None:
        x = _depthwise(state, f"{name}.dwconv.dwconv", x, grid)
    return _linear(state, f"{name}.fc2", F.gelu(x))


def _patches(state: State, name: str, x: Tensor, stride: int, padding: int) -> tuple[Tensor, tuple[int, int]]:
    x = F.conv2d(x, state[f"{name}.proj.weight"], state[f"{name}.proj.bias"], stride, padding)
    grid = (x.shape[2], x.shape[3])
    return _norm(state, f"{name}.norm", x.flatten(2).mT, eps=1e-5), grid


def _depthwise(state: State, name: str, x: Tensor, grid: tuple[int, int]) -> Tensor:
    weight = state[f"{name}.weight"]
    x = F.conv2d(_image(x, grid), weight, state[f"{name}.bias"], padding=1, groups=len(weight))
    return x.flatten(2).mT


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].mT + state[f"{name}.bias"]


def _norm(state: State, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def _image(x: Tensor, grid: tuple[int, int]) -> Tensor:
    return x.mT.unflatten(2, grid)


def _split(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _merge(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _blocks(state: State, prefix: str) -> Iterator[str]:
    """Names of a stage's blocks, in order."""
    j = 0
    while f"{prefix}{j}.norm1.weight" in state:
        yield f"{prefix}{j}"
        j += 1
