"""The released checkpoints: recognised, renamed, refused when anything is amiss, and computed alike."""

import argparse
import os
import pathlib
import pickle
import re
import sys

import pytest
import released
import torch

import ecoformer
from ecoformer import CheckpointError, EcoAttention, hashers_of
from ecoformer.checkpoints.official import _describe, load_official, recognise, rename

ONE = (1, 1, 1, 1)
B0_HEADS = (1, 2, 5, 8)


def checkpoint(variant="pvt_v2_b0", **kwargs):
    return released.state_dict(variant, **{"num_classes": 7, "seed": 1, "depths": ONE, **kwargs})


def images(*size, dtype=torch.float64):
    return torch.randn(2, *size, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def without(state, *gone):
    return {key: value for key, value in state.items() if not key.startswith(gone)}


class TestRecognise:
    @pytest.mark.parametrize("mechanism", ["eco", "softmax"])
    @pytest.mark.parametrize("variant", released.VARIANTS)
    def test_every_released_model(self, variant, mechanism):
        state = released.state_dict(variant, mechanism=mechanism, num_classes=1000, seed=0, device="meta")
        facts, eco = released.VARIANTS[variant], mechanism == "eco"
        twins = variant.startswith("twins")
        family, arguments = recognise(state)
        assert family == ("twins" if twins else "pvt_v2")
        config = arguments.pop("attention_config")
        assert (config["bits"], config["support"]) == (16, 25) if eco else config == {}
        assert arguments == {
            "attention": "official_eco" if eco else "softmax",
            "in_chans": 3,
            "num_classes": 1000,
            "depths": facts.depths,
            "embed_dims": facts.dims,
            "num_heads": (2, 4, 8, 16) if twins else B0_HEADS,
            "mlp_ratios": facts.ratios,
        }
        assert _describe(family, arguments)["model"]["name"] == f"ecoformer_{variant}"

    def test_the_originals_with_spatial_reduction_are_sent_to_timm(self):
        state = without(checkpoint(mechanism="softmax"), "block1.0.attn.qkv")
        for name, rows in (("q", 32), ("kv", 64), ("sr", 32), ("norm", 32)):
            state[f"block1.0.attn.{name}.weight"] = torch.randn(rows, 32)
        with pytest.raises(CheckpointError, match=r"block1\.0\.attn\.q\.weight.*timm.*ecoformer\.convert"):
            recognise(state)

    def test_our_own_checkpoints_are_not_taken_for_released_ones(self):
        state = checkpoint()
        with pytest.raises(CheckpointError, match="own"):
            recognise(rename(state, recognise(state)[0]))

    def test_other_models(self):
        with pytest.raises(CheckpointError, match=r"PVTv2 or Twins.*layer1\.0\.conv1\.weight"):
            recognise({"layer1.0.conv1.weight": torch.randn(3, 3)})


class TestRefusals:
    @pytest.mark.parametrize(("variant", "mechanism"), [("pvt_v2_b0", "eco"), ("twins_svt_small", "softmax")])
    def test_any_missing_key_and_any_other_shape(self, variant, mechanism):
        state = checkpoint(variant, mechanism=mechanism)
        for key, value in list(state.items())[::17]:
            if "projection_matrix" not in key:
                with pytest.raises(CheckpointError, match="missing"):
                    load_official({k: v for k, v in state.items() if k != key})
                for other in (torch.cat([value, value], dim=-1), value.unsqueeze(0)):
                    with pytest.raises(CheckpointError):
                        load_official({**state, key: other})

    @pytest.mark.parametrize(
        "key",
        [
            "block1.0.attn.relative_position",
            "norm.weight",
            "block1.3.norm1.weight",
            "block1.99999999999.norm1.weight",
            "block4.0.attn.fast_attention.projection_matrix",
        ],
    )
    def test_an_unknown_key(self, key):
        with pytest.raises(CheckpointError, match=r"unexpected|missing|both"):
            load_official({**checkpoint(), key: torch.ones(32)})

    @pytest.mark.parametrize(
        "key", ["head.weight", "patch_embed1.proj.weight", "block1.0.attn.fast_attention.ksh.A"]
    )
    def test_nothing_can_be_read_off_an_empty_tensor(self, key):
        state = checkpoint()
        with pytest.raises(CheckpointError, match=rf"{re.escape(key)} is \(0, "):
            load_official({**state, key: state[key][:0]})

    @pytest.mark.parametrize(
        ("source", "says"),
        [
            ({"model": {}}, "empty"),
            ({"model": torch.nn.Linear(2, 2)}, "got Linear"),
            ({"epoch": 3}, "'epoch': int"),
            ({3: torch.ones(1)}, "3: Tensor"),
        ],
    )
    def test_mappings_that_hold_something_else(self, source, says):
        with pytest.raises(CheckpointError, match=says):
            load_official(source)


class Mischief:
    def __reduce__(self):
        return os.mkdir, ("mischief",)


class TestFiles:
    """None of these gets as far as building a model, save the first."""

    def test_released_files_hold_arguments_too(self, tmp_path):
        state, path = checkpoint(), tmp_path / "b0.pth"
        torch.save({"model": state, "epoch": 29, "args": argparse.Namespace(lr=1e-4, bits=16)}, path)
        x, expected = images(3, 32, 32, dtype=torch.float32), load_official(state)
        for source in (path, str(path)):
            assert torch.equal(load_official(source)(x), expected(x))
        assert argparse.Namespace not in torch.serialization.get_safe_globals()

    @pytest.mark.parametrize("old_format", [False, True])
    def test_truncated(self, tmp_path, old_format):
        path = tmp_path / "cut.pth"
        torch.save(checkpoint(), path, _use_new_zipfile_serialization=not old_format)
        whole = path.read_bytes()
        for share in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999):
            path.write_bytes(whole[: int(share * len(whole))])
            with pytest.raises(
                CheckpointError, match=r"cut\.pth cannot be read as a checkpoint: it is damaged"
            ):
                load_official(path)

    @pytest.mark.parametrize(
        "content", [b"", b"\n", b"<html>404</html>", b"version https://git-lfs", bytes(999)]
    )
    def test_not_a_checkpoint_at_all(self, tmp_path, content):
        path = tmp_path / "page.pth"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"page\.pth cannot be read as a checkpoint"):
            load_official(path)

    @pytest.mark.parametrize("content", [[1, 2], torch.ones(2), {"model": 3}, None])
    def test_a_file_with_something_else(self, tmp_path, content):
        path = tmp_path / "other.pth"
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"other\.pth is not a checkpoint: .* got "):
            load_official(path)

    @pytest.mark.parametrize("plain", [False, True])
    def test_no_code_is_run(self, tmp_path, monkeypatch, plain):
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "evil.pth"
        content = {"model": checkpoint(), "args": Mischief()}
        path.write_bytes(pickle.dumps(content, protocol=2)) if plain else torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"evil\.pth cannot be read"):
            load_official(path)
        assert not (tmp_path / "mischief").exists()

    def test_other_objects_are_named(self, tmp_path):
        path = tmp_path / "paths.pth"
        torch.save(
            {"model": checkpoint(), "args": argparse.Namespace(output=pathlib.PurePosixPath("/out"))}, path
        )
        with pytest.raises(CheckpointError, match=r"it holds a pathlib\.PurePosixPath; .*weights_only=False"):
            load_official(path)


