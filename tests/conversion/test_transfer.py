"""Attention transfer: layers learn one by one from the teacher's; mistakes leave the student as it was."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_distill import BATCHES, DIM, QUIET, SEEN, Classifier, N, bert, pair, state, tokens, unchanged
from torch import nn

import ecoformer
from ecoformer import Transfer, convert, distill, transfer


@pytest.mark.parametrize("mechanism", ["sharp_eco", "lsh_eco", "performer"])
def test_layers_learn_and_nothing_else_changes(mechanism):
    student, teacher = pair(mechanism)
    student.train()
    before, untouched = state(teacher), state(student.head)
    old = state(student)
    result = transfer(student, teacher, BATCHES, steps=80, projection_lr=1e-2, **QUIET)
    assert isinstance(result, Transfer)
    assert result.steps == 80
    assert list(result.layers) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    for name, losses in result.layers.items():
        assert result.final[name] == pytest.approx(sum(losses[-8:]) / 8)
        assert result.final[name] < 0.8 * losses[0]
        assert name in str(result)
    changed = [name for name, value in student.state_dict().items() if not torch.equal(value, old[name])]
    assert changed
    assert all("self_attn" in name for name in changed)
    assert unchanged(teacher, before)
    assert unchanged(student.head, untouched)
    assert student.training
    assert all(p.grad is None for p in (*teacher.parameters(), *student.parameters()))
    assert not any(module._forward_hooks for module in teacher.modules())


def test_losses_by_hand():
    """The student's second layer gets the input of the teacher's, not the output of its own first layer."""
    student, teacher = pair("sharp_eco")
    x = BATCHES[0]
    result = transfer(student, teacher, [x], steps=1, lr=0.0, projection_lr=0.0, **QUIET)
    student.eval(), teacher.eval()
    with torch.no_grad():
        for index, block in enumerate(teacher.encoder.layers):
            target = block.self_attn(x, x, x, need_weights=False)[0]
            answer = student.encoder.layers[index].self_attn.attention(x)
            loss = (answer - target).square().mean() / target.square().mean()
            assert result.layers[f"encoder.layers.{index}.self_attn"][0] == pytest.approx(
                float(loss), rel=1e-4
            )
            x = block(x)


def test_a_copy_has_nothing_to_learn():
    student, teacher = pair("softmax")
    result = transfer(student, teacher, BATCHES, steps=1, lr=0.0, projection_lr=0.0, **QUIET)
    assert max(result.final.values()) < 1e-10


def test_padding_does_not_count():
    teacher = bert("Model")
    student = copy.deepcopy(teacher)
    convert(student, "sharp_eco")
    ids = torch.randint(5, 30, SEEN.shape)
    other = torch.where(SEEN, ids, (ids + 1) % 30)
    found = [
        transfer(
            copy.deepcopy(student),
            teacher,
            [{"input_ids": given, "attention_mask": SEEN.long()}],
            steps=1,
            **QUIET,
        ).layers
        for given in (ids, other)
    ]
    for name, losses in found[0].items():
        assert losses == pytest.approx(found[1][name], rel=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_masks_that_only_the_layers_get_does_not_count(batch_first):
    """As many texts as tokens, so that a mask laid out wrongly would fit."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 2, 24, batch_first=batch_first)
    teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    student = copy.deepcopy(teacher)
    convert(student, "sharp_eco")
    x, hidden = torch.randn(N, N, DIM), torch.zeros(N, N, dtype=torch.bool)
    hidden[:, 4:] = True
    padded = torch.cat([x[:, :4], 100 * x[:, 4:]], dim=1)
    batches = [
        {"src": padded if batch_first else padded.transpose(0, 1), "src_key_padding_mask": hidden},
        {"src": x[:, :4] if batch_first else x[:, :4].transpose(0, 1)},
    ]
    found = [transfer(copy.deepcopy(student), teacher, [b], steps=1, **QUIET).final for b in batches]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    weighted = {"steps": 1, "layers": 1.0, "loss": lambda x, y: 0 * x.sum()}
    found = [distill(copy.deepcopy(student), teacher, [b], **weighted, **QUIET).layers for b in batches]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_planes_learn_relative_to_their_size():
    """The signs do not depend on the planes' size, and neither does what is learned."""
    found = []
    for size in (1.0, 100.0):
        student, teacher = pair("sharp_eco")
        for layer in student.encoder.layers:
            for parameter in layer.self_attn.attention.qk.parameters():
                parameter.data *= size
        found.append(
            transfer(student, teacher, BATCHES, steps=5, lr=3e-2, projection_lr=1e-3, **QUIET).layers
        )
    for name, losses in found[0].items():
        assert losses == pytest.approx(found[1][name], rel=1e-3)


