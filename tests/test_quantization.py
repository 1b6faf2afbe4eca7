"""Integer layers and `quantize`: close to the originals, saved, exported, refused where they cannot be."""

import copy

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.attention.local import LocalBranch
from ecoformer.quantization.attention import IntegerAttention, IntegerLocal
from ecoformer.quantization.layers import Grid, IntegerConv2d, IntegerLinear
from ecoformer.quantization.quantize import Observer, on_grid
from ecoformer.third_party import import_timm

timm = import_timm()


def error(found, target):
    found, target = found.detach(), target.detach()
    return float((found - target).square().mean() / target.square().mean())


def small_model(**settings):
    torch.manual_seed(0)
    model = timm.create_model("pvt_v2_b0", num_classes=10, **settings).eval()
    ecoformer.convert(model, "sharp_eco", seed=0)
    for module in model.modules():
        if isinstance(module, ecoformer.Attention):
            nn.init.normal_(module.key_weights.exponent.weight, std=0.02)
    return model


def images(count=3, size=32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, size, size, generator=generator) for _ in range(count)]


def test_linear_layer_by_hand():
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.27, -0.635, 0.0], [0.0, 0.0, 0.0]]))
        layer.bias.copy_(torch.tensor([0.5, -3.0]))
    new = IntegerLinear(layer.in_features, layer.out_features)
    new.fill(layer.weight, layer.bias, Grid(0.1, 10))
    assert new.numbers.tolist() == [[127, -64, 0], [0, 0, 0]]  # -63.5 rounds to even
    x = torch.tensor([[0.14, -0.26, 100.0]])
    # On the grid 0.1, -0.3 and 11.7 (117 = 127 - 10 steps).
    expected = 0.01 * 127 * 0.1 + 0.01 * 64 * 0.3 + 0.5
    assert new(x).squeeze().tolist() == pytest.approx([expected, -3.0], abs=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False),
        nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.Conv2d(160, 4, 3),
    ],
)
def test_convolutions_are_close(layer):
    torch.manual_seed(0)
    x = torch.randn(2, layer.in_channels, 9, 10) + 0.5
    model = nn.Sequential(copy.deepcopy(layer))
    report = ecoformer.quantize(model, [x], progress=False)
    assert isinstance(model[0], IntegerConv2d)
    assert error(model(x), layer(x)) == pytest.approx(report.layers[0].error, rel=1e-4)
    assert report.layers[0].error < 1e-3


def test_sums_are_exact_under_autocast_and_rows_may_have_any_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 8, 9, 9)
    ecoformer.quantize(model, [x], progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    assert torch.equal(mixed, model(x))
    rows = nn.Sequential(nn.Linear(6, 5))
    ecoformer.quantize(rows, [torch.randn(3, 4, 6)], progress=False)
    one = torch.randn(6)
    assert torch.equal(rows(one), rows(one.expand(2, 3, 6))[1, 2])


def test_convolutions_with_other_padding_stay():
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.Conv2d(1, 1, 1))
    report = ecoformer.quantize(model, [torch.randn(1, 1, 5, 5)], progress=False)
    assert [layer.why is None for layer in report.layers] == [False, True]
    assert "reflect" in str(report)


@pytest.mark.parametrize(
    "settings",
    [{}, {"separate": False}, {"key_weights": False}, {"out_proj": False}, {"bits": 32}, {"local": 3}],
)
@pytest.mark.parametrize("padding", [False, True])
def test_attention_is_close(settings, padding):
    torch.manual_seed(0)
    layer = ecoformer.create_attention("sharp_eco", dim=32, num_heads=2, **settings).eval()
    if layer.key_weights is not None:
        nn.init.normal_(layer.key_weights.exponent.weight, std=0.1)
    if layer.local is not None:
        nn.init.normal_(layer.local.weight, std=0.5)
    holder, x = nn.ModuleDict({"attention": layer}), torch.randn(2, 150, 32)
    mask = torch.arange(150).expand(2, 150) >= torch.tensor([[100], [150]]) if padding else None

    def forward(model, batch):
        return model["attention"](batch, key_padding_mask=mask)

    with torch.inference_mode():
        expected = forward(holder, x)
        ecoformer.quantize(holder, [x], forward=forward, progress=False)
        assert isinstance(holder["attention"], IntegerAttention)
        assert error(forward(holder, x), expected) < 0.02
        if padding:  # what is padding does not matter
            other = torch.where(mask.unsqueeze(-1), 3.0, x)
            kept = ~mask
            assert torch.equal(forward(holder, other)[kept], forward(holder, x)[kept])


