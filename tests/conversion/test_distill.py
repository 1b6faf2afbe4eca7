"""Distillation: the student learns, the teacher does not, and mistakes are told before or as they happen."""

import copy

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer import Distillation, FitOptions, convert, distill

transformers = pytest.importorskip("transformers")

DIM, N = 16, 7
QUIET = {"progress": False}
SEEN = torch.arange(N) < torch.tensor([N, 5, 3, 6])[:, None]


class Classifier(nn.Module):
    """Two of PyTorch's encoder layers, dropout and batch normalisation included."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 24, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm, self.head = nn.BatchNorm1d(DIM), nn.Linear(DIM, 5)

    def forward(self, tokens, hidden=None):
        x = self.encoder(tokens, src_key_padding_mask=hidden)[:, 0]
        return self.head(self.norm(x))


def tokens(seed=0):
    return torch.randn(4, N, DIM, generator=torch.Generator().manual_seed(seed))


BATCHES = [tokens(seed) for seed in range(3)]


def pair(mechanism="lsh_eco", **config):
    """Student and teacher; the student in the mechanism, with fitted hashers."""
    torch.manual_seed(0)
    student = Classifier()
    teacher = copy.deepcopy(student)
    convert(student, mechanism, **config)
    if mechanism == "eco":
        ecoformer.fit_hashers(student, BATCHES, options=FitOptions(steps=2, pairs=2), **QUIET)
    return student, teacher


def state(model):
    return copy.deepcopy(model.state_dict())


def unchanged(model, before):
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("loss", ["mse", "kl", "cosine", nn.functional.l1_loss])
@pytest.mark.parametrize("mechanism", ["eco", "softmax"])
def test_the_student_learns(loss, mechanism):
    student, teacher = pair(mechanism, **({"support": 5} if mechanism == "eco" else {}))
    nn.init.normal_(student.head.weight)
    before = state(teacher)
    result = distill(student, teacher, BATCHES, steps=60, lr=1e-2, loss=loss, **QUIET)
    assert isinstance(result, Distillation)
    assert result.steps == len(result.outputs) == 60
    assert result.layers == ()
    assert sum(result.outputs[-3:]) < 0.5 * sum(result.outputs[:3])
    assert str(result).startswith("60 steps")
    assert unchanged(teacher, before)
    assert all(p.grad is None for p in (*teacher.parameters(), *student.parameters()))


def test_losses_by_hand():
    student, teacher = pair("softmax")
    nn.init.normal_(student.head.weight)
    x, y = student.eval()(BATCHES[0]).detach(), teacher.eval()(BATCHES[0]).detach()
    expected = {
        "mse": (x - y).square().mean() / y.square().mean(),
        "kl": (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean(),
        "cosine": 1 - nn.functional.cosine_similarity(x, y, dim=-1).mean(),
    }
    for name, value in expected.items():
        result = distill(student, teacher, BATCHES, steps=1, lr=0.0, loss=name, **QUIET)
        assert result.outputs[0] == pytest.approx(float(value), rel=1e-4)


def test_layers_are_compared():
    student, teacher = pair()
    result = distill(
        student, teacher, BATCHES, steps=60, lr=1e-2, layers=1.0, loss=lambda x, y: 0 * x.sum(), **QUIET
    )
    assert len(result.layers) == 60
    assert set(result.outputs) == {0.0}
    assert sum(result.layers[-3:]) < 0.7 * sum(result.layers[:3])
    assert "layers" in str(result)
    assert not any(module._forward_hooks for module in (*student.modules(), *teacher.modules()))
    same, teacher = pair("softmax")
    assert distill(same, teacher, BATCHES, steps=1, layers=1.0, **QUIET).layers[0] < 1e-10


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layers", [0.0, 1.0])
def test_padding_masks(layers):
    student, teacher = pair("softmax")
    batch = {"tokens": tokens(), "hidden": ~SEEN}
    result = distill(student, teacher, [batch], steps=2, layers=layers, lr=0.0, **QUIET)
    assert max(*result.outputs, *result.layers) < 1e-9


def test_padding_of_an_encoder_that_returns_all_tokens():
    """PyTorch's fast path would return zeros at padding, in the teacher only."""
    teacher = Classifier().encoder
    student = copy.deepcopy(teacher)
    convert(student, "softmax")
    batch = {"src": tokens(), "src_key_padding_mask": ~SEEN}
    assert distill(student, teacher, [batch], steps=1, **QUIET).outputs[0] < 1e-9


def test_batches_of_every_kind_and_a_forward_of_ones_own():
    x = tokens()
    dataset = torch.utils.data.TensorDataset(x, torch.arange(4))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    expected = None
    for batches in ([x], [(x, torch.arange(4))], [[x]], [{"tokens": x}]):
        result = distill(*pair(), batches, steps=2, **QUIET)
        assert expected is None or result == expected
        expected = result
    assert distill(*pair(), loader, steps=5, **QUIET).steps == 5
    batches = [{"data": {"x": x}}]
    forward = {"forward": lambda model, batch: {"answer": model(batch["data"]["x"])}}
    output = {"output": lambda result, batch: result["answer"]}
    assert distill(*pair(), batches, steps=2, **forward, **output, **QUIET) == expected
    with pytest.raises(TypeError, match="output="):
        distill(*pair(), batches, steps=2, **forward, **QUIET)


