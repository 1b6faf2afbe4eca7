"""Every pyramid with every mechanism, and everything that timm asks of a model."""

import copy
import io

import pytest
import safetensors.torch
import torch

import ecoformer
import ecoformer.models

timm = pytest.importorskip("timm")
from timm.data import resolve_model_data_config  # noqa: E402

PVT = [f"pvt_v2_b{i}" for i in range(6)]
TWINS = [f"twins_svt_{size}" for size in ("small", "base", "large")]
VARIANTS = PVT + TWINS
SMALL = ["pvt_v2_b0", "twins_svt_small"]
NARROW = {
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)},
    "twins_svt_small": {"depths": (2, 2, 2, 2), "embed_dims": (16, 32, 64, 128)},
}
both = pytest.mark.parametrize("variant", SMALL)


def shallow(variant):
    """One layer of each kind in every stage."""
    return (2, 2, 2, 2) if variant in TWINS else (1, 1, 1, 1)


def images(height=33, width=47, batch=2, channels=3, seed=0):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def fit(model, x):
    if ecoformer.hashers_of(model):
        ecoformer.fit_hashers(model, [x], options=ecoformer.FitOptions(steps=2), progress=False)
    return model.eval()


def small(variant, attention="eco", *, x=None, config=None, **kwargs):
    """A narrow model whose hashers are fitted, in eval mode."""
    torch.manual_seed(0)
    config = {"bits": 8, "support": 4} | (config or {}) if attention == "eco" else config
    arguments = {"num_classes": 10, "attention": attention, "attention_config": config} | NARROW[variant]
    model = timm.create_model(f"ecoformer_{variant}", **(arguments | kwargs))
    return fit(model, images(64, 96) if x is None else x)


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


@pytest.mark.parametrize(
    ("variant", "attention"),
    [(variant, attention) for variant in SMALL for attention in ecoformer.list_attentions()]
    + [(variant, "eco") for variant in VARIANTS if variant not in SMALL],
)
def test_every_mechanism_and_every_model(variant, attention):
    config = {"bits": 8, "support": 4} if attention in ("eco", "klsh_eco") else None
    arguments = {
        "num_classes": 100,
        "attention": attention,
        "attention_config": config,
        "depths": shallow(variant),
        "img_size": 64,
    }
    model, x = timm.create_model(f"ecoformer_{variant}", **arguments), images()
    logits = fit(model, x)(x)
    logits.square().sum().backward()
    assert logits.shape == (2, 100)
    assert logits.isfinite().all()
    assert (logits[0] != logits[1]).any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    # A twin without numbers of its own takes them all from the state dict, or cannot run.
    twin = on_meta(f"ecoformer_{variant}", **arguments)
    twin.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), model.eval()(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_are_those_of_timms_model_converted(variant):
    original, ours = on_meta(variant), on_meta(f"ecoformer_{variant}", attention="softmax")
    ecoformer.convert(original, "softmax")
    found, expected = ({k: x.shape for k, x in model.state_dict().items()} for model in (ours, original))
    assert found == expected


@both
@pytest.mark.parametrize("attention", ["eco", "softmax"])
def test_same_as_timms_model_converted(variant, attention):
    original = timm.create_model(variant, num_classes=10, **NARROW[variant])
    config = {"bits": 8, "support": 4} if attention == "eco" else {}
    ecoformer.convert(original, attention, **config)
    ours = small(variant, attention)
    state, converted = ours.state_dict(), original.state_dict()
    assert [(k, v.shape, v.dtype) for k, v in state.items()] == [
        (k, v.shape, v.dtype) for k, v in converted.items()
    ]
    x = images()
    assert (original.load_state_dict(state).missing_keys, ours(x).shape) == ([], (2, 10))
    assert torch.equal(original.eval()(x), ours(x))


@both
@pytest.mark.parametrize("attention", ["eco", "softmax", "linformer", "combiner"])
def test_any_resolution(variant, attention):
    model = small(variant, attention, img_size=(128, 256))
    for size in [(32, 32), (33, 47), (127, 33)] + [(1, 1), (7, 31)] * (variant in PVT):
        with torch.no_grad():
            logits = model(images(*size))
            alone = model(images(*size)[:1])
        assert logits.isfinite().all(), size
        torch.testing.assert_close(alone, logits[:1], msg=str(size))


@both
def test_half_precision(variant):
    model, x = small(variant), images(64, 96)
    logits = model(x)
    halved = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), logits, rtol=0, atol=0.1 * logits.abs().max().item())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).isfinite().all()


@both
def test_head_and_features(variant):
    model, x = small(variant), images(65, 97)
    width, n = NARROW[variant]["embed_dims"][-1], model(x)
    features = model.forward_features(x)
    pooled = features.mean(dim=(-1, -2)) if variant in PVT else features.mean(dim=1)
    assert torch.equal(model.forward_head(features), n)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled)
    assert model.get_classifier() is model.head
    assert (model.num_features, model.head_hidden_size, model.num_classes) == (width, width, 10)
    model.reset_classifier(4)
    assert model(x).shape == (2, 4)
    assert model.get_classifier().out_features == model.num_classes == 4
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)