@pytest.mark.parametrize("size", [5, (3, 3)])
def test_sums_of_a_local_branch_are_those_of_whole_numbers(size):
    branch = LocalBranch(4, size)
    nn.init.normal_(branch.weight)
    new, steps = IntegerLocal(branch), torch.tensor([0.1, 0.2, 0.3, 0.4])
    new.fill(branch.weight, steps)
    v = torch.randint(-127, 128, (2, 14, 4), dtype=torch.int8)
    where = {"grid": (3, 4), "prefix": 2} if isinstance(size, tuple) else {}
    hidden = torch.arange(14).expand(2, 14) >= torch.tensor([[9], [14]])
    sums = new(v, hidden, **where)
    assert sums.dtype == torch.int32
    whole = LocalBranch(4, size)
    whole.weight.data.copy_(new.weight.squeeze(-1))
    visible = v.float().masked_fill(hidden.unsqueeze(-1), 0)
    assert torch.equal(sums.float(), whole(visible, **where))
    assert error(sums * new.scale, branch(visible * steps, **where)) < 1e-4


def test_only_the_projections_of_attention_with_many_bits_compute_in_int8():
    torch.manual_seed(0)
    layer = ecoformer.create_attention("sharp_eco", dim=32, num_heads=2, bits=128).eval()
    holder, x = nn.Sequential(layer), torch.randn(2, 50, 32)
    with torch.inference_mode():
        expected = holder(x)
        report = ecoformer.quantize(holder, [x], progress=False)
        assert {found.name for found in report.layers} == {"0.qk", "0.v", "0.proj", "0.key_weights.exponent"}
        assert error(holder(x), expected) < 0.02


def test_a_model_in_int8_is_close_small_and_left_in_its_mode():
    model = small_model().train()
    original = copy.deepcopy(model)
    report = ecoformer.quantize(model, images(), progress=False)
    assert all(layer.why is None for layer in report.layers)
    assert report.megabytes[1] < 0.3 * report.megabytes[0]
    assert model.training
    assert all(module.training for module in model.modules())
    x = images()[0]
    with torch.inference_mode():
        assert error(model.eval()(x), original.eval()(x)) < 0.05
    names = [layer.name for layer in report.layers]
    assert "stages.0.blocks.0.attn.attention" in names
    assert not any("attention." in name for name in names)
    assert all(len(line) <= 80 for line in str(report).splitlines()[1:])


def test_layers_with_a_large_error_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(0.0)
        model[0].weight[0, 0] = 1.0
        model[0].bias.fill_(0.0)
    x = torch.randn(64, 8)
    x[:, 0] *= 1e-3
    x[:, 1] *= 10  # which the first layer does not look at, but its grid must reach
    report = ecoformer.quantize(model, [x], max_error=0.05, progress=False)
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], IntegerLinear)
    assert "its error would be" in str(report)


