"""Learning the bits one by one: Eq. (14) of the paper in O(N (l + b)) a step.

The residual b Y - sum_t h_t h_t^T is never formed. Y has at most 4 l numbers a row and the rest is of rank b:
h^T R h = b h^T Y h - sum_t (h^T h_t)^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecoformer.hashing.pairs import SparseLabels

_LEARNING_RATE, _MOMENTUM = 0.015, 0.9
_ABOVE_NOISE = 10
"""A bit may depend only on features this many times larger than their rounding error."""


@dataclass(frozen=True)
class FitOptions:
    """How hash functions are learned.

    Attributes:
        support: "kmeans" moves the random support samples to the centres of their neighbourhoods, which
            improves recall; "random" leaves them where they were drawn, as in the paper.
        pairs: l, the number of similar and of dissimilar tokens of each token.
        steps: gradient steps per bit.
    """

    support: Literal["kmeans", "random"] = "kmeans"
    pairs: int = 10
    steps: int = 100

    def __post_init__(self) -> None:
        if self.support not in ("kmeans", "random"):
            raise ValueError(f'FitOptions.support must be "kmeans" or "random", got {self.support!r}')
        for name, least in (("pairs", 1), ("steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"FitOptions.{name} must be at least {least}, got {getattr(self, name)}")


def learn_bits(features: Tensor, labels: SparseLabels, bits: int, steps: int, noise: Tensor) -> Tensor:
    """Weights A (H, m, b) from zero-mean kernel features (H, B, N, m); features of padding are zero.

    Each bit starts at the leading eigenvector of its relaxed problem, as in kernel-based supervised hashing,
    and takes `steps` gradient steps. `noise` (H,) is the rounding error of the features.
    """
    return _Solver(features, labels, bits, steps, noise).solve()


class _Solver:
    """Solves all heads together: a bit is (H, B, N), its weights are (H, m)."""

    def __init__(self, features: Tensor, labels: SparseLabels, bits: int, steps: int, noise: Tensor) -> None:
        self.labels, self.bits, self.steps = labels, bits, steps
        self.sizes = features.shape[:3]
        self.present = (features != 0).any(dim=-1).to(features.dtype)
        self.tokens = self.present.sum(dim=(1, 2)).clamp_min(1)
        self.features = features.flatten(1, 2)
        self.basis = _whitening(self.features, self.tokens, noise)
        self.unused = (self.basis == 0).all(dim=-2)
        self.features = self.features @ self.basis
        self.covariance = self.features.mT @ self.features / self.tokens.view(-1, 1, 1)
        self.codes = features.new_zeros(*self.sizes, bits)
        self.weights = features.new_zeros(features.shape[0], features.shape[3], bits)

    def solve(self) -> Tensor:
        """Learn bit after bit; returns A."""
        curvature = self._curvature()
        for r in range(self.bits):
            others = self.codes[..., :r]
            best = self._descend(*self._choose_start(others, curvature), others)
            self.weights[..., r] = best
            self.codes[..., r] = self._bit(self._project(best))
        return self.basis @ self.weights

    def _choose_start(self, others: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (H, m) to start a bit from, and their discrete score (H,)."""
        mixed = self._by_sample().mT @ others
        relaxed = (curvature - (mixed @ mixed.mT).sum(dim=1)).double()
        # If all other directions do harm, the unused ones, which do nothing, would seem the best.
        last = 1 + 2 * relaxed.flatten(1).norm(dim=1, keepdim=True)
        relaxed = relaxed - torch.diag_embed(torch.where(self.unused, last, 0))
        start = torch.linalg.eigh(relaxed).eigenvectors[..., -1].to(self.weights)
        bit = self._bit(self._project(start))
        return start, self._score(bit, self._pull(bit, others))

    def _descend(self, best: Tensor, score: Tensor, others: Tensor) -> Tensor:
        """Gradient steps from the best weights so far; returns the best seen, never worse ones.

        The gradient passes where |y| <= 1, as that of hard tanh. It has unit length, and the step decays.
        """
        weights, velocity = best, torch.zeros_like(best)
        for step in range(self.steps):
            weights = weights / self._root_mean_square(weights)
            y = self._project(weights)
            bit = self._bit(y)
            pull = self._pull(bit, others)
            best, score = _where_higher(best, score, weights, self._score(bit, pull))
            gradient = self._gradient(pull * (y.abs() <= 1))
            gradient = gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            gradient = gradient * (1 - step / self.steps)
            velocity = _MOMENTUM * velocity + gradient
            weights = weights + _LEARNING_RATE * (gradient + _MOMENTUM * velocity)
        bit = self._bit(self._project(weights))
        return _where_higher(best, score, weights, self._score(bit, self._pull(bit, others)))[0]

    def _project(self, weights: Tensor) -> Tensor:
        return (self.features @ weights.unsqueeze(-1)).view(self.sizes)

    def _bit(self, y: Tensor) -> Tensor:
        return torch.where(y >= 0, self.present, -self.present)

    def _pull(self, bit: Tensor, others: Tensor) -> Tensor:
        """Residual times a bit: b Y h - sum_t h_t (h_t . h), for each sample."""
        bit = bit.unsqueeze(-1)
        return (self.bits * (self.labels @ bit) - others @ (others.mT @ bit)).squeeze(-1)

    def _score(self, bit: Tensor, pull: Tensor) -> Tensor:
        """h^T R h, summed over samples: (H,)."""
        return (bit * pull).sum(dim=(1, 2))

    def _gradient(self, pull: Tensor) -> Tensor:
        """Gradient of h^T R h / (N b), averaged over samples and heads as the released code does."""
        heads = self.sizes[0]
        flat = (self.features.mT @ pull.reshape(heads, -1, 1)).squeeze(-1)
        return flat * (2 / (self.bits * heads * self.tokens.unsqueeze(-1)))

    def _root_mean_square(self, weights: Tensor) -> Tensor:
        """Root mean square of the projections (H, 1), 1 where all are zero."""
        row = weights.unsqueeze(-2)
        size = (row @ self.covariance @ row.mT).clamp_min(0).sqrt().squeeze(-1)
        return torch.where(size == 0, 1, size)

    def _curvature(self) -> Tensor:
        """b G^T Y G: the quadratic form of the labels without sign()."""
        pulled = (self.labels @ self._by_sample()).flatten(1, 2)
        return self.features.mT @ (self.bits * pulled)

    def _by_sample(self) -> Tensor:
        return self.features.view(*self.sizes, -1)


