"""What tensors do not show is noticed when a model is loaded, and what is no part of a model is not."""

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.checkpoints.describe import difference, settings_of

timm = pytest.importorskip("timm")


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "bare"])
def test_another_order_of_batch_and_tokens(saved, converted, tmp_path):
    model, other, same = encoder(saved), encoder(not saved), encoder(saved)
    for each in (model, other, same) if converted else (model,):
        ecoformer.convert(each, "softmax")
    path = ecoformer.save(model, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ecoformer.CheckpointError, match=r"bound is {'batch_first': \w+} against") as caught:
        ecoformer.load(path, other)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    x = torch.randn(3, 5, 16)
    assert torch.equal(ecoformer.load(path, same)(x), model.eval()(x))


def with_settings(**settings):
    module = nn.Linear(1, 1)
    module.settings = settings
    return module


def test_dicts_of_plain_values_count():
    ours = settings_of(with_settings(sizes=(1, 2)))
    assert difference(ours, settings_of(with_settings(sizes=[1, 2]))) is None, "as JSON gives it back"
    assert "settings" in difference(ours, settings_of(with_settings(sizes=(1, 3))))
    unlike = nn.Linear(1, 1)
    unlike.settings = {1: 2}
    for other in (with_settings(hook=print), unlike):
        assert "settings" not in settings_of(other)[""]


def test_where_a_model_came_from_is_no_part_of_it(tmp_path):
    model = timm.create_model("pvt_v2_b0", num_classes=10, pretrained_cfg_overlay={"url": "elsewhere"})
    ecoformer.convert(model, "softmax")
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model"))
    again.reset_classifier(3)
    assert ecoformer.load(ecoformer.save(again, tmp_path / "again")).num_classes == 3
