"""Kernelised hash functions: the paper's learned ones, and KLSH, which draws its weights instead."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.arguments import shape
from ecoformer.hashing.base import Hasher, wide_dtype
from ecoformer.hashing.pairs import SparseLabels, find_pairs
from ecoformer.hashing.solver import FitOptions, learn_bits
from ecoformer.operations import Counts, Operations, Product
from ecoformer.ops.eager import squared_distances, unit_length
from ecoformer.ops.hash_tokens import hash_tokens
from ecoformer.randomness import forked

MAX_BITS = 64
_SAME = 8
"""Tokens count as equal up to this mean squared distance, in units of the rounding error."""
_KMEANS_STEPS = 10
"""The centres hardly move after that, and the codes no longer change."""


class KernelData(NamedTuple):
    """What A is learned from: tokens and features of all samples, by head."""

    unit: Tensor
    """(H, B, N, D) tokens of unit length."""
    present: Tensor | None
    """(H, B, N), False for padding."""
    features: Tensor
    """(H, B, N, m) zero-mean kernel features, zero for padding."""
    support: Tensor
    """(H, m, D) support samples."""
    sigma: Tensor
    """(H,) kernel widths."""
    noise: Tensor
    """(H,) rounding error of the features."""


class KernelHasher(Hasher):
    """H(Q) = sign(g(Q) A): zero-mean Gaussian kernels on m support samples, mixed by learned weights.

    The kernel is exp(-d^2 / (2 sigma)); sigma is the mean squared distance of the tokens that `fit` saw.

    Args:
        num_heads: heads; each has its own hash functions.
        head_dim: D, channels of a head.
        bits: b, length of a code, 1 to 64.
        support: m, the number of support samples.
        trainable: makes A a parameter, trained by the task's gradient between fits.
    """

    _moves_support = True
    support_samples: Tensor
    mean: Tensor
    sigma: Tensor
    weight: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        bits: int = 16,
        support: int = 25,
        *,
        trainable: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, bits)
        if bits > MAX_BITS:
            raise ValueError(f"bits must be from 1 to {MAX_BITS}, got {bits}")
        if support < 1:
            raise ValueError(f"support must be at least 1, got {support}")
        self.support, self.trainable = support, trainable
        dtype = wide_dtype()
        self.register_buffer("support_samples", torch.zeros(num_heads, support, head_dim, dtype=dtype))
        self.register_buffer("mean", torch.zeros(num_heads, support, dtype=dtype))
        self.register_buffer("sigma", torch.ones(num_heads, dtype=dtype))
        weight = torch.zeros(num_heads, support, bits, dtype=dtype)
        if trainable:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        # The global random state stays: `fit` replaces what is drawn here, other weights must not change.
        self.reset_parameters(forked())

    def project(self, tokens: Tensor) -> Tensor:
        """g(Q) A, with a root mean square of about 1 on the tokens of `fit`."""
        return hash_tokens(*self._functions(tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        """Packed codes where no gradient is wanted."""
        return hash_tokens(*self._functions(tokens), packed=True)

    def _functions(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return tokens, self.support_samples, self.mean, self.sigma, self.weight

    def operations(self, batch: int, tokens: int) -> Operations:
        """Kernels on the support samples and products with A. The paper counts no squares of distances."""
        rows, m, heads = batch * tokens, self.support, self.num_heads
        return [
            Product(rows, self.head_dim, m, heads, right="weight", term=Counts(add=2)),
            Counts(mul=2 * m) * (rows * heads),
            Product(rows, m, self.bits, heads, right="weight"),
        ]

    def draw(self, generator: torch.Generator) -> None:
        """Random support samples and weights; g(Q) A has mean 0 and root mean square 1 on random tokens."""
        support = torch.randn(self.support_samples.shape, generator=generator, device="cpu")
        weight = torch.randn(self.weight.shape, generator=generator, device="cpu")
        self.support_samples.copy_(unit_length(support))
        # Unit vectors with cosine c have the squared distance 2 - 2 c; c has variance 1 / head_dim.
        self.sigma.fill_(2)
        self.mean.fill_(math.exp(-0.5) * (1 + 1 / (8 * self.head_dim)))
        self.weight.copy_(weight * (2 * math.exp(0.5) * math.sqrt(self.head_dim / self.support)))

    def learn(
        self, tokens: Tensor, valid: Tensor | None, generator: torch.Generator, options: FitOptions
    ) -> None:
        """Draw support samples from all tokens, centre the kernel on them, learn A."""
        unit = unit_length(tokens).transpose(0, 1)
        present = None if valid is None else valid.expand(self.num_heads, -1, -1)
        support = draw_support(unit, valid, self.support, generator)
        if self._moves_support and options.support == "kmeans":
            support = spread_support(unit, valid, support)
        distances = squared_distances(unit, support.unsqueeze(1))
        all_valid = None if valid is None else valid.reshape(1, -1)
        mean_distance = _mean_over_tokens(distances.flatten(1, 2), all_valid).mean(dim=-1)
        sigma = torch.where(mean_distance == 0, 1, mean_distance)
        kernel = torch.exp(-distances / (2 * sigma.view(-1, 1, 1, 1)))
        mean = _mean_over_tokens(kernel.flatten(1, 2), all_valid)
        features = kernel - mean[:, None, None, :]
        if present is not None:
            features = features.masked_fill(~present.unsqueeze(-1), 0)
        rounding = max(torch.finfo(x.dtype).eps for x in (tokens, self.weight))
        # Squared distances of unit tokens are off by about twice the rounding; the kernel divides by 2 sigma.
        data = KernelData(unit, present, features, support, sigma, rounding / sigma)
        weight = self._solve(data, generator, options)
        same = mean_distance <= _SAME * rounding
        if bool(same.any()):
            heads = ", ".join(str(head) for head in same.nonzero().flatten().tolist())
            warnings.warn(
                f"tokens {shape(tokens)} are all the same in head {heads}, up to length and rounding: "
                "nothing can be learned from them, and all tokens get the same code there",
                stacklevel=4,  # the caller of `fit`
            )
            weight = weight.masked_fill(same.view(-1, 1, 1), 0)
        self.support_samples.copy_(support)
        self.sigma.copy_(sigma)
        self.mean.copy_(mean)
        self.weight.copy_(_unit_scale(weight, features, present))

    def _solve(self, data: KernelData, generator: torch.Generator, options: FitOptions) -> Tensor:
        """A (H, m, b)."""
        labels = SparseLabels(find_pairs(data.unit, options.pairs, data.present))
        return learn_bits(data.features, labels, self.bits, options.steps, data.noise)


class KlshHasher(KernelHasher):
    """Kernelised locality-sensitive hashing: random hyperplanes in the kernel's own feature space.

    A bit's weights are K^(-1/2) times the indicator of a few random support samples, with K the centred
    kernel matrix of the support samples (Kulis and Grauman, 2009). Nothing else is learned, and the support
    samples stay the random tokens that were drawn.
    """

    _moves_support = False

    def _solve(self, data: KernelData, generator: torch.Generator, options: FitOptions) -> Tensor:
        distances = squared_distances(data.support, data.support)
        kernel = torch.exp(-distances / (2 * data.sigma.view(-1, 1, 1))).double()
        centred = kernel - kernel.mean(dim=-1, keepdim=True) - kernel.mean(dim=-2, keepdim=True)
        centred = centred + kernel.mean(dim=(-2, -1), keepdim=True)
        values, vectors = torch.linalg.eigh(centred)
        usable = values > values[..., -1:] * 1e-6
        inverse_roots = torch.where(usable, values.clamp_min(1e-30).rsqrt(), 0)
        root = (vectors * inverse_roots.unsqueeze(-2)) @ vectors.mT
        draws = torch.rand(self.num_heads, self.support, self.bits, generator=generator, device="cpu")
        chosen = draws.argsort(dim=1).argsort(dim=1) < max(1, self.support // 3)
        weight: Tensor = root @ chosen.to(root)
        return weight.to(data.features.dtype)


def draw_support(unit: Tensor, valid: Tensor | None, count: int, generator: torch.Generator) -> Tensor:
    """`count` random tokens of every head (H, m, D), from all samples' unit tokens (H, B, N, D)."""
    heads, batch, n, dim = unit.shape
    candidates = torch.arange(batch * n, device="cpu")
    if valid is not None:
        candidates = candidates[valid.flatten().cpu()]
    if len(candidates) < count:
        raise ValueError(
            f"tokens {shape(unit.transpose(0, 1))} hold {len(candidates)} tokens a head (padding excluded), "
            f"fewer than support={count}: pass more tokens or lower support"
        )
    picks = [
        candidates[torch.randperm(len(candidates), generator=generator, device="cpu")] for _ in range(heads)
    ]
    index = torch.stack(picks)[:, :count, None].expand(-1, -1, dim).to(unit.device)
    return unit.flatten(1, 2).gather(1, index)


