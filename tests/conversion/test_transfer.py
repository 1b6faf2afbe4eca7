"""Attention transfer: layers learn one by one from the teacher's; mistakes leave the student as it was."""

import copy

import pytest
import torch
from test_distill import BATCHES, QUIET, SEEN, Classifier, bert, pair, state, tokens, unchanged
from torch import nn

from ecoformer import Transfer, convert, transfer


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


def test_planes_learn_relative_to_their_size():
    """The signs do not depend on the planes' size, and neither does what is learned."""
    found = []
    for size in (1.0, 100.0):
        student, teacher = pair("sharp_eco")
        for layer in student.encoder.layers:
            for parameter in layer.self_attn.attention.qk.parameters():
                parameter.data *= size
        found.append(transfer(student, teacher, BATCHES, steps=5, **QUIET).layers)
    for name, losses in found[0].items():
        assert losses == pytest.approx(found[1][name], rel=1e-3)


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
        ((student, teacher), {"steps": 0}, r"^steps must be at least 1"),
    ]
    for models, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            transfer(*models, BATCHES, **{"steps": 2, **arguments}, **QUIET)
        assert unchanged(student, before)
    with pytest.raises(FloatingPointError, match="check the inputs"):
        transfer(student, teacher, [bad], steps=2, **QUIET)
    assert unchanged(student, before)
    with pytest.raises(TypeError, match=r"^batches must be an iterable"):
        transfer(student, teacher, tokens(), steps=2, **QUIET)
    student.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        transfer(student, teacher, BATCHES, steps=2, **QUIET)
