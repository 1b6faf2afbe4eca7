"""The local branch: a depth-wise convolution of v, for models without convolutions.

Codes of few bits hardly single out a neighbour: the paper's affinity spans a factor of three only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.arguments import shape


class LocalBranch(nn.Module):
    """Depth-wise convolution over k neighbours of the sequence, or k x k of an image.

    It starts at zero, so adding it to a trained layer changes nothing until it learns.
    """

    def __init__(self, dim: int, size: int | tuple[int, int]) -> None:
        super().__init__()
        sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
        if len(sizes) not in (1, 2) or any(type(s) is not int or s < 1 or s % 2 == 0 for s in sizes):
            raise ValueError(f"local must be an odd k or a pair of odd numbers (k, k), got {size!r}")
        self.size, self.sizes = (size if isinstance(size, int) else sizes), sizes
        self.weight = nn.Parameter(torch.zeros(dim, 1, *sizes))

    def forward(
        self,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """Values (B, N, dim) to (B, N, dim); in causal order, each token and earlier neighbours only.

        The `prefix` tokens before an image's `grid` get zero.
        """
        if key_padding_mask is not None:
            v = v.masked_fill(key_padding_mask.unsqueeze(-1), 0)
        if len(self.sizes) == 1:
            return self._sequence(v, is_causal)
        return F.pad(self._image(v[:, prefix:], is_causal, grid), (0, 0, prefix, 0))

    def _sequence(self, v: Tensor, is_causal: bool) -> Tensor:
        (k,) = self.sizes
        before = k - 1 if is_causal else k // 2
        return self._sums(F.pad(v.mT, (before, k - 1 - before)), [0]).mT

    def _image(self, v: Tensor, is_causal: bool, grid: tuple[int, int] | None) -> Tensor:
        if is_causal:
            raise ValueError(f"local={self.sizes} spans an image, which has no causal order: use local=k")
        if grid is None or grid[0] * grid[1] != v.shape[1]:
            raise ValueError(
                f"local={self.sizes} needs grid=(height, width) with height x width = N, "
                f"got grid={grid} for tokens {shape(v)}"
            )
        image = v.mT.reshape(*v.mT.shape[:2], *grid)
        return self._sums(image, [s // 2 for s in self.sizes]).flatten(2).mT

    def _sums(self, v: Tensor, padding: list[int]) -> Tensor:
        """The convolution of values (B, dim, ...)."""
        return depthwise(v, self.weight, padding)


def depthwise(v: Tensor, weight: Tensor, padding: list[int]) -> Tensor:
    """Depth-wise convolution of a sequence (B, C, N) or an image (B, C, height, width)."""
    convolve = F.conv1d if v.ndim == 3 else F.conv2d
    return convolve(v, weight, padding=padding, groups=v.shape[1])
