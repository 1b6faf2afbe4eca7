"""How the Triton kernels are configured; no kernel runs here."""

import json

import pytest
import torch

pytest.importorskip("triton")

from ecoformer.backends.triton import configs
from ecoformer.backends.triton.configs import Config, Sizes

SIZES = Sizes(256, 3136, 32, 32, 25, 16, torch.bfloat16)
GPU = torch.device("cuda", 0)


@pytest.fixture
def cache_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ECOFORMER_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(configs, "device_key", lambda device: "some GPU")
    monkeypatch.setattr(configs, "_reduced", {})
    configs.measured.cache_clear()
    yield configs.cache_file()
    configs.measured.cache_clear()


def test_what_was_measured_is_used_in_the_next_process(cache_file):
    mine = Config(32, 8, 3, 5)
    configs.remember(SIZES, GPU, {"gather": mine})
    configs.measured.cache_clear()
    assert configs.choose("gather", SIZES, GPU) == mine
    assert configs.choose("read", SIZES, GPU) == configs.default("read", SIZES)
    other = SIZES._replace(dim=64)
    assert configs.choose("gather", other, GPU) == configs.default("gather", other)
    assert list(cache_file.parent.iterdir()) == [cache_file]


def test_shapes_of_one_class_share_a_measurement(cache_file):
    mine = Config(32, 8, 3, 5)
    configs.remember(SIZES, GPU, {"gather": mine})
    assert configs.choose("gather", SIZES._replace(tokens=3000), GPU) == mine
    assert configs.choose("gather", SIZES._replace(tokens=5000), GPU) != mine


@pytest.mark.parametrize("content", ["", "[1, 2]", "{broken"])
def test_a_damaged_file_counts_as_empty(cache_file, content):
    cache_file.parent.mkdir()
    cache_file.write_text(content)
    assert configs.choose("gather", SIZES, GPU) == configs.default("gather", SIZES)
    configs.remember(SIZES, GPU, {"read": Config(64, 2, 1, 8)})
    assert json.loads(cache_file.read_text())


def test_what_was_measured_with_asynchronous_products_does_not_count(cache_file):
    configs.remember(SIZES, GPU, {"gather": Config(64, 4, 2, 8), "read": Config(64, 2, 2, 8)})
    assert configs.choose("gather", SIZES, GPU) == configs.default("gather", SIZES)
    assert configs.choose("read", SIZES, GPU) == Config(64, 2, 2, 8)


def test_tuning_tries_no_asynchronous_products():
    from ecoformer.backends.triton import tuning

    assert not any(configs.has_async_products(Config(*tile, 1, 8)) for tile in tuning._TILES)


def test_a_configuration_on_trial_goes_before_all(cache_file):
    mine, other = Config(32, 8, 3, 5), Config(16, 4, 1, 1)
    configs.remember(SIZES, GPU, {"gather": mine})
    with configs.trial(gather=other):
        assert configs.choose("gather", SIZES, GPU) == other
    assert configs.choose("gather", SIZES, GPU) == mine


def test_configurations_shrink_until_nothing_is_left(cache_file):
    config = configs.default("token_grad", SIZES)
    seen = []
    while config is not None:
        seen.append(config)
        config = configs.reduce("token_grad", SIZES, config)
    assert len(set(seen)) == len(seen)
    assert seen[-1] == Config(16, 2, 1, configs.ONE_TILE)
    assert configs.choose("token_grad", SIZES, GPU) == seen[-1]


@pytest.mark.parametrize("step", configs.STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 63, 512, 1 << 20])
def test_defaults_are_legal(step, dtype, tokens):
    for dim, bits, support in ((16, 1, 1), (64, 16, 25), (128, 64, 64)):
        config = configs.default(step, Sizes(8, tokens, dim, dim, support, bits, dtype))
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


def test_a_configuration_with_other_results_is_never_chosen(monkeypatch):
    from ecoformer.backends.triton import tuning

    right, quick = Config(16, 1, 2, 8), Config(32, 2, 2, 8)

    def work():
        config = configs.choose("gather", SIZES, GPU)
        wrong = {quick: 2.0, quick._replace(warps=4): float("nan")}
        return [torch.ones(3) * wrong.get(config, 1.001), None]

    def milliseconds(work, **_):
        return {right: 3.0, quick: 1.0, quick._replace(warps=4): 1.0}.get(
            configs.choose("gather", SIZES, GPU), 2.0
        )

    monkeypatch.setattr(tuning, "do_bench_cudagraph", milliseconds)
    with configs.trial(gather=right):
        best, taken = tuning._descend("gather", right, work, [torch.ones(3)], float("inf"))
        assert taken == 2.0
        assert best not in (right, quick, quick._replace(warps=4))
        started_wrong, _ = tuning._descend("gather", quick, work, [torch.ones(3)], float("inf"))
        assert started_wrong == best
        with pytest.raises(RuntimeError, match="no configuration of gather"):
            tuning._descend("gather", right, work, [torch.full((3,), 7.0)], float("inf"))