@both
def test_intermediates(variant):
    model, x = small(variant), images(65, 97)
    last, maps = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    down = (lambda n: -(-n // 2)) if variant in PVT else (lambda n: n // 2)
    height, width = (17, 25) if variant in PVT else (16, 24)
    for channels, feature in zip(NARROW[variant]["embed_dims"], maps, strict=True):
        assert feature.shape == (2, channels, height, width)
        height, width = down(height), down(width)
    assert [info["num_chs"] for info in model.feature_info] == list(NARROW[variant]["embed_dims"])
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]
    two = timm.create_model(
        f"ecoformer_{variant}", features_only=True, out_indices=(0, 2), attention="softmax", **NARROW[variant]
    )
    assert [f.shape for f in two(x)] == [maps[0].shape, maps[2].shape]


def test_gradient_checkpointing():
    model, x = small("pvt_v2_b0", drop_path_rate=0.3, proj_drop_rate=0.1).train(), images()
    attended = []
    layer = model.get_submodule("stages.0.blocks.0.attn")
    layer.register_forward_hook(lambda *_: attended.append(1))
    gradients = []
    for enable in (False, True, False):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(attended) == 4  # once, twice, once
    for plain, checkpointed, again in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)
        assert torch.equal(plain, again)


@both
def test_compiled(variant):
    model, x = small(variant), images(64, 96)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@both
def test_built_by_name_runs_at_once(variant):
    model = timm.create_model(f"ecoformer_{variant}", **NARROW[variant]).eval()
    with pytest.warns(UserWarning, match="fit_hashers"):
        logits = model(images())
    assert torch.equal(model(images()), logits)  # another warning would be an error
    assert not any(hasher.fitted for hasher in ecoformer.hashers_of(model).values())
    copy.deepcopy(model)(images())
    fit(model, images(64, 96))(images())


@both
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["eco", "sharp_eco"])
def test_torchscript_by_tracing(variant, attention):
    model = small(variant, attention, config={"local": (3, 3)})
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.script(model)
    file = io.BytesIO()
    with torch.no_grad():
        torch.jit.save(torch.jit.trace(model, images(64, 64)), file)
    file.seek(0)
    loaded, x = torch.jit.load(file), images(96, 64, batch=3)
    torch.testing.assert_close(loaded(x), model(x))  # it needs `import ecoformer`, whose operators it calls


def test_known_to_timm():
    assert set(timm.list_models("ecoformer_*")) == {f"ecoformer_{variant}" for variant in VARIANTS}
    for variant in VARIANTS:
        ours, theirs = (timm.get_pretrained_cfg(f"{p}{variant}") for p in ("ecoformer_", ""))
        for key in ("input_size", "mean", "std", "crop_pct", "interpolation", "first_conv", "classifier"):
            assert getattr(ours, key) == getattr(theirs, key)
        assert ours.hf_hub_id == f"timm/{variant}.in1k"
    config = resolve_model_data_config(small("pvt_v2_b0", "softmax"))
    assert (config["input_size"], config["mean"]) == ((3, 224, 224), (0.485, 0.456, 0.406))


@both
@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({}, "safetensors"),
        ({"num_classes": 7, "in_chans": 1}, "pth"),
        ({"attention": "linformer"}, "safetensors"),
    ],
    ids=str,
)
def test_pretrained(variant, kwargs, kind, tmp_path):
    original, path = timm.create_model(variant, num_classes=1000, **NARROW[variant]), tmp_path / f"x.{kind}"
    for parameter in original.parameters():  # biases and norms start as constants: give them numbers
        torch.nn.init.normal_(parameter, std=0.1)
    state = original.state_dict()
    (torch.save if kind == "pth" else safetensors.torch.save_file)(state, path)
    arguments = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}, "img_size": 64}
    model = timm.create_model(f"ecoformer_{variant}", **(arguments | NARROW[variant] | kwargs))
    ours, shared = model.state_dict(), kwargs.get("attention", "eco") == "eco"
    converted = set()
    for name, value in ours.items():
        layer, is_ours, own = name.partition(".attention.")
        if "in_chans" in kwargs and name == model.default_cfg["first_conv"] + ".weight":
            torch.testing.assert_close(value, state[name].sum(dim=1, keepdim=True))
        elif "num_classes" in kwargs and name.startswith("head."):
            assert value.shape[0] == 7
        elif not is_ours:
            assert torch.equal(value, state[name]), name
        elif own.startswith(("qk", "v.", "proj.")):
            kind_of = own.rpartition(".")[2]
            converted.add(layer)
            if own.startswith("proj."):
                expected = state[f"{layer}.{own}"]
            elif f"{layer}.qkv.{kind_of}" in state:
                expected = state[f"{layer}.qkv.{kind_of}"]
            else:
                expected = torch.cat([state[f"{layer}.q.{kind_of}"], state[f"{layer}.kv.{kind_of}"]])
            if shared and not own.startswith("proj."):
                expected = expected.chunk(3)[0 if own.startswith("qk.") else 2]
            assert torch.equal(value, expected), name
    assert len(converted) == 3 * sum(shallow(variant)) // 4
    assert fit(model, images(64, 64, 8, model.in_chans))(images(64, 64, 2, model.in_chans)).isfinite().all()


@both
def test_pretrained_codes_come_from_the_pretrained_queries_and_keys(variant, tmp_path):
    original = timm.create_model(variant, num_classes=1000, **NARROW[variant]).eval()
    path, config = tmp_path / "x.pth", {"seed": 3, "bits": 8}
    torch.save(original.state_dict(), path)
    arguments = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}, **NARROW[variant]}
    model = timm.create_model(
        f"ecoformer_{variant}", attention="sharp_eco", attention_config=config, **arguments
    )
    ecoformer.convert(original, "sharp_eco", **config)
    assert torch.equal(model.eval()(images()), original(images()))


@both
def test_pretrained_from_our_own_weights(variant, tmp_path):
    model, x = small(variant, num_classes=1000), images()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "ours.safetensors")
    overlay = {"file": str(tmp_path / "ours.safetensors")}
    arguments = {"attention_config": {"bits": 8, "support": 4}} | NARROW[variant]
    again = timm.create_model(
        f"ecoformer_{variant}", pretrained=True, pretrained_cfg_overlay=overlay, **arguments
    )
    assert torch.equal(again.eval()(x), model(x))
