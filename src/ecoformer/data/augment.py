"""Batches of pictures made ready for a model on their own device.

Every picture gets draws of its own, which torchvision's transforms do not give the pictures of a batch. The
same generator state gives the same pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ecoformer.arguments import shape


def augment(
    images: Tensor,
    generator: torch.Generator,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    pad: int = 0,
    flip: bool = False,
) -> Tensor:
    """Bytes (B, C, H, W) for training, as float (B, C, size, size).

    In this order: crop at random after padding with `pad` black pixels, mirror half of the pictures, resize,
    normalise. The generator is on the device of the images.
    """
    if pad:
        images = _shifted(images, generator, pad)
    if flip:
        flips = torch.rand(len(images), generator=generator, device=images.device) < 0.5
        images = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
    return plain(images, size=size, mean=mean, std=std)


def plain(images: Tensor, *, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes (B, C, H, W) for evaluation, as float (B, C, size, size): resized and normalised."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 (B, C, H, W), got {images.dtype} {shape(images)}")
    x = images.float()
    if images.shape[-2:] != (size, size):
        smaller = max(images.shape[-2:]) > size
        x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=smaller)
    scale = torch.tensor(std, device=x.device).view(-1, 1, 1)
    shift = torch.tensor(mean, device=x.device).view(-1, 1, 1)
    return (x / 255 - shift) / scale


def _shifted(images: Tensor, generator: torch.Generator, pad: int) -> Tensor:
    count, height, width, device = len(images), *images.shape[-2:], images.device
    draws = pad + torch.randint(-pad, pad + 1, (2, count, 1), generator=generator, device=device)
    rows = (draws[0] + torch.arange(height, device=device)).unsqueeze(2)
    columns = (draws[1] + torch.arange(width, device=device)).unsqueeze(1)
    batch = torch.arange(count, device=device).view(-1, 1, 1)
    # Channels last, so that one index (B, H, W) gathers complete pixels.
    return F.pad(images, (pad,) * 4).permute(0, 2, 3, 1)[batch, rows, columns].permute(0, 3, 1, 2)