@pytest.mark.parametrize("scale", [1e-3, 2000.0])
def test_errors_are_measured_in_fp32(scale):
    """Squares of large outputs are infinite in fp16, and those of small ones are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False)).half()
    with torch.no_grad():
        model[0].weight.mul_(scale)
    report = ecoformer.quantize(copy.deepcopy(model), [torch.randn(32, 16).half()], progress=False)
    assert 1e-6 < report.layers[0].error < 1e-3
    with pytest.raises(ValueError, match="no layer that int8 can take: 0: its error would be"):
        ecoformer.quantize(model, [torch.randn(32, 16).half()], max_error=1e-6, progress=False)


@pytest.mark.parametrize("max_error", [0, -1, float("nan"), "0.1", None])
def test_max_error_is_a_number_above_0(max_error):
    with pytest.raises(ValueError, match="max_error must be a number above 0"):
        ecoformer.quantize(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4)], max_error=max_error)


class Routed(nn.Module):
    """Layers that are called by name, with zeros, without rows, and in the first pass only."""

    def __init__(self):
        super().__init__()
        self.named, self.zeros, self.empty, self.once = (nn.Linear(4, 4) for _ in range(4))
        self.wide, self.calls = nn.Linear((1 << 16) + 1, 1, device="cpu"), 0
        self.attention = ecoformer.create_attention("sharp_eco", 4, 1, qkv_bias=False)

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            self.once(x)
        self.empty(x[:0])
        self.wide(x.new_ones(1, (1 << 16) + 1))
        self.attention(key_padding_mask=x.new_ones(1, len(x), dtype=torch.bool), x=x.unsqueeze(0))
        return self.zeros(0 * x) + self.named(input=x)


def test_layers_that_int8_cannot_take_stay_with_a_reason():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(8, 4)
    expected = model.zeros.bias + model.named(x)
    report = ecoformer.quantize(model, [x], progress=False)
    why = {layer.name: layer.why for layer in report.layers}
    assert why == {
        "named": None,
        "zeros": "its inputs were all zero",
        "empty": "no batch reached it",
        "once": "only the first of two passes reached it",
        "wide": "it adds up more than 65,536 products, which may not fit in 32 bits",
        "attention": "its outputs are tiny next to its values",
    }
    assert error(model.eval()(x), expected) < 1e-3


def test_encoder_layers_of_pytorch_are_quantised_once_their_attention_is_converted():
    torch.manual_seed(0)
    x = torch.randn(4, 10, 32)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(32, 4)).eval()
    converted = copy.deepcopy(plain)
    report = ecoformer.quantize(plain, [x], progress=False)
    assert {each.name: each.why is None for each in report.layers} == {"0.layers.0": False, "1": True}
    assert "stays: 0.layers.0 (TransformerEncoderLayer): PyTorch reads its weights" in str(report)
    ecoformer.convert(converted, "sharp_eco", seed=0)
    expected = converted(x)
    report = ecoformer.quantize(converted, [x], progress=False)
    assert [each.name for each in report.layers if each.why is None] == [
        "0.layers.0.self_attn.attention",
        "0.layers.0.linear1",
        "0.layers.0.linear2",
        "1",
    ]
    with torch.no_grad():
        assert error(converted(x), expected) < 0.02


def test_the_first_batches_are_read_and_no_more():
    read = []

    def loader():
        for i in range(100):
            read.append(i)
            yield {"input": torch.randn(4, 6)}

    model = nn.Sequential(nn.Linear(6, 5))
    ecoformer.quantize(model, loader(), samples=10, forward=lambda m, b: m(b["input"]), progress=False)
    assert len(read) == 3


def test_a_model_that_cannot_run_with_integer_layers_stays_as_it_was():
    class ReadsBias(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(self.linear(x), self.linear.weight, self.linear.bias)

    model, x = ReadsBias(), torch.randn(8, 4)
    expected = model(x)
    with pytest.raises(ValueError, match="does not run with integer layers and stays as it was"):
        ecoformer.quantize(model, [x], progress=False)
    assert type(model.linear) is nn.Linear
    assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match="meta device"):
        ecoformer.quantize(model.to("meta"), [x], progress=False)


def test_training_an_integer_model_is_refused():
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(8, 4)
    ecoformer.quantize(model, [x], progress=False)
    with pytest.raises(RuntimeError, match="gradients do not pass integer layers"):
        model.train()(x)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(model.eval()(x), expected)


@pytest.mark.parametrize("teach", [ecoformer.transfer, ecoformer.distill])
def test_teaching_an_integer_model_is_refused(teach):
    model, batches = small_model(), images()
    teacher = copy.deepcopy(model)
    ecoformer.quantize(model, batches, progress=False)
    with pytest.raises(ValueError, match=r"student .* is quantised"):
        teach(model, teacher, batches, steps=1, progress=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_integer_attention_takes_no_samples_and_is_traced():
    torch.manual_seed(0)
    layer = ecoformer.create_attention("sharp_eco", 16, 2, local=3)
    model = nn.Sequential(nn.Linear(8, 16), layer).eval().requires_grad_(False)
    x = torch.randn(3, 9, 8)
    ecoformer.quantize(model, [x], progress=False)
    assert model(x[:0]).shape == (0, 9, 16)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x + 1), model(x + 1))


def test_saved_and_loaded(tmp_path):
    model = small_model()
    ecoformer.quantize(model, images(), progress=False)
    path = ecoformer.save(model, tmp_path / "int8.safetensors")
    again = ecoformer.load(path)
    x = images()[0]
    with torch.inference_mode():
        assert torch.equal(again(x), model(x))
    assert path.stat().st_size < 5e6
    for other in (timm.create_model("pvt_v2_b0", num_classes=10), small_model(), copy.deepcopy(model)):
        again = ecoformer.load(path, other)
        with torch.inference_mode():
            assert torch.equal(again(x), model(x))


def test_transformers_refuses_int8_weights(tmp_path):
    """They have the names of the original's; only the shapes tell."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    for mechanism in (None, "sharp_eco"):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
        if mechanism is not None:
            ecoformer.convert(model, mechanism)
        ids = torch.arange(24).view(2, 12)
        ecoformer.quantize(model, [{"input_ids": ids}], progress=False)
        again = ecoformer.load(ecoformer.save(model, tmp_path / "int8.safetensors"))
        with torch.inference_mode():
            assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
        folder = tmp_path / str(mechanism)
        model.save_pretrained(folder)
        with pytest.raises((RuntimeError, ValueError), match=r"mismatch|in the checkpoint"):
            transformers.BertModel.from_pretrained(folder)


