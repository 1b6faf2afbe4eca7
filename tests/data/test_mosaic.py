import math

import pytest
import torch

from ecoformer.data import IGNORED, load


def tiles(part, side):
    """Tiles (N, side², 3, 4, 4) of pictures."""
    grid = part.inputs.float().view(-1, 3, side, 4, side, 4).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(len(part), side * side, 3, 4, 4)


def test_grey_tiles_can_be_looked_up_by_their_symbol():
    splits = load("mosaic", side=8, symbols=4, colours=3, count=3, test_count=5)
    assert (splits.kind, splits.classes) == ("images", 3)
    shown = tiles(splits.test, 8)
    mean = shown.mean(dim=(3, 4))
    grey = (mean.amax(2) - mean.amin(2)) < 1
    assert torch.equal(splits.test.targets != IGNORED, grey)
    symbol = (shown.mean(2) > 128).flatten(2)
    for picture in range(5):
        for i in grey[picture].nonzero().flatten().tolist():
            same = ~grey[picture] & (symbol[picture] == symbol[picture, i]).all(-1)
            hues = mean[picture, same].round()
            assert len(hues.unique(dim=0)) <= 1
            if len(hues):  # the angle of the hue is the class
                red, green, blue = hues[0].tolist()
                angle = math.atan2(3**0.5 * (green - blue), 2 * red - green - blue)
                assert round(angle / (2 * math.pi) * 3) % 3 == splits.test.targets[picture, i]


def test_training_tiles_all_have_targets_and_draws_repeat():
    first, again = (load("mosaic", side=4, count=2, test_count=1, seed=3) for _ in range(2))
    assert (first.train.targets != IGNORED).all()
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, load("mosaic", side=4, count=2, test_count=1).train.inputs)


@pytest.mark.parametrize("options", [{"symbols": 31}, {"grey": 1.0}, {"side": 0}])
def test_sizes_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        load("mosaic", **options)
