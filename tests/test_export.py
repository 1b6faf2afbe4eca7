"""Exported models: the same numbers in ONNX Runtime, at other sizes too, and standard operators only."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import create_attention, export_onnx
from ecoformer.ops.exported import decompositions

CHANNELS_LAST = ("Transpose", 0, 3, 1, 2)


class Encoder(nn.Module):
    """One layer over embedded texts, with a padding mask."""

    def __init__(self, attention, causal, **config):
        super().__init__()
        self.causal = causal
        self.attn = create_attention(attention, 16, 2, **config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x, mask):
        return self.attn(x, key_padding_mask=mask, is_causal=self.causal)


def vision_model(attention):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2), "sr_ratios": (2, 1)}
    sizes |= {"mlp_ratios": (2, 2), "linear": False, "num_classes": 5}
    model = timm.models.pvt_v2.PyramidVisionTransformerV2(**sizes).eval()
    if attention != "native":
        ecoformer.convert(model, attention)
    return model


def text_model(attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config).eval()
    if attention != "native":
        ecoformer.convert(model, attention)
    return model


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {name: x.numpy() for name, x in inputs.items()})


def before_convolutions(path):
    """The operators whose outputs convolutions read, and the axes of transposes among them."""
    nodes = onnx.load(path).graph.node
    read = {node.input[0] for node in nodes if node.op_type == "Conv"}
    found = [node for node in nodes if read & set(node.output)]
    return [
        (node.op_type, *(node.attribute[0].ints if node.op_type == "Transpose" else ())) for node in found
    ]


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:hash functions are random")
@pytest.mark.parametrize("attention", ["native", "eco", "sharp_eco"])
def test_images_of_any_size_and_number(attention, tmp_path):
    model = vision_model(attention)
    made = export_onnx(model, tmp_path / "model.onnx", torch.randn(1, 3, 32, 32))
    assert made.inputs == {"images": ("batch", 3, "height", "width")}
    assert made.outputs == {"logits": ("batch", 5)}
    assert not made.fixed
    assert made.same_top1 == 1
    assert made.bytes == made.path.stat().st_size
    assert set(before_convolutions(made.path)) == {CHANNELS_LAST}
    for shape in ((3, 3, 32, 48), (1, 3, 64, 40)):
        x = torch.randn(shape)
        assert_same(run(made.path, images=x)[0], model(x).detach())


class Maps(nn.Module):
    """Tokens to maps, a convolution, tokens again; normalised with a residual."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm, self.channels = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.LayerNorm(8),
            channels,
        )

    def forward(self, images):
        height, width = images.shape[2:]
        x = images.flatten(2).transpose(1, 2)
        maps = x.transpose(1, 2).reshape(-1, self.channels, height, width)
        found = self.conv(maps).reshape(-1, 8, height * width).transpose(1, 2)
        return self.norm(x + found)


@pytest.mark.parametrize(("channels", "before"), [(8, CHANNELS_LAST), (4, ("Reshape",))])
def test_maps_are_made_with_channels_last(channels, before, tmp_path):
    """Then ONNX Runtime cancels transposes; not where a token is split over several maps."""
    model = Maps(channels).eval()
    made = export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 8, 6, 4))
    assert before_convolutions(made.path) == [before]
    assert made.operators["Sum"] == 1  # ONNX Runtime fuses Add and LayerNormalization to something slower
    x = torch.randn(3, 8, 5, 9)
    assert_same(run(made.path, images=x)[0], model(x).detach())


@pytest.mark.filterwarnings("ignore:hash functions are random")
@pytest.mark.parametrize("attention", ["softmax", "sharp_eco"])
def test_texts_with_padding(attention, tmp_path):
    model = text_model(attention)
    inputs = {"input_ids": torch.randint(1, 50, (2, 8)), "attention_mask": torch.ones(2, 8).long()}
    made = export_onnx(model, tmp_path / "model.onnx", inputs)
    assert made.inputs == {"input_ids": ("batch", "tokens"), "attention_mask": ("batch", "tokens")}
    ids, mask = torch.randint(1, 50, (3, 21)), torch.ones(3, 21).long()
    mask[1, 4:] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits.detach()
    assert_same(run(made.path, input_ids=ids, attention_mask=mask)[0], expected)
    # What is in the place of padding does not count.
    ids[1, 4:] = 7
    assert_same(run(made.path, input_ids=ids, attention_mask=mask)[0], expected)