def test_planes_learn_in_the_space_of_the_original_queries_and_keys():
    """With projections that stay, all steps are combinations of the original's rows, head by head."""
    student, teacher = pair("sharp_eco")
    layers = [layer.self_attn.attention for layer in student.encoder.layers]
    qk = layers[0].qk
    weight, names = qk.weight, list(student.state_dict())
    qk.weight.data[0, 0] += 0.1  # which no combination of rows gives
    start = qk.weight.detach().clone()
    transfer(student, teacher, BATCHES, steps=1, lr=0.0, projection_lr=0.0, **QUIET)
    assert qk.weight is weight
    assert type(qk) is nn.Linear
    assert weight.requires_grad
    assert torch.equal(weight, start)  # to the bit
    assert list(student.state_dict()) == names
    transfer(student, teacher, BATCHES, steps=20, lr=1e-2, projection_lr=0.0, **QUIET)
    originals = teacher.encoder.layers[0].self_attn.in_proj_weight.detach()[: 2 * DIM]
    heads = layers[0].num_heads
    steps = (weight.detach() - start).view(2, heads, -1, DIM)
    rows = originals.view(2, heads, -1, DIM)
    outside = steps - steps @ torch.linalg.pinv(rows) @ rows
    assert steps.norm() > 0.01 * start.norm()
    assert outside.norm() < 1e-4 * steps.norm()


def test_a_second_transfer_continues_where_the_first_ended():
    """Directions in which queries and keys are tiny do not blow up the planes' steps."""
    torch.manual_seed(0)
    _, teacher = pair("softmax")
    for block in teacher.encoder.layers:
        block.self_attn.in_proj_weight.data[[0, DIM]] *= 1e-3
    student = copy.deepcopy(teacher)
    convert(student, "sharp_eco", seed=0)
    runs = [transfer(student, teacher, BATCHES, steps=60, **QUIET) for _ in range(3)]
    for name, losses in runs[2].layers.items():
        assert sum(losses) < 0.8 * sum(runs[0].layers[name])
        assert runs[2].final[name] < runs[0].final[name]


def test_layers_learn_inside_autocast():
    """Autocast keeps weights in low precision until its context ends, here longer than one step."""
    student, teacher = pair("sharp_eco")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = transfer(student, teacher, BATCHES, steps=80, projection_lr=1e-2, **QUIET)
    assert all(result.final[name] < 0.8 * losses[0] for name, losses in result.layers.items())


class Skips(Classifier):
    """A model that never calls its second layer."""

    def forward(self, tokens):
        return self.head(self.encoder.layers[0](tokens)[:, 0])