def test_models_that_read_the_dtype_of_a_weight(tmp_path):
    """ViT of transformers casts pixels to that of its first layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    original, pixels = copy.deepcopy(model), torch.rand(24, 3, 32, 32) * 2 - 1
    ecoformer.quantize(model, [pixels[:16]], progress=False)
    again = ecoformer.load(ecoformer.save(model, tmp_path / "int8.safetensors"))
    with torch.inference_mode():
        expected = original(pixels[16:]).logits
        for found in (model(pixels[16:]).logits, again(pixels[16:]).logits):
            assert nn.functional.cosine_similarity(found, expected).min() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_can_be_used_twice(dtype):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(16, 8)

        def forward(self, x):
            return nn.functional.linear(self.encoder(x).relu(), self.encoder.weight.t())

    torch.manual_seed(0)
    model, x = Tied().to(dtype), torch.randn(32, 16, dtype=dtype)
    expected = model(x)
    ecoformer.quantize(model, [x], progress=False)
    weight = model.encoder.weight
    assert (weight.dtype, weight.shape, weight.device) == (dtype, (8, 16), x.device)
    assert error(model(x), expected) < 1e-3
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    numbers = model.state_dict()["encoder.weight"]
    assert (numbers.dtype, numbers.shape) == (torch.int8, (8, 16, 1))


def test_integer_layers_refuse_what_the_originals_refuse():
    linear, convolution = IntegerLinear(4, 3), IntegerConv2d(nn.Conv2d(4, 2, 3))
    for layer, size in ((linear, (2, 4)), (convolution, (1, 4, 5, 5))):
        with pytest.raises(ValueError, match=r"must be floating point .*got torch.int64"):
            layer(torch.ones(size, dtype=torch.long))
        with pytest.raises(ValueError, match=r"must be floating point .*8"):
            layer(torch.ones([8 if n == 4 else n for n in size]))


@pytest.mark.parametrize("weight", [0.0, 1e-9, 1e-38])
def test_biases_of_channels_with_tiny_weights(weight):
    torch.manual_seed(0)
    for layer, x in ((nn.Linear(16, 4), 100 * torch.randn(32, 16)), (nn.Conv2d(3, 4, 3), images(1)[0])):
        with torch.no_grad():
            layer.weight[2] *= weight
            layer.bias[2] = 0.3
            layer.weight[3], layer.bias[3] = 0.0, 0.0
        model = nn.Sequential(copy.deepcopy(layer))
        ecoformer.quantize(model, [x], progress=False)
        found, expected = (each(x).transpose(0, 1).flatten(1) for each in (model, layer))
        assert found[2].tolist() == pytest.approx(expected[2].tolist(), abs=0.02)
        assert not found[3].any()


def test_the_largest_sum_fits_in_32_bits():
    weight, bias = torch.ones(1, 1 << 16), torch.tensor([980.0])
    layer = IntegerLinear(1 << 16, 1)
    layer.fill(weight, bias, Grid(0.01, -128))
    x = torch.full((1, 1 << 16), 255 * 0.01)
    assert layer(x).item() == pytest.approx(980 + 255 * 0.01 * (1 << 16), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_stay_in_fp32(dtype):
    torch.manual_seed(0)
    attention = ecoformer.create_attention("sharp_eco", 32, 2, local=3)
    nn.init.normal_(attention.local.weight)
    model = nn.Sequential(nn.Linear(16, 32), attention).eval()
    x = torch.randn(2, 9, 16)
    expected = model(x)
    ecoformer.quantize(model, [x], progress=False)
    state = copy.deepcopy(model.state_dict())
    model.to(dtype)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert model[0].weight.dtype == model[1].projection.weight.dtype == dtype
    found = model(x.to(dtype))
    assert found.dtype == dtype
    assert error(found.float(), expected) < 0.02


def test_buffers_may_be_written_in_place(tmp_path):
    pytest.importorskip("onnxruntime")
    one = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    other, x = copy.deepcopy(one), images(1)[0]
    ecoformer.quantize(one, [x + 4], progress=False)
    ecoformer.quantize(other, [3 * x], progress=False)
    for to, source in zip(other.buffers(), one.buffers(), strict=True):
        to.copy_(source)
    assert torch.equal(other(x + 4), one(x + 4))
    ecoformer.export_onnx(other, tmp_path / "int8.onnx", x + 4)
    assert other[0]._grids == one[0]._grids


def test_attention_with_a_local_branch_is_saved_and_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    arguments = {"img_size": 64, "depth": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    ecoformer.convert(model, "sharp_eco", local=(3, 3), seed=0)
    for module in model.modules():
        if isinstance(module, LocalBranch):
            nn.init.normal_(module.weight, std=0.3)
    batches, original = images(size=64), copy.deepcopy(model)
    ecoformer.quantize(model, batches, progress=False)
    model.blocks[0].attn.image.grid = None  # it must be that of the next image
    assert sum(isinstance(module, IntegerLocal) for module in model.modules()) == 2
    with torch.inference_mode():
        assert error(model(batches[0]), original(batches[0])) < 0.02
        file = ecoformer.save(model, tmp_path / "int8.safetensors", arguments=arguments)
        assert torch.equal(ecoformer.load(file)(batches[0]), model(batches[0]))
    made = ecoformer.export_onnx(model, tmp_path / "int8.onnx", batches[0], samples=batches)
    assert made.same_top1 >= 0.9


@pytest.mark.parametrize("attention", ["sharp_eco", "native"])
def test_exported_as_pairs_of_quantize_and_dequantize(tmp_path, attention):
    pytest.importorskip("onnxruntime")
    shallow = {"depths": (1, 1, 1, 1)}
    model = timm.create_model("pvt_v2_b0", num_classes=10, **shallow).eval()
    model = small_model(**shallow) if attention == "sharp_eco" else model
    batches = images(size=64)
    ecoformer.quantize(model, batches, progress=False)
    made = ecoformer.export_onnx(model, tmp_path / "int8.onnx", batches[0], samples=batches)
    assert made.same_top1 >= 0.9
    assert made.operators["QuantizeLinear"] > 20
    assert made.bytes < 4e6
    assert not made.fixed


def test_bad_input():
    model = small_model()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="batches is empty"):
        ecoformer.quantize(model, [], progress=False)
    with pytest.raises(TypeError, match="iterable of batches"):
        ecoformer.quantize(model, images()[0], progress=False)
    bad = images()
    bad[1][0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"batches lead to NaN or infinity in patch_embed.proj"):
        ecoformer.quantize(model, bad, progress=False)
    with pytest.raises(ValueError, match="no linear layer"):
        ecoformer.quantize(nn.Sequential(nn.ReLU()), images(), progress=False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    ecoformer.quantize(model, images(1), progress=False)
    with pytest.raises(ValueError, match="quantised already"):
        ecoformer.quantize(model, images(1), progress=False)
    with pytest.raises(ValueError, match="only codes"):
        ecoformer.convert(model, "eco")


def test_causal_attention_stays_in_floating_point():
    holder = nn.ModuleDict({"a": ecoformer.create_attention("sharp_eco", 16, 1), "b": nn.Linear(16, 16)})

    def forward(model, batch):
        return model["b"](model["a"](batch, is_causal=True))

    report = ecoformer.quantize(holder, [torch.randn(2, 9, 16)], forward=forward, progress=False)
    assert {layer.name: layer.why is None for layer in report.layers} == {"a": False, "b": True}
    integer = IntegerAttention(holder["a"])
    with pytest.raises(ValueError, match="is_causal=True is not supported"):
        integer(torch.randn(1, 3, 16), is_causal=True)


def test_grids_reach_every_number_unless_cutting_is_better():
    observer = Observer()
    x = torch.cat([torch.randn(4000), torch.tensor([60.0])])
    observer.see(x)
    grid = observer.grid()
    assert 127 * grid.scale < 60  # a single outlier is cut off
    assert (on_grid(x[:-1], *grid) - x[:-1]).square().mean() < 0.02
    observer = Observer()
    observer.see(torch.linspace(0, 5, 1000))
    grid = observer.grid()
    assert grid.zero == -128
    assert grid.scale * 255 == pytest.approx(5, rel=0.05)