@pytest.mark.filterwarnings("ignore:hash functions are random", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("attention", "config"),
    [
        ("eco", {}),
        ("eco", {"groups": 4}),
        ("eco", {"bias": "tight"}),
        ("lsh_eco", {}),
        ("bi_eco", {"features": "channels"}),
        ("sharp_eco", {}),
        ("sharp_eco", {"bits": 8, "groups": 1, "separate": False, "key_weights": False}),
        ("performer", {}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_form_of_attention_in_standard_operators(attention, config, causal):
    model = Encoder(attention, causal, **config).eval()
    mask = torch.zeros(2, 6, dtype=torch.bool)
    batch, n = torch.export.Dim("batch"), torch.export.Dim("n", min=2)
    shapes = ({0: batch, 1: n}, {0: batch, 1: n})
    program = torch.export.export(model, (torch.randn(2, 6, 16), mask), dynamic_shapes=shapes)
    program = program.run_decompositions(decompositions())
    assert not [node for node in program.graph.nodes if "ecoformer" in str(node.target)]
    x, mask = torch.randn(3, 70, 16), torch.zeros(3, 70, dtype=torch.bool)
    mask[0, 9:], mask[2] = True, True
    torch.testing.assert_close(program.module()(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["eco", "sharp_eco"])
def test_zero_tokens_have_their_codes(attention):
    """sign(0) is +1, and a zero vector has the kernel of a zero vector."""
    model = create_attention(attention, 16, 2, qkv_bias=False).eval()
    if attention == "eco":
        ecoformer.fit_hashers(model, [torch.randn(4, 30, 16)])
    x = torch.randn(1, 12, 16)
    x[0, 3:7] = 0
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_inputs_are_named_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.ViTConfig(image_size=32, patch_size=16, **sizes)
    model = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    for quantised in (False, True):
        if quantised:
            ecoformer.quantize(model, [x], progress=False)
        made = export_onnx(model, tmp_path / "vit.onnx", x, samples=[x])
        assert made.inputs == {"pixel_values": ("batch", 3, 32, 32)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_quantised_models_of_other_precision(dtype, tmp_path):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 4, stride=4), nn.Flatten(2), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    model = nn.Sequential(*layers).eval().to(dtype)
    x = torch.randn(2, 3, 16, 16, dtype=dtype)
    ecoformer.quantize(model, [x], progress=False)
    made = export_onnx(model, tmp_path / "int8.onnx", x)
    assert made.relative_error < 0.02
    holder = nn.Sequential(create_attention("sharp_eco", 32, 2, local=3)).eval().to(dtype)
    x = torch.randn(2, 9, 32, dtype=dtype)
    ecoformer.quantize(holder, [x], progress=False)
    assert export_onnx(holder, tmp_path / "attention.onnx", x).relative_error < 0.02


@pytest.mark.parametrize("resamples", [False, True])
def test_a_model_for_one_size_says_so(resamples, tmp_path):
    """Also where PyTorch takes other sizes, by a branch that the recorded graph does not have."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, dynamic_img_size=resamples).eval()
    made = export_onnx(model, tmp_path / "vit.onnx", torch.randn(2, 3, 32, 32))
    assert made.inputs == {"images": ("batch", 3, 32, 32)}
    assert "height, width" in made.fixed


def test_leaves_the_model_as_it_was(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 4))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_writes_nothing_where_results_differ(tmp_path, monkeypatch):
    class Wrong(nn.Module):
        def forward(self, x):
            return x * (2.0 if torch.compiler.is_exporting() else 1.0)

    with pytest.raises(ValueError, match="something else"):
        export_onnx(Wrong(), tmp_path / "model.onnx", torch.randn(2, 4))
    assert not list(tmp_path.iterdir())


def test_one_line_for_what_cannot_be_exported(tmp_path, monkeypatch):
    class Branching(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ValueError, match="Branching cannot be exported") as error:
        export_onnx(Branching(), tmp_path / "model.onnx", torch.randn(2, 4))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot take an input"):
        export_onnx(nn.Linear(4, 3), tmp_path / "model.onnx", torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"computes in bfloat16.* export model.float\(\)"):
        export_onnx(nn.Linear(4, 3).bfloat16(), tmp_path / "model.onnx", torch.randn(2, 4).bfloat16())
    with pytest.raises(ValueError, match="example"):
        export_onnx(nn.Linear(4, 3), tmp_path / "model.onnx", {})
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ecoformer\[onnx\]'"):
        export_onnx(nn.Linear(4, 3), tmp_path / "model.onnx", torch.randn(2, 4))
    assert not list(tmp_path.iterdir())
