"""Masks of other libraries: what is padding, what is causal order, and what is neither."""

import pytest
import torch

import ecoformer
from ecoformer import FitOptions, convert
from ecoformer.conversion.foreign import is_causal_mask, key_padding, padding_of_tokens

timm = pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

B, H, N = 3, 2, 5
LOW = {
    dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
SEEN = torch.arange(N) < torch.tensor([N, 3, 1])[:, None]
X = torch.zeros(B, N, 4)


def added(seen, dtype=torch.float32, low=-torch.inf):
    """The mask as numbers that are added to scores."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, low)


@pytest.mark.parametrize(
    "mask",
    [
        SEEN[:, None, None],
        SEEN[:, None, None].expand(B, H, N, N),
        SEEN[:, None, None].expand(B, H, N, N).contiguous(),
        SEEN[:, None, None].repeat(1, 1, N, 1).long(),
        added(SEEN)[:, None, None],
        added(SEEN)[:, None, None].repeat(1, H, N, 1),
        added(SEEN, low=-1e4)[:, None, None],
        added(SEEN, low=-1e9)[:, None, None],
        *(added(SEEN, dtype, low)[:, None, None] for dtype, low in LOW.items()),
        *(added(SEEN, dtype)[:, None, None] for dtype in LOW),
    ],
)
def test_padding(mask):
    before = mask.clone()
    assert torch.equal(key_padding(mask, X), ~SEEN)
    assert torch.equal(mask, before)


def test_padding_by_token():
    for mask in (SEEN, SEEN.long(), SEEN.to(torch.uint8), SEEN.float(), SEEN[:, None, None]):
        assert torch.equal(padding_of_tokens(mask, X), ~SEEN)
    assert padding_of_tokens(None, X) is None


def test_padding_of_all_samples_alike():
    for mask in (SEEN[1:2, None, None], added(SEEN[1:2])[:, None, None].expand(1, H, N, N)):
        assert torch.equal(key_padding(mask, X), ~SEEN[1:2].expand(B, N))
    assert key_padding(None, X) is None
    assert not key_padding(torch.ones(B, 1, N, N, dtype=torch.bool), X).any()


PER_QUERY = torch.ones(B, 1, N, N).bool().tril()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (PER_QUERY, r"^attention_mask \(3, 1, 5, 5\) differs between queries or heads"),
        (added(PER_QUERY), "differs between queries or heads"),
        (torch.stack([SEEN, ~SEEN], dim=1)[:, :, None], "differs between queries or heads"),
        (
            added(SEEN, low=-2.0)[:, None, None],
            "adds numbers to the scores.* pass a mask of 0 and minus infinity",
        ),
        (torch.rand(B, 1, 1, N), "adds numbers to the scores"),
        (added(SEEN, low=torch.nan)[:, None, None], "adds numbers|differs between"),
        (torch.ones(N, N).bool().tril(), r"^attention_mask \(5, 5\) differs between queries"),
        (torch.ones(B, N), r"must broadcast to \(B, heads, N, N\) with B = 3 and N = 5, got \(3, 5\)"),
        (torch.ones(B, N + 1).bool(), r"got \(3, 6\)"),
        (torch.ones(B, N, N).bool(), r"got \(3, 5, 5\)"),
        (torch.ones(B + 1, 1, 1, N).bool(), r"got \(4, 1, 1, 5\)"),
        (torch.ones(B, 1, N, 1).bool(), r"got \(3, 1, 5, 1\)"),
    ],
)
def test_masks_that_are_no_padding(mask, message):
    with pytest.raises(ValueError, match=message) as caught:
        key_padding(mask, X)
    assert "\n" not in str(caught.value)


def test_causal_masks():
    future = torch.ones(N, N).triu(1).bool()
    for mask in (future, torch.zeros(N, N).masked_fill(future, -torch.inf)):
        assert is_causal_mask(mask, N)
        assert not is_causal_mask(mask, N + 1)
        assert not is_causal_mask(mask[:-1], N)
        assert not is_causal_mask(mask.mT, N)
        assert not is_causal_mask(mask.roll(1, 0), N)
    assert not is_causal_mask(~future, N)
    assert not is_causal_mask(torch.zeros(N, N), N)


def vit():
    """Five tokens: four patches and the class token."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=H, num_classes=5, global_pool="token"
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 5)
    return model.double().eval()


def images(batch=B):
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("form", ["bool", "bool square", "added", "lowest"])
def test_timm_under_a_mask(form):
    model, x = vit(), images()
    masks = {
        "bool": SEEN[:, None, None],
        "bool square": SEEN[:, None, None].repeat(1, 1, N, 1),
        "added": added(SEEN, torch.float64)[:, None, None],
        "lowest": added(SEEN, torch.float64, LOW[torch.float64])[:, None, None],
    }
    before, unmasked = model(x, attn_mask=masks[form]), model(x)
    convert(model, "softmax")
    torch.testing.assert_close(model(x, attn_mask=masks[form]), before, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(before, unmasked)
    with pytest.raises(ValueError, match="differs between queries"):
        model(x, attn_mask=PER_QUERY)


def test_timm_in_causal_order():
    model, x = vit(), images()
    before = model.forward_features(x, is_causal=True)
    convert(model, "softmax")
    torch.testing.assert_close(model.forward_features(x, is_causal=True), before, rtol=1e-11, atol=1e-11)


def test_timm_hashed_under_a_mask():
    model, x = vit(), images()
    convert(model, "eco", support=4, bits=6)
    ecoformer.fit_hashers(model, [x], options=FitOptions(steps=2, pairs=2), progress=False)
    mask = SEEN[:, None, None]
    out = model.forward_features(x, attn_mask=mask)
    changed = x.clone()
    changed[1, :, 8:] += 1  # the lower two patches, which sample 1 does not see
    torch.testing.assert_close(model.forward_features(changed, attn_mask=mask)[SEEN], out[SEEN])


def test_a_square_mask_is_not_padding_of_as_many_samples():
    model, x = vit(), images(batch=N)
    mask = torch.ones(N, N).tril().bool()
    before = model(x, attn_mask=mask)
    convert(model, "softmax")
    try:
        after = model(x, attn_mask=mask)
    except ValueError:
        return
    torch.testing.assert_close(after, before, rtol=1e-11, atol=1e-11)
