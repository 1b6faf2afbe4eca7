"""Conversion of Hugging Face's encoders: the same answers, padding and all, and what is refused."""

import copy

import pytest
import torch

import ecoformer
from ecoformer import FitOptions, convert

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
DISTILLED = {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
DISTILLED["max_position_embeddings"] = 40
VISION = {key: TEXT[key] for key in list(TEXT)[1:5]} | {"image_size": 32, "patch_size": 8}
TEXTS = ["Bert", "Camembert", "Data2VecText", "DistilBert", "Electra", "Ernie", "Roberta", "XLMRoberta"]
VISIONS = ["ViT", "DeiT", "Dinov2", "ViTMSN"]
LENGTHS = torch.tensor([9, 5, 2])
SEEN = torch.arange(9) < LENGTHS[:, None]
QUICK = {"options": FitOptions(steps=2, pairs=2), "progress": False}


def build(name, kind="Model", **config):
    """A model with weights as after training; `config` beside the sizes."""
    sizes = DISTILLED if name == "DistilBert" else VISION if name in VISIONS else TEXT
    if kind == "Model" and name in ("Bert", "ViT", "DeiT"):
        model = getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**{**sizes, **config}), add_pooling_layer=False
        )
    else:
        model = getattr(transformers, f"{name}{kind}")(
            getattr(transformers, f"{name}Config")(**{**sizes, **config})
        )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model.eval()


def words(n=9, batch=3):
    return torch.randint(3, 50, (batch, n), generator=torch.Generator().manual_seed(0))


def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def padded():
    return {"input_ids": words().masked_fill(~SEEN, 0), "attention_mask": SEEN.long()}


def same(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def refused(model, message, *args, **kwargs):
    modules, state = list(model.named_modules()), copy.deepcopy(model.state_dict())
    attributes = [set(vars(m)) for _, m in modules]
    with pytest.raises(ValueError, match=message) as caught:
        convert(model, *args, **kwargs)
    assert "\n" not in str(caught.value)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in modules]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [set(vars(m)) for _, m in modules] == attributes


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_text_under_softmax_is_the_same_function(name, implementation):
    model = build(name, attn_implementation=implementation).double()
    ids, batch = words(), padded()
    before = model(input_ids=ids).last_hidden_state, model(**batch).last_hidden_state
    report = convert(model, "softmax")
    assert len(report.replaced) == 2
    assert report.left == ()
    same(model(input_ids=ids).last_hidden_state, before[0])
    same(model(**batch).last_hidden_state[SEEN], before[1][SEEN])
    same(model(**batch, output_hidden_states=True).hidden_states[-1][SEEN], before[1][SEEN])
    same(model(**batch, return_dict=False)[0][SEEN], before[1][SEEN])


@pytest.mark.parametrize("name", VISIONS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_images_under_softmax_are_the_same_function(name, implementation):
    model, x = build(name, attn_implementation=implementation).double(), images()
    before = model(x).last_hidden_state
    assert len(convert(model, "softmax").replaced) == 2
    # Their eager softmax is in fp32 whatever the dtype.
    same(model(x).last_hidden_state, before, 1e-10 if implementation == "sdpa" else 1e-5)


def test_dropout_is_carried():
    for name, rate in (("Bert", "attention_probs_dropout_prob"), ("DistilBert", "attention_dropout")):
        for mechanism, expected in (("softmax", 0.3), ("eco", 0.0)):
            model = build(name, **{rate: 0.3})
            convert(model, mechanism)
            new = next(m for m in model.modules() if isinstance(m, ecoformer.Attention))
            assert (new.attn_drop, new.proj_drop.p) == (expected, 0.0)


@pytest.mark.parametrize("local", [0, 5])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hashed_answers_do_not_hang_on_the_length_of_the_padding(local, implementation):
    model = build("Bert", "ForSequenceClassification", num_labels=4, attn_implementation=implementation)
    convert(model, "eco", local=local, support=4, bits=6)
    batch = padded()
    ecoformer.fit_hashers(model, [batch], **QUICK)
    for name, parameter in model.named_parameters():
        if name.endswith("local.weight"):
            torch.nn.init.normal_(parameter)
    out = model(**batch).logits
    for row, length in enumerate(LENGTHS.tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        torch.testing.assert_close(model(input_ids=ids).logits, out[row : row + 1])
        longer = torch.nn.functional.pad(ids, (0, 20), value=7)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 20))
        torch.testing.assert_close(
            model(input_ids=longer, attention_mask=mask).logits, out[row : row + 1], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("mechanism", ["softmax", "eco"])
def test_learning_with_gradient_checkpoints(mechanism):
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4}
    model, batch = build("Bert", "ForSequenceClassification", **still), padded()
    convert(model, mechanism, **({"support": 4, "bits": 6} if mechanism == "eco" else {}))
    if mechanism == "eco":
        ecoformer.fit_hashers(model, [batch], **QUICK)
    gradients = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train().zero_grad()
        model(**batch, labels=torch.tensor([0, 1, 2])).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        torch.testing.assert_close(gradients[-1], gradients[0])
    model(**batch, labels=torch.tensor([0, 1, 2]), num_items_in_batch=torch.tensor(3))  # as Trainer does
    layer = "bert.encoder.layer.0.attention.self.attention."
    learning = [
        name for name in gradients[0] if name.startswith(layer) and gradients[0][name].abs().sum() > 0
    ]
    assert len(learning) == (4 if mechanism == "eco" else 2)


