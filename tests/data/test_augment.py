"""Augmentation of a batch against the same changes made one picture after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ecoformer.data.augment import augment, plain

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def pictures(n=6, height=9, width=9, seed=0):
    return torch.randint(
        0, 256, (n, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def raw(images, generator, **kwargs):
    """Augmented pictures, still as bytes."""
    found = augment(images, generator, size=images.shape[-1], mean=(0, 0, 0), std=(1, 1, 1), **kwargs) * 255
    assert (found - found.round()).abs().max() < 1e-3
    return found.round().to(torch.uint8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(0, 6), st.booleans(), st.integers(0, 99))
def test_crops_and_flips(n, pad, flip, seed):
    images = pictures(n, 7, 7, seed)
    found = raw(images, seeded(seed), pad=pad, flip=flip)
    draws = seeded(seed)
    shifts = (
        torch.randint(-pad, pad + 1, (2, n, 1), generator=draws).squeeze(2).T if pad else torch.zeros(n, 2)
    )
    flips = torch.rand(n, generator=draws) < 0.5 if flip else torch.zeros(n, dtype=torch.bool)
    for image, result, (down, right), mirrored in zip(
        images, found, shifts.int().tolist(), flips, strict=True
    ):
        padded = F.pad(image, (pad,) * 4)
        crop = padded[:, pad + down : pad + down + 7, pad + right : pad + right + 7]
        crop = crop.flip(-1) if mirrored else crop
        assert torch.equal(result, crop.to(torch.uint8))


@pytest.mark.parametrize(("size", "antialias"), [(9, False), (16, False), (5, True)])
def test_plain_one_by_one(size, antialias):
    images = pictures()
    found = plain(images, size=size, mean=MEAN, std=STD)
    for image, result in zip(images, found, strict=True):
        large = F.interpolate(
            image[None].double(), size=(size, size), mode="bilinear", align_corners=False, antialias=antialias
        )[0]
        expected = torch.stack([(large[c] / 255 - MEAN[c]) / STD[c] for c in range(3)])
        torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-5)
    assert found.dtype == torch.float32


def test_same_state_same_pictures():
    images, options = pictures(), {"size": 12, "mean": MEAN, "std": STD, "pad": 2, "flip": True}
    generator = seeded(3)
    first, second = augment(images, generator, **options), augment(images, generator, **options)
    assert torch.equal(augment(images, seeded(3), **options), first)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    augment(images, generator, **options)
    assert torch.equal(torch.get_rng_state(), state), "draws come from the generator alone"


def test_input_stays_as_it_was_and_may_be_empty_or_oblong():
    images = pictures(4, 5, 9)
    before = images.clone()
    options = {"size": 9, "mean": MEAN, "std": STD, "pad": 2, "flip": True}
    assert augment(images, seeded(0), **options).shape == (4, 3, 9, 9)
    assert torch.equal(images, before)
    assert augment(images[:0], seeded(0), **options).shape == (0, 3, 9, 9)


@pytest.mark.gpu
def test_on_a_gpu():
    images = pictures().cuda()
    options = {"size": 12, "mean": MEAN, "std": STD, "pad": 2, "flip": True}
    first = augment(images, torch.Generator("cuda").manual_seed(0), **options)
    assert torch.equal(augment(images, torch.Generator("cuda").manual_seed(0), **options), first)
    found = plain(images, size=12, mean=MEAN, std=STD).cpu()
    torch.testing.assert_close(found, plain(images.cpu(), size=12, mean=MEAN, std=STD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(1, 3, 4, 4)}, r"images .*torch.float32"),
        ({"images": pictures()[0]}, r"images .*\(3, 9, 9\)"),
    ],
)
def test_wrong_arguments(change, message):
    options = {"images": pictures(), "size": 9, "mean": MEAN, "std": STD} | change
    with pytest.raises(ValueError, match=message):
        augment(options.pop("images"), seeded(0), **options)
