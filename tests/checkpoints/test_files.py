"""`save` and `load`: the same model again, bit for bit, or one clear line and nothing touched."""

import copy
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


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [(attention, torch.bfloat16) for attention in ecoformer.list_attentions()]
    + [("eco", torch.float32), ("eco", torch.float64)],
)
def test_every_mechanism_and_precision(attention, dtype, tmp_path):
    config = {"support": 4} if attention in ("eco", "klsh_eco") else None
    model = settle(ours("pvt_v2_b0", attention=attention, attention_config=config), IMAGES).to(dtype)
    assert_same(ecoformer.load(ecoformer.save(model, tmp_path / "model")), model, IMAGES)
    model.head.float()  # precisions may be mixed
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model")).state_dict()
    assert {k: v.dtype for k, v in again.items()} == {k: v.dtype for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("build", "head"),
    [(lambda: ours("pvt_v2_b0", attention="softmax"), head) for head in ((3, None), (0, ""))]
    + [(lambda: ours("twins_svt_small", attention="softmax"), (0, ""))]
    + [(lambda: timm.create_model("resnet18", num_classes=10), (3, "max"))]
    + [(lambda: timm.create_model("mobilenetv3_small_050", num_classes=10), (0, ""))],
)
def test_another_head(build, head, tmp_path):
    model = build()
    model.reset_classifier(*head)
    settle(model, IMAGES)
    assert_same(ecoformer.load(ecoformer.save(model, tmp_path / "model")), model, IMAGES)


def test_unfitted_stays_unfitted(tmp_path):
    fitted = settle(ours("pvt_v2_b0", attention_config=ECO), IMAGES)
    path = ecoformer.save(ours("pvt_v2_b0", attention_config=ECO), tmp_path / "model")
    for given in (None, fitted):
        model = ecoformer.load(path, given)
        assert not any(hasher.fitted for hasher in ecoformer.hashers_of(model).values())


def test_arguments_that_timm_forgets(tmp_path):
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4)}
    model = settle(converted(timm.create_model("pvt_v2_b0", **sizes), ("eco", ECO)), IMAGES)
    with pytest.raises(ValueError, match=r"^another pvt_v2_b0 would .* arguments=\{...\}\)") as caught:
        ecoformer.save(model, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    first = ecoformer.load(ecoformer.save(model, tmp_path / "model", arguments=sizes))
    assert_same(first, model, IMAGES)
    compiled = torch.compile(first, backend="eager")
    assert_same(ecoformer.load(ecoformer.save(compiled, tmp_path / "again")), model, IMAGES)
    pooled = settle(timm.create_model("convnext_atto", num_classes=3, global_pool="max"), IMAGES)
    path = ecoformer.save(pooled, tmp_path / "pooled", arguments={"global_pool": "max"})
    assert_same(ecoformer.load(path), pooled, IMAGES)


@pytest.mark.parametrize(
    "build",
    [
        lambda: converted(timm.create_model("pvt_v2_b0", num_heads=(2, 4, 5, 8)), ("softmax", {})),
        lambda: timm.create_model("pvt_v2_b0", num_heads=(2, 4, 5, 8)),
        lambda: timm.create_model("twins_svt_small", wss=(3, 3, 3, 3)),
        lambda: converted(vit(act_layer="relu"), ("softmax", {})),
        lambda: ours("pvt_v2_b0", attention="softmax", norm_layer=partial(nn.LayerNorm, eps=1.0)),
        lambda: bert(attn_implementation="eager"),
    ],
    ids=["heads, converted", "heads", "windows", "activation", "function", "eager"],
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


def test_what_is_no_part_of_a_model_does_not_matter(tmp_path):
    """Where it was built, where its weights came from, and gradient checkpointing."""
    model = settle(ours("pvt_v2_b0", attention="softmax"), IMAGES)
    other = ours("pvt_v2_b0", attention="softmax", device="meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    other.set_grad_checkpointing()
    state = torch.get_rng_state()
    assert_same(ecoformer.load(ecoformer.save(other, tmp_path / "model")), model, IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    words = settle(bert(), WORDS)
    words.gradient_checkpointing_enable()
    assert_same(ecoformer.load(ecoformer.save(words, tmp_path / "words")), words, WORDS)
    model = timm.create_model("pvt_v2_b0", num_classes=10, pretrained_cfg_overlay={"url": "elsewhere"})
    ecoformer.convert(model, "softmax")
    again = ecoformer.load(ecoformer.save(model, tmp_path / "model"))
    assert resolve_model_data_config(again) == resolve_model_data_config(model)


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


def test_parts_that_were_converted(tmp_path):
    model = bert("BertForSequenceClassification").eval()
    ecoformer.convert(model.bert, "lsh_eco", seed=0)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "x.safetensors"))
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)


def plain_file(tmp_path, **edits):
    model = settle(converted(Plain(), ("softmax", {})), TOKENS)
    path = ecoformer.save(model, tmp_path / "model")
    tensors, description = storage.read(path)
    return storage.write(path, tensors, description | edits)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (("softmax", {}), ("combiner", {})),
        (("eco", ECO | {"local": 3}), ("eco", ECO | {"local": 5})),
        (("eco", ECO), ("eco", ECO | {"bits": 4})),
        (("softmax", {}), ("eco", ECO)),
    ],
    ids=["mechanism", "local", "bits", "names"],
)
def test_into_a_model_with_another_mechanism(saved, given, tmp_path):
    model, other = (settle(converted(Plain(), step), TOKENS) for step in (saved, given))
    refused(ecoformer.save(model, tmp_path / "model"), other)


