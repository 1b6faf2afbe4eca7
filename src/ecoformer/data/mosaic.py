"""Mosaics: pictures of small tiles whose symbols tell the colours of the grey ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Splits

TILE = 4
"""Pixels of a tile's side."""
_CHUNK = 256
_COLOURED, _STAMPED = 70, 50
"""Contrast of colours and of symbols, around grey."""


@register_dataset("mosaic")
def mosaic(
    *,
    side: int = 32,
    symbols: int = 15,
    colours: int = 8,
    grey: float = 0.5,
    count: int = 2_000,
    test_count: int = 200,
    seed: int = 0,
) -> Splits:
    """Every tile carries one of a few symbols. In one picture, tiles of one symbol have one colour.

    Some tiles are grey. Their colour is that of the coloured tiles with the same symbol, anywhere in the
    picture. Which symbol has which colour is drawn for every picture, so it cannot be learned: it must be
    looked up. Targets are the colours of all tiles, row by row; in the test data, of grey tiles only.

    Args:
        side: tiles of a side; a picture has 4 `side` pixels in height and width.
        symbols: different symbols, at most 30: stripes and checks of 4 x 4 pixels, half of them bright.
        colours: different colours, equally far apart in hue.
        grey: share of grey tiles.
        count: pictures to learn from.
        test_count: pictures to test on.
        seed: of all draws.
    """
    if min(side, colours, count, test_count) < 1 or not 1 <= symbols <= 30 or not 0 < grey < 1:
        raise ValueError(
            f"symbols={symbols} must be 1 to 30, grey={grey} between 0 and 1, side={side}, "
            f"colours={colours}, count={count} and test_count={test_count} at least 1"
        )
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, Any] = {"side": side, "symbols": symbols, "colours": colours, "grey": grey}
    train, test = (_draw(n, **sizes, generator=generator) for n in (count, test_count))
    return Splits(
        Arrays(train[0], train[1]), Arrays(test[0], test[1].where(test[2], IGNORED)), "images", colours
    )


def _draw(
    count: int, *, side: int, symbols: int, colours: int, grey: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (N, 3, H, W) of uint8, and colours and greyness (N, tiles) of their tiles."""
    pictures = torch.empty(count, 3, side * TILE, side * TILE, dtype=torch.uint8)
    table = torch.randint(colours, (count, symbols), generator=generator)
    symbol = torch.randint(symbols, (count, side * side), generator=generator)
    is_grey = torch.rand(count, side * side, generator=generator) < grey
    colour = table.gather(1, symbol)
    hues, stamps = _hues(colours), _stamps()
    chunks = (torch.split(x, _CHUNK) for x in (pictures, symbol, colour.masked_fill(is_grey, colours)))
    for picture, stamp, hue in zip(*chunks, strict=True):
        tiles = 128 + _COLOURED * hues[hue][..., None, None] + _STAMPED * stamps[stamp].unsqueeze(2)
        grid = tiles.view(-1, side, side, 3, TILE, TILE).permute(0, 3, 1, 4, 2, 5)
        picture.copy_(grid.reshape(picture.shape).round())
    return pictures, colour, is_grey


def _hues(colours: int) -> Tensor:
    """Red, green and blue of each colour, -1 to 1, and of grey."""
    angles = 2 * math.pi * torch.arange(colours)[:, None] / colours
    channels = torch.cos(angles - 2 * math.pi * torch.arange(3) / 3)
    return torch.cat([channels, torch.zeros(1, 3)])


def _stamps() -> Tensor:
    """30 symbols of 4 x 4 pixels, as many 1 as -1: products of square waves, and their negatives."""
    waves = torch.tensor([[1.0, 1, 1, 1], [1, 1, -1, -1], [1, -1, -1, 1], [1, -1, 1, -1]])
    products = torch.einsum("ai,bj->abij", waves, waves).reshape(16, TILE, TILE)[1:]
    return torch.cat([products, -products])
