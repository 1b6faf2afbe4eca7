"""Conversion of timm's models: which layers, their weights, what stays equal and what is kept."""

import contextlib
import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import FitOptions, convert, hashers_of, list_attentions

timm = pytest.importorskip("timm")
from timm.models import create_feature_extractor  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.pvt_v2 import PyramidVisionTransformerV2  # noqa: E402
from timm.models.twins import Twins  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

PYRAMID = {"embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "num_classes": 5}
FLAT = {"img_size": (16, 32), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
LAYERS_OF_PVT = [f"stages.{stage}.blocks.0.attn" for stage in range(4)]


def shaken(model, seed=0):
    """Weights as after training: nothing is zero or one, biases least of all."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter) / 5)
    return model.eval()


def pvt(**kwargs):
    return shaken(PyramidVisionTransformerV2(depths=(1, 1, 1, 1), **{**PYRAMID, **kwargs}))


def twins(**kwargs):
    sizes = {"img_size": 64, "depths": (2, 2, 2, 2), "sr_ratios": (4, 2, 2, 1), "wss": (2, 2, 2, 2)}
    return shaken(Twins(**{**PYRAMID, **sizes, **kwargs}))


def vit(**kwargs):
    return shaken(VisionTransformer(**{**FLAT, **kwargs}))


def deit(**kwargs):
    return shaken(VisionTransformerDistilled(**{**FLAT, **kwargs}))


def images(*size, batch=2):
    shape = (batch, 3, *(size or (64, 64)))
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()


def input_of(make):
    return images() if make in (pvt, twins) else images(16, 32)


def fitted(model, x):
    if hashers_of(model):
        ecoformer.fit_hashers(model, [x], options=FitOptions(steps=2, pairs=2), progress=False)
    return model


def names(found):
    return [layer.name for layer in found]


def test_all_but_the_last_stage_of_a_pyramid_by_default():
    report = convert(pvt(), "softmax")
    assert names(report.replaced) == LAYERS_OF_PVT[:3]
    assert [(left.name, left.why) for left in report.left] == [(LAYERS_OF_PVT[3], "last stage (64 channels)")]
    report = convert(twins(), "eco")
    assert names(report.replaced) == [f"blocks.{s}.{b}.attn" for s in range(3) for b in range(2)]
    assert names(report.left) == ["blocks.3.0.attn", "blocks.3.1.attn"]


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", [0, 1, 2, 3]),
        ("stages.[12].*", [1, 2]),
        (["stages.0.*", "stages.3.*"], [0, 3]),
        ((f"stages.{s}.*" for s in (1, 3)), [1, 3]),
        (lambda name, layer: name.startswith("stages.2") or layer.num_heads == 4, [2, 3]),
    ],
    ids=["all", "pattern", "patterns", "generator", "function"],
)
def test_layers_are_chosen(layers, chosen):
    model = pvt()
    report = convert(model, "softmax", layers=layers)
    assert names(report.replaced) == [LAYERS_OF_PVT[i] for i in chosen]
    assert {left.why for left in report.left} <= {"not chosen"}
    assert len(report.left) == 4 - len(chosen)
    assert [
        isinstance(model.get_submodule(name), ecoformer.conversion.Adapter) for name in LAYERS_OF_PVT
    ] == [i in chosen for i in range(4)]


def test_report():
    report = convert(pvt(), "eco", bits=8, local=(3, 3))
    first, last = report.replaced[0], report.left[0]
    facts = (first.was, first.dim, first.num_heads, set(first.left_behind))
    assert facts == ("Attention", 16, 1, {"sr", "norm"})
    assert all(name in str(report) for name in (*LAYERS_OF_PVT, last.why, "fit_hashers"))
    told = json.loads(json.dumps(report.to_dict()))
    assert [layer["name"] for layer in told["replaced"]] == LAYERS_OF_PVT[:3]
    assert (told["mechanism"], told["config"]) == ("eco", {"bits": 8, "local": [3, 3]})
    assert told["left"] == [{"name": last.name, "kind": "Attention", "why": last.why}]


def test_weights_of_spatial_reduction_are_carried():
    for qkv_bias in (True, False):
        model = pvt(qkv_bias=qkv_bias)
        sources = {name: copy.deepcopy(model.get_submodule(name)) for name in LAYERS_OF_PVT}
        once = copy.deepcopy(model)
        convert(model, "softmax", layers="all")
        for name, source in sources.items():
            new = model.get_submodule(name).attention
            assert torch.equal(new.qkv.weight, torch.cat([source.q.weight, source.kv.weight]))
            assert torch.equal(new.proj.weight, source.proj.weight)
            assert torch.equal(new.proj.bias, source.proj.bias)
            if qkv_bias:
                assert torch.equal(new.qkv.bias, torch.cat([source.q.bias, source.kv.bias]))
            else:
                assert new.qkv.bias is None
        convert(once, "eco")
        for name in LAYERS_OF_PVT[:3]:
            source, new = sources[name], once.get_submodule(name).attention
            assert torch.equal(new.qk.weight, source.q.weight)
            assert torch.equal(new.v.weight, source.kv.weight.chunk(2)[1])


def test_fused_weights_are_carried():
    for make, name in ((vit, "blocks.1.attn"), (twins, "blocks.0.0.attn")):
        model = make()
        source = copy.deepcopy(model.get_submodule(name))
        convert(model, "eco")
        new, (q, _, v) = model.get_submodule(name).attention, source.qkv.weight.chunk(3)
        assert torch.equal(new.qk.weight, q)
        assert torch.equal(new.v.weight, v)
        assert torch.equal(new.qk.bias, source.qkv.bias.chunk(3)[0])
        assert torch.equal(new.v.bias, source.qkv.bias.chunk(3)[2])
        assert torch.equal(new.proj.bias, source.proj.bias)


@pytest.mark.parametrize(
    ("make", "kwargs", "layers"),
    [
        (vit, {}, None),
        (vit, {"qkv_bias": False, "proj_bias": False, "init_values": 0.1}, None),
        (vit, {"class_token": False, "global_pool": "avg", "reg_tokens": 3}, None),
        (deit, {}, None),
        (pvt, {}, "stages.3.*"),
        (pvt, {"sr_ratios": (1, 1, 1, 1)}, "all"),
        (twins, {}, "blocks.3.*"),
    ],
    ids=["vit", "vit without biases", "vit with registers", "deit", "pvt", "pvt without reduction", "twins"],
)
def test_softmax_is_the_same_function(make, kwargs, layers):
    model, x = make(**kwargs).double(), input_of(make).double()
    before = model(x)
    assert convert(model, "softmax", layers=layers).replaced
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
    gradient = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(g.isfinite().all() for g in gradient)


@pytest.mark.parametrize("name", list_attentions())
def test_every_mechanism(name):
    x = images()
    sized = {"example": x, "k": 8} if name == "linformer" else {}
    model, other = pvt(), shaken(pvt(), seed=1)
    for each in (model, other):
        convert(each, name, **sized)
        fitted(each, x)
    out = model(x)
    assert out.shape == (2, 5)
    assert torch.equal(copy.deepcopy(model)(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), out)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    assert not torch.allclose(other(x), out)
    other.load_state_dict(torch.load(stored))
    assert torch.equal(other(x), out)
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model.train()(x).square().sum().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
        assert all(g.isfinite().all() for g in gradients[-1].values())
    torch.testing.assert_close(*gradients)
    with torch.device("meta"):
        model = PyramidVisionTransformerV2(depths=(1, 1, 1, 1), **PYRAMID)
    convert(model, name, **sized)
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(("mechanism", "backend"), [("softmax", "aot_eager"), ("eco", "inductor")])
def test_compiled(mechanism, backend):
    model, x = vit(depth=1), images(16, 32, batch=3)
    convert(model, mechanism, **({"local": (3, 3), "support": 5} if mechanism == "eco" else {}))
    out = fitted(model, x)(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(x), out)


def test_dtype_and_mode_are_kept():
    model = vit().bfloat16()
    model.train()
    model.blocks[1].eval()
    x = images(16, 32).bfloat16()
    before = copy.deepcopy(model).eval()(x)
    convert(model, "softmax")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    modes = [{m.training for m in block.attn.modules()} for block in model.blocks]
    assert modes == [{True}, {False}]
    torch.testing.assert_close(model.eval()(x), before, rtol=0.05, atol=0.05)
    convert(model, "eco", support=5)
    assert fitted(model, x)(x).dtype == torch.bfloat16


def test_dropout_is_carried_where_there_are_weights_to_drop():
    for mechanism, attn_drop in (("softmax", 0.3), ("eco", 0.0)):
        model = vit(attn_drop_rate=0.3, proj_drop_rate=0.2)
        convert(model, mechanism)
        assert [b.attn.attention.attn_drop for b in model.blocks] == [attn_drop] * 2
        assert [b.attn.attention.proj_drop.p for b in model.blocks] == [0.2] * 2
    model = pvt(proj_drop_rate=0.2)
    convert(model, "softmax", proj_drop=0.4)
    assert model.stages[0].blocks[0].attn.attention.proj_drop.p == 0.4
    with pytest.raises(ValueError, match="attn_drop must be 0"):
        convert(vit(), "eco", attn_drop=0.1)


@pytest.mark.parametrize("make", [pvt, twins, vit, deit])
@pytest.mark.parametrize("local", [3, (3, 3)])
def test_a_local_branch_changes_nothing_at_first(make, local):
    model, x = make(), input_of(make)
    plain = copy.deepcopy(model)
    convert(plain, "lsh_eco", seed=0)
    convert(model, "lsh_eco", seed=0, local=local)
    assert torch.equal(model(x), plain(x))
    for name, parameter in model.named_parameters():
        if name.endswith("local.weight"):
            nn.init.ones_(parameter)
    assert not torch.allclose(model(x), plain(x))


@pytest.mark.parametrize(("make", "grid", "prefix"), [(pvt, (8, 16), 0), (vit, (2, 4), 1), (deit, (2, 4), 2)])
def test_a_local_branch_lies_as_the_image_does(make, grid, prefix):
    model = make()
    convert(model, "softmax", local=(3, 3))
    adapter = model.stages[0].blocks[0].attn if make is pvt else model.blocks[0].attn
    attention, heard = adapter.attention, []
    attention.register_forward_hook(lambda module, args, out: heard.append((args[0], out)))
    x = images(32, 64) if make is pvt else images(16, 32)
    model(x)
    attention.local.weight.data[:, :, 1, 2] = 1  # the neighbour on the right
    model(x)
    (tokens, without), (_, out) = heard
    v = attention.qkv(tokens).chunk(3, dim=-1)[2]
    before, image = v[:, :prefix], v[:, prefix:].unflatten(1, grid)
    shifted = torch.cat([image[:, :, 1:], torch.zeros_like(image[:, :, :1])], dim=2).flatten(1, 2)
    added = torch.cat([torch.zeros_like(before), shifted], dim=1) @ attention.proj.weight.mT
    torch.testing.assert_close(out, without + added)


@pytest.mark.parametrize("registers", [0, 4])
def test_a_local_branch_takes_images_of_any_size(registers):
    """Each size gives what a model of that fixed size gives."""
    model = vit(dynamic_img_size=True, reg_tokens=registers, pos_embed="none")
    convert(model, "lsh_eco", seed=0, local=(3, 3))
    for name, parameter in model.named_parameters():
        if name.endswith("local.weight"):
            nn.init.normal_(parameter)
    x = images(16, 32)
    expected, twin = model(x), copy.deepcopy(model)
    for height, width in ((32, 48), (48, 32), (8, 8)):
        fixed = vit(img_size=(height, width), reg_tokens=registers, pos_embed="none")
        convert(fixed, "lsh_eco", seed=0, local=(3, 3))
        fixed.load_state_dict(model.state_dict())
        assert torch.equal(model(images(height, width)), fixed(images(height, width)))
        fixed.set_input_size(img_size=(16, 32))
        assert torch.equal(fixed(x), expected)
    assert torch.equal(twin(x), expected)
    convert(model, "lsh_eco", proj_drop=0.1)
    assert torch.equal(model(x), expected)
    assert len(model.patch_embed.proj._forward_hooks) == 1
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in ((16, 32), (32, 16), (24, 40)):
        assert torch.equal(compiled(images(*size)), model(images(*size)))


def test_a_local_branch_over_an_image_needs_all_patches():
    model = vit(patch_drop_rate=0.5)
    with pytest.raises(ValueError, match=r"^local=\(k, k\) needs all patches .* patch_drop_rate"):
        convert(model, "lsh_eco", local=(3, 3))
    convert(model, "lsh_eco", local=3)


def test_torch_fx_takes_a_layer_as_one_node():
    model = vit()
    convert(model, "lsh_eco", local=(3, 3))
    traced = create_feature_extractor(model, ["blocks.1.attn", "head"])
    assert torch.equal(traced(images(16, 32))["head"], model(images(16, 32)))


def test_a_pyramid_of_grids_is_not_taken_for_one_grid():
    model = timm.create_model(
        "pit_ti_224", img_size=64, base_dims=[8, 8, 8], heads=[2, 2, 2], depth=[1, 1, 1]
    )
    with contextlib.suppress(ValueError):
        convert(model, "softmax", local=(3, 3))
    assert model.eval()(images(64, 64)).isfinite().all()


def test_tokens_are_counted_for_linformer():
    for kwargs, dtype, tokens in (
        ({"img_size": 32}, torch.float32, 5),
        ({"in_chans": 1}, torch.bfloat16, 197),
    ):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=16, num_heads=2, **kwargs)
        convert(model.to(dtype), "linformer", k=4)
        assert model.blocks[0].attn.attention.seq_len == tokens
    model = pvt()
    convert(model, "softmax")
    state = copy.deepcopy(model.state_dict())
    convert(model, "linformer", example=images(64, 32), k=4)
    assert [s.blocks[0].attn.attention.seq_len for s in model.stages[:3]] == [128, 32, 8]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items() if k in state)
    assert model(images(64, 32)).isfinite().all()
    model = vit()
    convert(model, "linformer", seq_len=20, k=4)
    assert {b.attn.attention.seq_len for b in model.blocks} == {20}


def test_a_seed_is_raised_by_one_a_layer():
    first, second = vit(), vit()
    convert(first, "lsh_eco", seed=3)
    convert(second, "lsh_eco", seed=4)
    planes = [[h.planes for h in hashers_of(model).values()] for model in (first, second)]
    assert torch.equal(planes[0][1], planes[1][0])
    assert not torch.equal(planes[0][0], planes[0][1])


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("eco", {"bits": 8, "support": 5}),
        ("eco", {"bits": 8, "support": 5, "trainable": True}),
        ("klsh_eco", {"support": 5}),
        ("lsh_eco", {}),
        ("bi_eco", {"bits": 12}),
        ("performer", {"features": 9}),
        ("reformer", {"bucket_size": 2}),
        ("linformer", {"k": 3, "seq_len": 8}),
    ],
)
def test_what_a_mechanism_has_learned_survives_its_own_conversion(mechanism, settings):
    model, x = vit(class_token=False, global_pool="avg"), images(16, 32)
    convert(model, mechanism, **settings)
    if hashers_of(model):
        ecoformer.fit_hashers(model, [x], options=FitOptions(steps=2, pairs=2), progress=False)
    before = model(x)
    for more in (settings, {"proj_drop": 0.1}, {"local": 3}):
        report = convert(model, mechanism, **more)
        assert torch.equal(model(x), before)
        assert not any("not fitted" in note for note in report.notes)
        assert all(layer.left_behind == () for layer in report.replaced)
    assert torch.equal(copy.deepcopy(model)(x), before)
    if mechanism in ("lsh_eco", "performer"):
        convert(model, mechanism, **settings, seed=3)
        assert not torch.equal(model(x), before)


def test_hash_functions_of_other_sizes_or_kinds_are_not_kept():
    model, x = vit(), images(16, 32)
    convert(model, "eco", bits=8, support=5)
    ecoformer.fit_hashers(model, [x], options=FitOptions(steps=2, pairs=2), progress=False)
    for mechanism, settings in (("eco", {"bits": 12, "support": 5}), ("klsh_eco", {"support": 5})):
        report = convert(copy.deepcopy(model), mechanism, **settings)
        assert any("not fitted" in note for note in report.notes)


def test_parameters_learn_after_a_conversion_in_inference_mode():
    model = vit()
    with torch.inference_mode():
        convert(model, "sharp_eco")
    model(images(16, 32)).sum().backward()
    assert all(p.grad is not None for p in model.blocks[0].attn.parameters())