def _where_higher(best: Tensor, score: Tensor, weights: Tensor, new_score: Tensor) -> tuple[Tensor, Tensor]:
    """For each head, the weights with the higher score."""
    higher = new_score > score
    return torch.where(higher[:, None], weights, best), torch.where(higher, new_score, score)


def _whitening(features: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    """Basis (H, m, m) in which the features (H, T, m) are uncorrelated and of equal size.

    Directions that the tokens hardly use stay small: dividing by their size would only magnify noise.
    Directions where the features are not well above their rounding error become columns of zeros, such as
    those of two support samples that are the same token. The strongest stay, however weak they are.
    """
    square = (features.mT @ features).double() / tokens.view(-1, 1, 1)
    exact = torch.stack([wide.mT @ wide for wide in map(Tensor.double, features)]) / tokens.view(-1, 1, 1)
    used = _above_noise(torch.linalg.eigvalsh(exact), noise)
    # Sums in fp32 cannot tell a weak direction from a missing one; they suffice where none is missing.
    square = torch.where(used.all(dim=-1).view(-1, 1, 1), square, exact)
    values, vectors = torch.linalg.eigh(square)
    least = (values[..., -1:] * 1e-6).clamp_min(1e-30)
    size = torch.where(used, values.clamp_min(least).rsqrt(), 0)
    basis: Tensor = vectors * size.unsqueeze(-2)
    return basis.to(features.dtype)


def _above_noise(variances: Tensor, noise: Tensor) -> Tensor:
    """Which of the variances (H, m), in rising order, are more than rounding errors."""
    largest = variances[..., -1:]
    own = largest * variances.shape[-1] * torch.finfo(variances.dtype).eps
    of_features = (_ABOVE_NOISE * noise.to(variances).unsqueeze(-1)).square()
    return variances > torch.maximum(torch.minimum(of_features, largest / 10), own)
