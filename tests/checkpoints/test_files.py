"""`save` and `load`: the same model again, bit for bit, or one clear line and nothing touched."""

import copy
import json
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import ecoformer
import ecoformer.models
from ecoformer import CheckpointError, storage
from ecoformer.conversion.convert import RECORD

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
from timm.data import resolve_model_data_config  # noqa: E402

PVT = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64), "num_classes": 10}
TWINS = {"depths": (2, 2, 2, 2), "embed_dims": (16, 32, 64, 128), "num_classes": 10}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ECO = {"bits": 8, "support": 4}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
SMALL = IMAGES[:, :, :32, :32]
WORDS = torch.randint(5, 50, (4, 9), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """A module that no library builds."""

    def __init__(self, tied=False, hidden=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, hidden, batch_first=True) for _ in "ab")
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(self.first(x))


def settle(model, x):
    """In eval mode, with its hashers fitted and no parameter left at its first value."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    if ecoformer.hashers_of(model):
        ecoformer.fit_hashers(model, [x], options=ecoformer.FitOptions(steps=2), progress=False)
    return model.eval()


def run(model, x):
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        out = model(x.to(dtype) if x.is_floating_point() else x)
    return out if isinstance(out, torch.Tensor) else out[0]


def snapshot(model):
    """All that an untouched model keeps."""
    modes = [(name, type(module), module.training) for name, module in model.named_modules()]
    state = {name: (tensor.dtype, tensor.tolist()) for name, tensor in model.state_dict().items()}
    return modes, state, copy.deepcopy(getattr(model, RECORD, None))


def assert_same(again, model, x):
    assert not any(module.training for module in again.modules())
    assert type(again) is type(model)
    ours, theirs = again.state_dict(), model.state_dict()
    assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}
    assert [k for k, v in theirs.items() if not torch.equal(ours[k], v)] == []
    assert [bool(h.fitted) for h in ecoformer.hashers_of(again).values()] == [
        bool(h.fitted) for h in ecoformer.hashers_of(model).values()
    ]
    assert torch.equal(run(again, x), run(model, x))


def refused(path, model=None):
    """The one line with which `load` refuses; a given model stays as it was."""
    before = None if model is None else snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        ecoformer.load(path, model)
    assert model is None or snapshot(model) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def attempt(model):
    """What a further conversion reports, or why there is none."""
    try:
        return str(ecoformer.convert(model, "softmax"))
    except ValueError as error:
        return str(error)


def converted(model, *steps):
    for mechanism, arguments in steps:
        ecoformer.convert(model, mechanism, **arguments)
    return model


def ours(name, **kwargs):
    return timm.create_model(f"ecoformer_{name}", **((PVT if "pvt" in name else TWINS) | kwargs))


def vit(name="vit_tiny_patch16_224", **kwargs):
    return timm.create_model(name, img_size=32, **kwargs)


def bert(cls="BertModel", **kwargs):
    return getattr(transformers, cls)(transformers.BertConfig(vocab_size=50, **SIZES, **kwargs))


LOCAL, ALL = {"local": (3, 3)}, {"layers": "all"}
VIT = transformers.ViTConfig(image_size=64, patch_size=16, **SIZES)
MODELS = {
    "ours, pvt": lambda: ours("pvt_v2_b0", attention_config=ECO | LOCAL),
    "ours, twins": lambda: ours("twins_svt_small", attention_config=ECO, attention_layers=["blocks.1.*"]),
    "ours, converted": lambda: converted(ours("pvt_v2_b0", attention="softmax"), ("eco", ECO | LOCAL)),
    "timm pvt, some": lambda: converted(
        timm.create_model("pvt_v2_b0"),
        ("softmax", {}),
        ("eco", ECO | LOCAL | {"layers": ["stages.1.*", "stages.2.*"]}),
        ("performer", {"layers": "stages.2.*", "seed": 3, "features": 16}),
    ),
    "timm twins": lambda: converted(timm.create_model("twins_svt_small"), ("softmax", ALL), ("eco", ECO)),
    "timm vit": lambda: converted(vit(), ("eco", ECO | LOCAL)),
    "timm vit, sized": lambda: converted(vit(global_pool="avg"), ("linformer", {"example": SMALL})),
    "timm deit": lambda: converted(vit("deit_tiny_distilled_patch16_224"), ("softmax", {}), ("eco", ECO)),
    "bert": lambda: converted(bert(), ("eco", ECO | {"local": 3})),
    "bert, tied": lambda: converted(bert("BertForMaskedLM"), ("softmax", {}), ("eco", ECO)),
    "vit of transformers": lambda: converted(transformers.ViTModel(VIT), ("eco", ECO | LOCAL)),
    "bert, not converted": bert,
}


def made(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    x = WORDS if "bert" in kind else IMAGES
    x = SMALL if "timm vit" in kind or "deit" in kind else x
    x = x[:, : model.in_chans] if kind.startswith("ours") else x
    return settle(model, x), x


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_model_again(kind, tmp_path):
    model, x = made(kind)
    path = ecoformer.save(model.train(), tmp_path / "model.safetensors")
    assert path == tmp_path / "model.safetensors"
    again = ecoformer.load(str(path))
    assert_same(again, model.eval(), x)
    # What was loaded can be converted like what was saved.
    assert attempt(again) == attempt(model)
    assert_same(again, model, x)


@pytest.mark.parametrize("kind", ["ours, twins", "bert"])
def test_a_model_that_was_trained_with_gradient_checkpointing(kind, tmp_path):
    model, x = made(kind)
    switch = getattr(model, "set_grad_checkpointing", None) or model.gradient_checkpointing_enable
    switch()
    assert_same(ecoformer.load(ecoformer.save(model, tmp_path / "model")), model, x)


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [(attention, torch.bfloat16) for attention in ecoformer.list_attentions()]
    + [("eco", torch.float32), ("eco", torch.float64)],
)
def test_every_mechanism_and_precision(attention, dtype, tmp_path):
    config = {"support": 4} if attention in ("eco", "klsh_eco") else None
    model = settle(ours("pvt_v2_b0", attention=attention, attention_config=config), IMAGES).to(dtype)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model"))
    assert next(again.parameters()).dtype == dtype
    assert_same(again, model, IMAGES)


def test_precisions_may_be_mixed(tmp_path):
    model = settle(ours("pvt_v2_b0", attention="softmax"), IMAGES).bfloat16()
    nn.init.normal_(model.head.float().weight)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model"))
    assert torch.equal(again.head.weight.float(), model.head.weight)


@pytest.mark.parametrize("name", ["pvt_v2_b0", "twins_svt_small"])
@pytest.mark.parametrize("head", [(3, None), (0, "")], ids=str)
def test_another_head(name, head, tmp_path):
    model = ours(name, attention="softmax")
    model.reset_classifier(*head)
    settle(model, IMAGES)
    assert_same(ecoformer.load(ecoformer.save(model, tmp_path / "model")), model, IMAGES)


@pytest.mark.parametrize(
    ("name", "head"), [("resnet18", (3, "max")), ("mobilenetv3_small_050", (0, ""))], ids=str
)
def test_pooling_by_a_module(name, head, tmp_path):
    model = timm.create_model(name, num_classes=10)
    model.reset_classifier(*head)
    settle(model, IMAGES)
    assert_same(ecoformer.load(ecoformer.save(model, tmp_path / "model")), model, IMAGES)


def test_arguments_of_a_file_that_a_model_does_not_show(tmp_path):
    model = settle(timm.create_model("convnext_atto", num_classes=3, global_pool="max"), IMAGES)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "a", arguments={"global_pool": "max"}))
    assert_same(ecoformer.load(ecoformer.save(again, tmp_path / "b")), model, IMAGES)


def test_unfitted_stays_unfitted(tmp_path):
    fitted = settle(ours("pvt_v2_b0", attention_config=ECO), IMAGES)
    path = ecoformer.save(ours("pvt_v2_b0", attention_config=ECO), tmp_path / "model")
    for given in (None, fitted):
        model = ecoformer.load(path, given)
        assert not any(hasher.fitted for hasher in ecoformer.hashers_of(model).values())
        with pytest.warns(UserWarning, match="fit_hashers"):
            model(IMAGES)


def test_arguments_that_timm_forgets(tmp_path):
    model = settle(converted(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), ("eco", ECO)), IMAGES)
    with pytest.raises(
        ValueError, match=r"^another pvt_v2_b0 would come back.* save\(..., arguments=\{...\}\)"
    ) as caught:
        ecoformer.save(model, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    path = ecoformer.save(model, tmp_path / "model", arguments={"depths": (1, 1, 1, 1)})
    assert_same(ecoformer.load(path), model, IMAGES)


@pytest.mark.parametrize(
    "build",
    [
        lambda: converted(timm.create_model("pvt_v2_b0", num_heads=(2, 4, 5, 8)), ("softmax", {})),
        lambda: timm.create_model("twins_svt_small", wss=(3, 3, 3, 3)),
        lambda: converted(vit(act_layer="relu"), ("softmax", {})),
        lambda: ours("pvt_v2_b0", attention="softmax", norm_layer=partial(nn.LayerNorm, eps=1.0)),
        lambda: bert(attn_implementation="eager"),
    ],
    ids=["heads", "windows", "activation", "function", "eager"],
)
def test_never_another_model_in_silence(build, tmp_path):
    """Arguments that leave no trace in names and shapes are kept, or asked for."""
    torch.manual_seed(0)
    model = build()
    x = WORDS if isinstance(model, transformers.PreTrainedModel) else IMAGES
    x = SMALL if hasattr(model, "patch_embed") and hasattr(model, "cls_token") else x
    settle(model, x)
    try:
        path = ecoformer.save(model, tmp_path / "model")
    except ValueError as error:
        assert "arguments=" in str(error)  # noqa: PT017
    else:
        assert torch.equal(run(ecoformer.load(path), x), run(model, x))


def test_how_images_are_prepared_is_kept(tmp_path):
    model = vit("vit_small_patch16_224.dino", depth=1)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model", arguments={"depth": 1}))
    assert resolve_model_data_config(again) == resolve_model_data_config(model)


def test_where_it_was_built_does_not_matter(tmp_path):
    model = settle(ours("pvt_v2_b0", attention="softmax"), IMAGES)
    other = ours("pvt_v2_b0", attention="softmax", device="meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert_same(ecoformer.load(ecoformer.save(other, tmp_path / "model")), model, IMAGES)


def test_saving_draws_no_numbers(tmp_path):
    model, state = ours("pvt_v2_b0", attention="performer"), torch.get_rng_state()
    ecoformer.save(model, tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_of_ones_own(tmp_path):
    model = settle(converted(Plain(), ("softmax", {}), ("eco", ECO | {"layers": "layers.1.*"})), TOKENS)
    path = ecoformer.save(model.bfloat16(), tmp_path / "model")
    assert "Plain" in refused(path)
    assert "ecoformer.load(path, model)" in refused(path)
    bare = Plain().bfloat16()
    assert ecoformer.load(path, bare) is bare
    assert_same(bare, model, TOKENS)
    wide = ecoformer.load(path, Plain())  # a model keeps its precision
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.last.weight, model.last.weight.float())
    ready = converted(Plain(), ("softmax", {}), ("eco", ECO | {"layers": "layers.1.*"})).bfloat16()
    assert_same(ecoformer.load(path, ready), model, TOKENS)
    assert_same(ecoformer.load(ecoformer.save(bare, tmp_path / "b"), Plain().bfloat16()), model, TOKENS)


def plain_file(tmp_path, **edits):
    model = settle(converted(Plain(), ("softmax", {})), TOKENS)
    path = ecoformer.save(model, tmp_path / "model")
    tensors, description = storage.read(path)
    return storage.write(path, tensors, description | edits), model


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (("softmax", {}), ("combiner", {})),
        (("eco", ECO | {"bias": "tight"}), ("eco", ECO)),
        (("softmax", {}), ("eco", ECO)),
    ],
    ids=["mechanism", "settings", "names"],
)
def test_into_a_model_with_another_mechanism(saved, given, tmp_path):
    model, other = (settle(converted(Plain(), step), TOKENS) for step in (saved, given))
    refused(ecoformer.save(model, tmp_path / "model"), other)


def test_into_another_architecture(tmp_path):
    path, _ = plain_file(tmp_path)
    assert "does not fit" in refused(path, Plain(hidden=48))
    assert "does not fit" in refused(path, nn.Sequential(Plain()).train())
    assert refused(path, vit())
    assert refused(path, nn.Linear(2, 2))


def test_into_a_model_whose_weights_are_tied(tmp_path):
    path, _ = plain_file(tmp_path)
    assert "tied" in refused(path, Plain(tied=True))


def test_another_kind_of_number(tmp_path):
    path, _ = plain_file(tmp_path)
    tensors, description = storage.read(path)
    storage.write(
        path, tensors | {"first.bias": tensors["first.bias"].long()}, description | {"dtype": "bfloat16"}
    )
    assert "kind of number" in refused(path, Plain())


LAYER = "layers.0.self_attn"


@pytest.mark.parametrize(
    "edits",
    [{"conversions": conversions} for conversions in (None, "softmax", [3], [{}])]
    + [{"conversions": [{"mechanism": "softmax", "layers": {LAYER: 3}}]}]
    + [{"conversions": [{"mechanism": "no such", "layers": {LAYER: {}}}]}]
    + [{"conversions": [{"mechanism": "eco", "layers": {LAYER: {"bitz": 3}}}]}]
    + [{"conversions": [{"mechanism": "eco", "layers": {"nowhere": {}}}]}],
    ids=str,
)
def test_damaged_descriptions(edits, tmp_path):
    refused(plain_file(tmp_path, **edits)[0], Plain())


@pytest.mark.parametrize(
    "model",
    [3, {}, {"library": "timm"}, {"library": "ecoformer", "name": "os", "arguments": {}}]
    + [{"library": "timm", "name": "no such", "arguments": {}}]
    + [{"library": "timm", "name": "pvt_v2_b0", "arguments": {"x": 1}}]
    + [{"library": "transformers", "name": name, "config": {}} for name in ("AutoModel", "logging")],
    ids=str,
)
def test_damaged_architectures(model, tmp_path):
    refused(plain_file(tmp_path, model=model)[0])


def test_files_that_are_none(tmp_path):
    """Damaged files are the business of tests/storage."""
    path, model = tmp_path / "x", Plain()
    for content in (b"", b"not a checkpoint", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        assert str(path) in refused(path)
        assert str(path) in refused(path, model)
    storage.write(path, model.state_dict(), {"something": "else"})
    assert "was not written by ecoformer.save" in refused(path, model)
    with pytest.raises(FileNotFoundError):
        ecoformer.load(tmp_path / "nowhere")


def test_no_pickle_and_no_network(tmp_path, monkeypatch):
    """Whatever a file says: it is data, and names no other file."""

    def forbidden(*args, **kwargs):
        raise AssertionError(f"called with {args}")

    torch.save(ours("pvt_v2_b0").state_dict(), tmp_path / "other.pth")
    path = ecoformer.save(ours("pvt_v2_b0", attention="softmax"), tmp_path / "model")
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)
    monkeypatch.setattr("socket.socket.connect", forbidden)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", forbidden)
    ecoformer.load(path)
    tensors, description = storage.read(path)
    other = str(tmp_path / "other.pth")
    for name, arguments in {
        "ecoformer_pvt_v2_b0": {"checkpoint_path": other},
        "pvt_v2_b0": {"pretrained": True, "pretrained_cfg_overlay": {"file": other}},
        "hf-hub:someone/something": {},
        f"local-dir:{tmp_path}": {},
    }.items():
        edited = json.loads(json.dumps(description))
        edited["model"] |= {"name": name, "arguments": edited["model"]["arguments"] | arguments}
        refused(storage.write(tmp_path / "edited", tensors, edited))


def test_a_model_that_cannot_be_saved_leaves_the_old_file(tmp_path):
    path, model = plain_file(tmp_path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="arguments="):
        ecoformer.save(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), path)
    with pytest.raises(TypeError, match="config"):
        ecoformer.save(timm.create_model("pvt_v2_b0"), path, arguments={"norm_layer": nn.LayerNorm})
    assert path.read_bytes() == old
    assert_same(ecoformer.load(path, Plain()), model, TOKENS)
