"""The encoder without pooling: logits of every token, the same weights, saved and loaded with its setting."""

import pytest
import torch

from ecoformer import load, save
from ecoformer.models.text import PAD, TextEncoder

SIZES = {"vocabulary": 32, "length": 24, "dim": 16, "num_heads": 2, "hidden": 24, "classes": 5}


def make(attention="softmax", **kwargs):
    torch.manual_seed(0)
    return TextEncoder(attention=attention, **{**SIZES, **kwargs}).eval()


def tokens():
    ids = torch.randint(1, 32, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[1, 13:] = PAD
    return ids


@pytest.mark.parametrize("attention", ["softmax", "performer"])
def test_head_reads_each_token(attention):
    model, pooled = make(attention, pool="none"), make(attention)
    pooled.load_state_dict(model.state_dict())
    x = tokens()
    logits = model(x)
    assert logits.shape == (3, 20, 5)
    assert torch.equal(logits, model.head(model.forward_features(x)))
    assert torch.equal(pooled(x), pooled.head(pooled.pool(model.forward_features(x), x == PAD)))
    assert (logits[:, 1] - logits[:, 2]).abs().max() > 1e-3


def test_padding_does_not_reach_other_tokens():
    model, x = make(pool="none"), tokens()
    torch.testing.assert_close(model(x)[1, :13], model(x[1:2, :13])[0])


def test_without_head_gives_features():
    model, x = make(pool="none", classes=0), tokens()
    assert torch.equal(model(x), model.forward_features(x))


def test_the_setting_is_saved(tmp_path):
    model, x = make(pool="none"), tokens()
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors").eval()
    assert again.pooling == "none"
    assert torch.equal(again(x), model(x))
    model.save_pretrained(tmp_path / "hub")
    assert torch.equal(TextEncoder.from_pretrained(tmp_path / "hub").eval()(x), model(x))


def test_a_file_without_the_setting_pools(tmp_path):
    model = make()
    del model._hub_mixin_config["pool"]
    del model.pooling
    save(model, tmp_path / "old.safetensors")
    assert load(tmp_path / "old.safetensors").eval()(tokens()).shape == (3, 5)


def test_unknown_pool():
    with pytest.raises(ValueError, match='pool must be "mean" or "none", got \'max\''):
        make(pool="max")


def test_repr_tells_it():
    assert "pool=none" in repr(make(pool="none"))
    assert "pool=" not in repr(make())