def test_what_a_converted_layer_cannot_do():
    model = build("Bert", attn_implementation="eager")
    convert(model, "softmax")
    with pytest.raises(ValueError, match="differs between queries or heads"):
        model(input_ids=words(), attention_mask=torch.ones(3, 1, 9, 9).tril().bool())


def test_local_branch_of_text_and_of_images():
    model = build("Bert")
    refused(
        model, r"^local=\(3, 3\) needs .*encoder.layer.0.attention.self.* use local=k", "eco", local=(3, 3)
    )
    for name in VISIONS:
        original, x = build(name), images().float()
        plain, model = copy.deepcopy(original), copy.deepcopy(original)
        convert(plain, "lsh_eco", seed=0)
        convert(model, "lsh_eco", seed=0, local=(3, 3))
        assert torch.equal(model(x).last_hidden_state, plain(x).last_hidden_state)
        prefix = 2 if name == "DeiT" else 1
        (image,) = {m.image for m in model.modules() if isinstance(m, ecoformer.conversion.Adapter)}
        assert (image.grid, image.prefix) == ((4, 4), prefix)
        classifier = build(name, "ForImageClassification", num_labels=3)
        convert(classifier, "softmax", local=(3, 3))
        assert classifier(x).logits.shape == (2, 3)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ViT", "Dinov2"])
def test_hidden_states_after_attention_weights(name):
    """transformers never removes its hooks from a model that has returned them."""
    model = build(name, attn_implementation="eager")
    x = words() if name in TEXTS else images().float()
    expected = model(x, output_hidden_states=True, output_attentions=True).hidden_states
    convert(model, "softmax")
    same(model(x, output_hidden_states=True).hidden_states, expected, 1e-4)
    with pytest.raises(ValueError, match="does not support output_attentions"):
        model(x, output_attentions=True)


def test_a_backbone_captures_hidden_states():
    config = transformers.Dinov2Config(**VISION, out_features=["stage1", "stage2"])
    model = transformers.Dinov2Backbone(config).eval()
    expected = model(images().float()).feature_maps
    convert(model, "softmax")
    same(model(images().float()).feature_maps, expected, 1e-4)


def test_an_images_grid_is_not_that_of_a_text():
    model = transformers.VisionTextDualEncoderModel(vision_model=build("DeiT"), text_model=build("Bert"))
    refused(model, r"^local=\(3, 3\) needs .*text_model.* use local=k", "lsh_eco", local=(3, 3))
    convert(model, "lsh_eco", layers="vision_model.*", local=(3, 3))
    assert model.vision_model(images().float()).last_hidden_state.shape == (2, 18, 16)


@pytest.mark.parametrize("name", VISIONS)
def test_images_of_another_shape_are_read_in_their_own_grid(name):
    model, grids = build(name), []
    convert(model, "softmax", local=(3, 3))
    for module in model.modules():
        if isinstance(module, ecoformer.Attention):
            module.local.register_forward_pre_hook(lambda branch, args: grids.append(args[3]))
    more = {} if name == "Dinov2" else {"interpolate_pos_encoding": True}
    model(torch.randn(2, 3, 16, 64), **more)
    assert set(grids) == {(2, 8)}


def test_refusals():
    decoder = {"is_decoder": True, "add_cross_attention": True}
    refused(build("Bert", is_decoder=True), r"^encoder.layer.0.attention.self .*decoder", "eco")
    refused(build("Bert", **decoder), r"^encoder.layer.0.attention.self .*decoder", "eco")
    refused(build("Bert", **decoder), r"crossattention.self \(BertCrossAttention\)", "eco", layers="*cross*")
    refused(build("MPNet"), r"MPNetSelfAttention\) cannot be converted.*register_conversion", "eco")
    refused(build("Albert", embedding_size=8), r"AlbertAttention\).*register_conversion", "eco")
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    refused(transformers.T5EncoderModel(t5), r"T5Attention\) .*relative position bias", "eco")
    swin = transformers.SwinConfig(
        image_size=16, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=2
    )
    refused(transformers.SwinModel(swin), r"SwinAttention|SwinSelfAttention", "eco")
    wide = transformers.ViTConfig(**VISION, head_dim=16)
    refused(transformers.ViTModel(wide), r"layers.0.attention \(ViTAttention\) .*square", "eco")


@pytest.mark.parametrize("form", ["ids", "mapping", "BatchEncoding"])
def test_tokens_are_counted_for_linformer(form):
    ids, mapping = words(), {"input_ids": words()}
    example = {"ids": ids, "mapping": mapping, "BatchEncoding": transformers.BatchEncoding(mapping)}[form]
    model = build("Bert")
    refused(model, "linformer is sized by .*seq_len=.* or example=", "linformer")
    convert(model, "linformer", example=example, k=4)
    assert {m.seq_len for m in model.modules() if isinstance(m, ecoformer.Attention)} == {9}
    assert model(**padded()).last_hidden_state.isfinite().all()