def test_into_another_architecture(tmp_path):
    path = plain_file(tmp_path)
    assert "does not fit" in refused(path, Plain(hidden=48))
    assert "does not fit" in refused(path, nn.Sequential(Plain()).train())
    assert "tied" in refused(path, Plain(tied=True))
    for other in (vit(), nn.Linear(2, 2)):
        refused(path, other)
    tensors, description = storage.read(path)
    storage.write(path, tensors | {"first.bias": tensors["first.bias"].long()}, description)
    assert "kind of number" in refused(path, Plain())


@pytest.mark.parametrize("mechanism", ["softmax", None])
def test_settings_that_tensors_do_not_show(mechanism, tmp_path):
    def layer(**kwargs):
        encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, **({"batch_first": True} | kwargs))
        model = nn.Sequential(encoder)
        return converted(model, (mechanism, {})) if mechanism else model

    model = layer(activation="gelu")
    path = ecoformer.save(model, tmp_path / "x")
    assert torch.equal(ecoformer.load(path, layer(activation="gelu"))(TOKENS), model.eval()(TOKENS))
    assert "norm_first" in refused(path, layer(activation="gelu", norm_first=True))
    assert "activation" in refused(path, layer(activation="relu"))
    assert "batch_first" in refused(path, layer(activation="gelu", batch_first=False))


LAYER = "layers.0.self_attn"


@pytest.mark.parametrize(
    "edits",
    [{"conversions": conversions} for conversions in (None, "softmax", [3], [{}])]
    + [{"conversions": [{"mechanism": "softmax", "layers": {LAYER: 3}}]}]
    + [{"conversions": [{"mechanism": "no such", "layers": {LAYER: {}}}]}]
    + [{"conversions": [{"mechanism": "eco", "layers": {LAYER: {"bitz": 3}}}]}]
    + [{"conversions": [{"mechanism": "eco", "layers": {"nowhere": {}}}]}]
    + [{"settings": settings} for settings in (None, {}, {"": 3})]
    + [{"model": model} for model in (3, {}, {"library": "timm"})]
    + [{"model": {"library": "ecoformer", "name": "os", "arguments": {}}}]
    + [{"model": {"library": "timm", "name": "no such", "arguments": {}}}]
    + [{"model": {"library": "timm", "name": "pvt_v2_b0", "arguments": {"x": 1}}}]
    + [{"model": {"library": "transformers", "name": n, "config": {}}} for n in ("AutoModel", "logging")],
    ids=str,
)
def test_damaged_descriptions(edits, tmp_path):
    path = plain_file(tmp_path, **edits)
    refused(path)
    if "model" not in edits:
        refused(path, Plain())


def test_a_model_that_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = plain_file(tmp_path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="arguments="):
        ecoformer.save(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), path)
    with pytest.raises(TypeError, match="config"):
        ecoformer.save(timm.create_model("pvt_v2_b0"), path, arguments={"norm_layer": nn.LayerNorm})
    assert path.read_bytes() == old
