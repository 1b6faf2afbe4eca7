"""How the Triton kernels are configured; no kernel runs here."""

import pytest
import torch

pytest.importorskip("triton")

from ecoformer.backends.triton import configs
from ecoformer.backends.triton.configs import Config, Sizes

SIZES = Sizes(256, 3136, 32, 32, 25, 16, torch.bfloat16)


def test_a_configuration_on_trial_goes_first():
    other = Config(16, 4, 1, 1)
    with configs.trial(gather=other):
        assert configs.choose("gather", SIZES) == other
    assert configs.choose("gather", SIZES) == configs.default("gather", SIZES)


def test_configurations_shrink_until_nothing_is_left(monkeypatch):
    monkeypatch.setattr(configs, "_reduced", {})
    config = configs.default("token_grad", SIZES)
    seen = []
    while config is not None:
        seen.append(config)
        config = configs.reduce("token_grad", SIZES, config)
    assert len(set(seen)) == len(seen)
    assert seen[-1] == Config(16, 2, 1, configs.ONE_TILE)
    assert configs.choose("token_grad", SIZES) == seen[-1]


@pytest.mark.parametrize("step", configs.STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 63, 512, 1 << 20])
@pytest.mark.parametrize("features", [0, 64, 128])
def test_defaults_are_legal(step, dtype, tokens, features):
    for dim, bits, support in ((16, 1, 1), (64, 16, 25), (128, 64, 64), (16, 16, 0), (64, 64, 0)):
        config = configs.default(step, Sizes(8, tokens, dim, dim, support, bits, dtype, features))
        assert config.block in (16, 32, 64)
        assert not configs.has_async_products(config)
        assert config.per_sm > 0 or step in ("gather", "gather_grad")


@pytest.mark.parametrize(
    ("rows", "tokens", "single"),
    [(1280, 196, True), (160, 512, True), (160, 513, False), (8, 128, True), (8, 256, False)],
)
def test_few_heads_take_one_launch_only_if_they_are_very_short(rows, tokens, single):
    sizes = Sizes(rows, tokens, 64, 64, 25, 16, torch.bfloat16)
    for step in ("gather", "gather_grad"):
        assert (configs.default(step, sizes).per_sm == 0) == single