class TestLoading:
    """From the checkpoint to the logits."""

    @pytest.mark.parametrize(
        ("variant", "options", "size"),
        [
            ("pvt_v2_b0", {"depths": None}, (3, 64, 64)),
            ("pvt_v2_b0", {"depths": (2, 1, 1, 2)}, (3, 71, 90)),
            ("pvt_v2_b0", {"bits": 8, "support": 13, "in_chans": 1}, (1, 64, 96)),
            ("pvt_v2_b1", {}, (3, 64, 96)),
            ("pvt_v2_b5", {}, (3, 32, 64)),
            ("pvt_v2_b0", {"mechanism": "softmax"}, (3, 64, 96)),
            ("pvt_v2_b1", {"mechanism": "softmax", "depths": (1, 2, 1, 1)}, (3, 71, 90)),
            ("twins_svt_small", {"depths": (2, 1, 1, 2)}, (3, 64, 96)),
            ("twins_svt_small", {"depths": (2, 1, 1, 2)}, (3, 75, 301)),
            ("twins_svt_small", {"depths": (2, 1, 2, 2), "mechanism": "softmax"}, (3, 75, 301)),
        ],
    )
    def test_logits_are_those_of_the_released_code(self, variant, options, size):
        state, x = checkpoint(variant, **options), images(*size)
        expected = released.forward(state, x, released.VARIANTS[variant].head_dim)
        with torch.no_grad():
            actual = load_official(state).double()(x)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    def test_ready_to_use(self):
        model = load_official(checkpoint())
        hashers = hashers_of(model)
        assert len(hashers) == 3
        assert all(hasher.fitted for hasher in hashers.values())
        assert not any(module.training for module in model.modules())
        assert all(parameter.requires_grad for parameter in model.parameters())

    def test_the_state_dict_may_be_wrapped(self):
        state, x = checkpoint(), images(3, 32, 32, dtype=torch.float32)
        expected = load_official(state)(x)
        parallel = {f"module.{key}": value for key, value in state.items()}
        for wrapped in ({"model": state, "epoch": 1}, parallel, {"model": parallel, "optimizer": {}}):
            assert torch.equal(load_official(wrapped)(x), expected)


