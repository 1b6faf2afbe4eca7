"""Kernelised hash functions: the paper's learned ones, and KLSH, which draws its weights instead."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ecoformer.arguments import shape
from ecoformer.backends.hashing import HashFunctions, project, squared_distances, unit_length
from ecoformer.functional import Surrogate
from ecoformer.hashing.base import Hasher, wide_dtype
from ecoformer.hashing.pairs import CosineLabels, Labels, SparseLabels, find_pairs
from ecoformer.hashing.solver import FitOptions, Tick, learn_bits
from ecoformer.hashing.support import draw_support, spread_support
from ecoformer.operations import Counts, Operations, Product

__all__ = ["MAX_BITS", "KernelData", "KernelHasher", "KlshHasher", "squared_distances", "unit_length"]

MAX_BITS = 64
_SAME = 8
"""Mean squared distance of tokens that are one and the same, at most, in units of rounding."""


class KernelData(NamedTuple):
    """What A is learned from: tokens and features of all samples, head by head."""

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
    """H(Q) = sign(g(Q) A): Gaussian kernels on m support samples, made zero-mean, mixed by learned weights.

    Args:
        num_heads: heads; each has its own hash functions.
        head_dim: D, channels of a head.
        bits: b, length of a code, 1 to 64.
        support: m, the number of support samples.
        sigma: where the kernel width in exp(-d^2 / (2 sigma)) comes from. "stored": the mean squared
            distance of the tokens that `fit` saw. "input": that of the tokens at hand, sample by sample, as
            in the released code; codes then depend on the other tokens of the sample.
        trainable: lets A follow the task's gradient, between fits.
        surrogate: gradient of the sign, see `sign_ste`.
        sign_of_zero: +1 in the paper, 0 in the released code.
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
        sigma: Literal["stored", "input"] = "stored",
        trainable: bool = False,
        surrogate: Surrogate = "hardtanh",
        sign_of_zero: int = 1,
    ) -> None:
        super().__init__(num_heads, head_dim, bits, surrogate=surrogate, sign_of_zero=sign_of_zero)
        if bits > MAX_BITS:
            raise ValueError(f"bits must be from 1 to {MAX_BITS}, got {bits}")
        if support < 1:
            raise ValueError(f"support must be at least 1, got {support}")
        if sigma not in ("stored", "input"):
            raise ValueError(f'sigma must be "stored" or "input", got {sigma!r}')
        self.support, self.sigma_from, self.trainable = support, sigma, trainable
        dtype = wide_dtype()
        self.register_buffer("support_samples", torch.zeros(num_heads, support, head_dim, dtype=dtype))
        self.register_buffer("mean", torch.zeros(num_heads, support, dtype=dtype))
        self.register_buffer("sigma", torch.ones(num_heads, dtype=dtype))
        weight = torch.zeros(num_heads, support, bits, dtype=dtype)
        if trainable:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    @property
    def token_wise(self) -> bool:
        """Whether a token's code depends on that token alone."""
        return self.sigma_from == "stored"

    def project(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """g(Q) A, of root mean square about 1 on the tokens that were fitted."""
        if self.sigma_from == "stored":
            return project(tokens, self._functions())
        dtype = tokens.dtype
        distances = squared_distances(unit_length(tokens), self.support_samples.to(dtype))
        kernel = torch.exp(-distances / (2 * _width(distances, valid)[..., None, None]))
        return (kernel - self.mean.to(dtype).unsqueeze(-2)) @ self.weight.to(dtype)

    def operations(self, batch: int, tokens: int) -> Operations:
        """Kernels on the support samples and products with A. The paper counts no squares of distances."""
        rows, m, heads = batch * tokens, self.support, self.num_heads
        return [
            Product(rows, self.head_dim, m, heads, right="weight", term=Counts(add=2)),
            Counts(mul=2 * m) * (rows * heads),
            Product(rows, m, self.bits, heads, right="weight"),
        ]

    def functions(self) -> HashFunctions | None:
        """Support samples, mean, widths and A, unless the widths are those of the input."""
        known = type(self).project is KernelHasher.project and self.sigma_from == "stored"
        return self._functions() if known and self._bare() else None

    def _functions(self) -> HashFunctions:
        return HashFunctions(self.support_samples, self.mean, self.sigma, self.weight)

    def learn(
        self,
        tokens: Tensor,
        valid: Tensor | None,
        generator: torch.Generator,
        options: FitOptions,
        tick: Tick | None,
    ) -> None:
        """Draw support samples from all tokens, centre the kernel on them, learn A."""
        unit = unit_length(tokens).transpose(0, 1)
        present = None if valid is None else valid.expand(self.num_heads, -1, -1)
        support = draw_support(unit, valid, self.support, generator)
        if self._moves_support and options.support == "kmeans":
            support = spread_support(unit, valid, support)
        distances = squared_distances(unit, support.unsqueeze(1))
        everyone = None if valid is None else valid.reshape(1, -1)
        sigma = _width(distances.flatten(1, 2), everyone)
        widths = sigma.view(-1, 1, 1, 1)
        if self.sigma_from == "input":
            widths = _width(distances.transpose(0, 1), valid).mT[..., None, None]
        kernel = torch.exp(-distances / (2 * widths))
        mean = _mean_over_tokens(kernel.flatten(1, 2), everyone)
        features = kernel - mean[:, None, None, :]
        if present is not None:
            features = features.masked_fill(~present.unsqueeze(-1), 0)
        rounding = max(torch.finfo(x.dtype).eps for x in (tokens, self.weight))
        # Squared distances of unit tokens are off by about twice the rounding; the kernel divides by 2 sigma.
        data = KernelData(unit, present, features, support, sigma, rounding / sigma)
        weight = self._solve(data, generator, options, tick)
        same = _mean_distance(distances.flatten(1, 2), everyone) <= _SAME * rounding
        if bool(same.any()):
            _warn_of_same(same, tokens)
            weight = weight.masked_fill(same.view(-1, 1, 1), 0)
        self.support_samples.copy_(support)
        self.sigma.copy_(sigma)
        self.mean.copy_(mean)
        self.weight.copy_(_unit_scale(weight, features, present))

    def _solve(
        self, data: KernelData, generator: torch.Generator, options: FitOptions, tick: Tick | None
    ) -> Tensor:
        """A (H, m, b)."""
        labels: Labels
        if options.target == "cosine":
            labels = CosineLabels(data.unit, data.present)
        else:
            labels = SparseLabels(find_pairs(data.unit, options.pairs, data.present))
        return learn_bits(data.features, labels, self.bits, options, generator, tick, data.noise)


class KlshHasher(KernelHasher):
    """Kernelised locality-sensitive hashing: random hyperplanes in the kernel's own feature space.

    A bit's weights are K^(-1/2) times the indicator of a few random support samples, with K the centred
    kernel matrix of the support samples (Kulis and Grauman, 2009). Nothing is learned beyond that, and the
    support samples stay the random tokens they were drawn as.
    """

    _moves_support = False

    def _solve(
        self, data: KernelData, generator: torch.Generator, options: FitOptions, tick: Tick | None
    ) -> Tensor:
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
        if tick is not None:
            for _ in range(self.bits * options.passes):
                tick()
        return weight.to(data.features.dtype)


def _mean_over_tokens(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of (..., N, m) over the tokens that are no padding; `valid` (B, N)."""
    if valid is None:
        return x.mean(dim=-2)
    present = valid.unsqueeze(-1) if x.ndim == 3 else valid[:, None, :, None]
    return x.masked_fill(~present, 0).sum(dim=-2) / present.sum(dim=-2).clamp_min(1)


def _width(distances: Tensor, valid: Tensor | None) -> Tensor:
    """sigma (...): the mean of the squared distances (..., N, m), 1 where all are zero."""
    mean = _mean_distance(distances, valid)
    return torch.where(mean == 0, 1, mean)


def _mean_distance(distances: Tensor, valid: Tensor | None) -> Tensor:
    return _mean_over_tokens(distances, valid).mean(dim=-1)


def _warn_of_same(same: Tensor, tokens: Tensor) -> None:
    heads = ", ".join(str(head) for head in same.nonzero().flatten().tolist())
    warnings.warn(
        f"tokens {shape(tokens)} are all the same, up to their length and to rounding, in head {heads}: "
        "nothing can be learned from them, and all tokens get one code there",
        stacklevel=5,  # whoever called `fit`
    )


def _unit_scale(weight: Tensor, features: Tensor, present: Tensor | None) -> Tensor:
    """Weights scaled so that g(Q) A has root mean square 1: signs stay, and the sign's stand-in sees them.

    The gradient passes where |g(Q) A| <= 1, so the scale that fitting leaves open decides who learns.
    """
    y = features.flatten(1, 2) @ weight
    share = 1.0 if present is None else present.float().mean().clamp_min(1e-30)
    size = (y.square().mean(dim=1, keepdim=True) / share).sqrt()
    return weight / torch.where(size == 0, 1, size)