def test_modes_are_restored():
    student, teacher = pair()
    student.train()
    student.encoder.layers[0].eval()
    teacher.eval()
    teacher.norm.train()
    modes = [[m.training for m in model.modules()] for model in (student, teacher)]
    statistics = student.norm.running_mean.clone()

    def watch(x, y):
        assert not any(m.training for model in (student, teacher) for m in model.modules())
        return (x - y).square().mean()

    distill(student, teacher, BATCHES, steps=2, loss=watch, **QUIET)
    assert [[m.training for m in model.modules()] for model in (student, teacher)] == modes
    assert torch.equal(student.norm.running_mean, statistics)


def test_frozen_weights_of_the_student_stay():
    student, teacher = pair()
    student.requires_grad_(False)
    student.head.requires_grad_(True)
    before = state(student)
    distill(student, teacher, BATCHES, steps=2, lr=1e-2, **QUIET)
    changed = [key for key, value in student.state_dict().items() if not torch.equal(value, before[key])]
    assert sorted(changed) == ["head.bias", "head.weight"]


def test_student_and_teacher_must_be_apart():
    model, same_memory = Classifier(), Classifier()
    same_memory.load_state_dict(model.state_dict(), assign=True)
    convert(model, "lsh_eco")
    for student, teacher in ((model, model), (model, same_memory), (model, nn.Sequential(model))):
        before = state(student)
        with pytest.raises(ValueError, match=r"share weights.*teacher = copy.deepcopy\(model\)"):
            distill(student, teacher, BATCHES, steps=2, **QUIET)
        assert unchanged(student, before)


def test_a_loss_that_is_not_finite_stops_with_the_last_good_weights():
    student, teacher = pair()
    kept = []

    def watched(x, y):
        kept.append(state(student))
        return (x - y).square().mean() * (torch.nan if len(kept) == 3 else 1)

    before = state(teacher)
    with pytest.raises(FloatingPointError, match=r"^loss nan .* at step 2; .* lower lr"):
        distill(student, teacher, BATCHES, steps=5, lr=1e-2, loss=watched, **QUIET)
    # The weights of step 2 gave NaN; those of step 1 are the last that are known to be good.
    assert unchanged(student, kept[1])
    assert not unchanged(student, kept[2])
    assert unchanged(teacher, before)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_that_are_not_finite_leave_the_last_good_weights(steps):
    student, teacher = pair()

    def edge(x, y):
        return (x - x.detach()).abs().sqrt().sum()

    with pytest.raises(FloatingPointError):
        distill(student, teacher, BATCHES, steps=steps, loss=edge, **QUIET)
    assert all(p.isfinite().all() for p in student.parameters())


def test_batches_that_give_out():
    with pytest.warns(UserWarning, match=r"^batches .* 3 of 5 steps"):
        result = distill(*pair(), iter(BATCHES), steps=5, **QUIET)
    assert result.steps == 3
    assert distill(*pair(), iter(BATCHES), steps=3, **QUIET).steps == 3
    assert distill(*pair(), BATCHES, steps=7, **QUIET).steps == 7
    with pytest.raises(ValueError, match=r"^batches is empty"):
        distill(*pair(), [], steps=5, **QUIET)


def test_mistakes():
    for kwargs, message in (
        ({"loss": "l3"}, r"^loss must be one of mse, kl, cosine or a function, got 'l3'$"),
        ({"steps": 0}, r"^steps must be a whole number of at least 1, got 0$"),
        ({"steps": 2.5}, r"^steps must be a whole number of at least 1, got 2.5$"),
        ({"lr": -1.0}, r"^lr must be a finite number of at least 0, got -1.0$"),
        ({"layers": -1.0}, r"^layers must be a finite number of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(*pair(), BATCHES, **{"steps": 2, **kwargs}, **QUIET)
    student, teacher = pair()
    with pytest.raises(ValueError, match=r"^teacher \(Sequential\) has no layer 'encoder"):
        distill(student, nn.Sequential(teacher), BATCHES, steps=2, layers=1.0, **QUIET)
    with pytest.raises(ValueError, match=r"^student \(Classifier\) has no converted layer"):
        distill(Classifier(), teacher, BATCHES, steps=2, layers=1.0, **QUIET)
    other = copy.deepcopy(teacher)
    other.head = nn.Linear(DIM, 6)
    with pytest.raises(ValueError, match=r"must agree: \(4, 5\) against \(4, 6\)"):
        distill(student, other, BATCHES, steps=2, **QUIET)


def bert(kind):
    sizes = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    model = getattr(transformers, f"Bert{kind}")(
        transformers.BertConfig(vocab_size=50, num_labels=3, **sizes)
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 3)
    return model


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "Model"])
@pytest.mark.parametrize("form", [dict, transformers.BatchEncoding])
def test_models_of_hugging_face(kind, form):
    ids = torch.randint(3, 50, (4, N), generator=torch.Generator().manual_seed(0))
    student = bert(kind)
    teacher = copy.deepcopy(student)
    convert(student, "lsh_eco", seed=0)
    batch = form({"input_ids": ids, "attention_mask": SEEN.long()})
    result = distill(student, teacher, [batch], steps=25, lr=3e-3, layers=0.5, **QUIET)
    assert result.outputs[-1] < 0.7 * result.outputs[0]
    assert result.layers[-1] < 0.7 * result.layers[0]


@pytest.mark.parametrize("kind", ["Model", "ForTokenClassification"])
def test_padding_is_not_compared(kind):
    student = bert(kind)
    teacher = copy.deepcopy(student)
    convert(student, "softmax")
    batch = {"input_ids": torch.full((4, N), 7), "attention_mask": SEEN.long()}
    shapes = []

    def loss(x, y):
        shapes.append(tuple(x.shape[:-1]))
        return (x - y).square().mean()

    distill(student, teacher, [batch], steps=1, loss=loss, **QUIET)
    assert shapes == [(int(SEEN.sum()),)]