class TestAttention:
    """Of eco checkpoints: an ordinary mechanism of this package, which nothing else builds."""

    def test_it_is_not_listed(self):
        assert "official_eco" not in ecoformer.list_attentions()

    def test_saved_and_loaded_it_computes_the_same(self, tmp_path):
        model, x = load_official(checkpoint(bits=8)), images(3, 64, 64, dtype=torch.float32)
        again = ecoformer.load(ecoformer.save(model, tmp_path / "model.safetensors")).eval()
        assert torch.equal(again(x), model(x))

    @pytest.mark.parametrize("mechanism", ["eco", "softmax"])
    def test_conversion_takes_the_projections_along(self, mechanism):
        source, model = load_official(checkpoint()), load_official(checkpoint())
        ecoformer.convert(model, mechanism)
        old, new = (m.get_submodule("stages.0.blocks.0.attn.attention") for m in (source, model))
        qk = new.qk.weight if mechanism == "eco" else new.qkv.weight[:32]
        assert torch.equal(qk, old.qk.weight)
        assert torch.equal(new.proj.weight, old.proj.weight)
        assert [hasher.is_fitted for hasher in hashers_of(model).values()] == [False] * len(hashers_of(model))

    def test_it_costs_what_the_papers_costs(self):
        layer = load_official(checkpoint()).stages[1].blocks[0].attn.attention
        assert layer.operations(2, 49) == EcoAttention(64, 2).operations(2, 49)

    def test_gradients_are_those_of_hard_tanh(self):
        hasher = next(iter(hashers_of(load_official(checkpoint()).double()).values()))
        x = torch.randn(2, 1, 9, 32, dtype=torch.float64, requires_grad=True)
        weight, y = torch.randn(2, 1, 9, 16, dtype=torch.float64), hasher.project(x)
        found, expected = (torch.autograd.grad((z * weight).sum(), x) for z in (hasher(x), y.clamp(-1, 1)))
        torch.testing.assert_close(found, expected)

    def test_what_it_does_not_support(self):
        layer, x = load_official(checkpoint()).stages[0].blocks[0].attn.attention, torch.randn(1, 9, 32)
        with pytest.raises(ValueError, match=r"^is_causal=True is not supported by official_eco"):
            layer(x, is_causal=True)
        with pytest.raises(ValueError, match=r"^key_padding_mask is not supported by official_eco"):
            layer(x, key_padding_mask=torch.zeros(1, 9, dtype=torch.bool))
        with pytest.raises(ValueError, match="not fitted: convert the model to eco"):
            layer.hasher.fit(torch.randn(1, 1, 40, 32))


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"ecoformer\[vision\]"):
        load_official(checkpoint())