def spread_support(unit: Tensor, valid: Tensor | None, support: Tensor) -> Tensor:
    """Support samples after k-means: each becomes the mean of the tokens nearest to it."""
    points = unit.flatten(1, 2)
    weight = points.new_ones(points.shape[1])
    if valid is not None:
        weight = valid.flatten().to(points.dtype)
        points = points.masked_fill(~valid.flatten().unsqueeze(-1), 0)
    for _ in range(_KMEANS_STEPS):
        nearest = (points @ support.mT - support.square().sum(dim=-1).unsqueeze(1) / 2).argmax(dim=-1)
        member = F.one_hot(nearest, support.shape[1]).to(points.dtype) * weight.unsqueeze(-1)
        size = member.sum(dim=1).unsqueeze(-1)
        support = torch.where(size > 0, (member.mT @ points) / size.clamp_min(1), support)
    return support


def _mean_over_tokens(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of (H, N, m) over tokens that are not padding; `valid` (1, N)."""
    if valid is None:
        return x.mean(dim=-2)
    present = valid.unsqueeze(-1)
    return x.masked_fill(~present, 0).sum(dim=-2) / present.sum(dim=-2).clamp_min(1)


def _unit_scale(weight: Tensor, features: Tensor, present: Tensor | None) -> Tensor:
    """Weights scaled so that g(Q) A has root mean square 1.

    Signs do not change. But the gradient passes where |g(Q) A| <= 1, and fitting leaves the scale open.
    """
    y = features.flatten(1, 2) @ weight
    share = 1.0 if present is None else present.float().mean().clamp_min(1e-30)
    size = (y.square().mean(dim=1, keepdim=True) / share).sqrt()
    return weight / torch.where(size == 0, 1, size)