def test_mistakes_leave_the_student_unchanged():
    student, teacher = pair("sharp_eco")
    before = state(student)
    skipping = Skips()
    skipping.load_state_dict(teacher.state_dict())
    bad = BATCHES[0].clone()
    bad[0, 0, 0] = torch.nan
    cases = [
        ((student, student), {}, "share weights"),
        ((student, nn.Sequential(teacher)), {}, r"^teacher \(Sequential\) has no layer 'encoder"),
        ((Classifier(), teacher), {}, r"^student \(Classifier\) has no converted layer"),
        ((student, skipping), {}, r"never reached encoder.layers.1.self_attn"),
        ((student, teacher), {"steps": 0}, r"^steps must be a whole number of at least 1"),
        ((student, teacher), {"projection_lr": -0.1}, r"^projection_lr must be a finite number"),
    ]
    for models, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            transfer(*models, BATCHES, **{"steps": 2, **arguments}, **QUIET)
        assert unchanged(student, before)
    with pytest.raises(ValueError, match=r"never reached encoder.layers.1.self_attn"):
        distill(student, skipping, BATCHES, steps=1, layers=1.0, **QUIET)
    assert unchanged(student, before)
    with pytest.raises(FloatingPointError, match="check the inputs"):
        transfer(student, teacher, [bad], steps=2, **QUIET)
    assert unchanged(student, before)
    with pytest.raises(TypeError, match=r"^batches must be an iterable"):
        transfer(student, teacher, tokens(), steps=2, **QUIET)
    student.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        transfer(student, teacher, BATCHES, steps=2, **QUIET)


class Repeats(nn.Module):
    """One layer, three times."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 24, batch_first=True)
        self.layers = nn.ModuleList([layer] * 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_are_used_several_times():
    student = Repeats()
    teacher = copy.deepcopy(student)
    convert(student, "sharp_eco")
    result = transfer(student, teacher, BATCHES, steps=1, lr=0.0, projection_lr=0.0, **QUIET)
    student.eval(), teacher.eval()
    x, found = BATCHES[0], []
    with torch.no_grad():
        for block in teacher.layers:
            target = block.self_attn(x, x, x, need_weights=False)[0]
            answer = student.layers[0].self_attn.attention(x)
            found.append(float((answer - target).square().mean() / target.square().mean()))
            x = block(x)
    assert list(result.final.values()) == pytest.approx([sum(found) / 3], rel=1e-4)


def test_planning_leaves_models_with_shared_layers_alone():
    model = Repeats()
    before = state(model)
    for _ in range(2):
        assert len(ecoformer.plan(model, "sharp_eco", (1, N, DIM)).rows) == 2
        ecoformer.cost(model, (1, N, DIM), accounting="exact")
        assert unchanged(model, before)


def test_a_frozen_layer_stays():
    student, teacher = pair("sharp_eco")
    student.encoder.layers[0].self_attn.requires_grad_(False)
    before = state(student.encoder.layers[0])
    transfer(student, teacher, BATCHES, steps=3, **QUIET)
    assert unchanged(student.encoder.layers[0], before)


def test_two_dimensional_local_branches_see_the_grid():
    timm = pytest.importorskip("timm")
    teacher = timm.create_model("test_vit", dynamic_img_size=True, num_classes=3)
    student = copy.deepcopy(teacher)
    convert(student, "sharp_eco", local=(3, 3))
    images = torch.randn(2, 3, 32, 96)
    result = transfer(student, teacher, [images], steps=2, **QUIET)
    assert len(result.layers) == len(student.blocks)
    assert student.blocks[0].attn.image.grid == (32 // 16, 96 // 16)


def test_float16_does_not_end_in_weights_that_are_not_finite():
    student, teacher = pair("softmax")
    with pytest.raises(FloatingPointError, match="float32"):
        transfer(student.half(), teacher.half(), [x.half() for x in BATCHES], steps=4, **QUIET)
    assert all(bool(p.isfinite().all()) for p in student.parameters())


def _learn_on_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.manual_seed(rank)
    student = Classifier()
    teacher = copy.deepcopy(student)
    convert(student, "sharp_eco")
    teacher.load_state_dict(torch.load(f"{folder}/teacher.pt", weights_only=True))
    result = transfer(student, teacher, [tokens(rank)], steps=2, **QUIET)
    torch.save({"losses": result.layers, "state": student.state_dict()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_ranks_learn_the_same(tmp_path):
    torch.save(Classifier().state_dict(), tmp_path / "teacher.pt")
    mp.spawn(_learn_on_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["losses"] == second["losses"]
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name])
