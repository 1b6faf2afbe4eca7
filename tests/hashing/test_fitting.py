"""Fitting all hashers of a model in one pass, each on what its layer really receives."""

import copy

import pytest
import torch
from torch import nn

from ecoformer import (
    EcoAttention,
    FitOptions,
    KernelHasher,
    LshHasher,
    RefitHashers,
    SignHasher,
    fit_hashers,
    fitting,
    hashers_of,
)

QUICK = FitOptions(steps=5, pairs=2)
NAMES = ["layers.0.hasher", "layers.1.hasher"]


class Tower(nn.Module):
    """Two layers of attention; `order` is how the data goes through them."""

    def __init__(self, order=(0, 1)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(EcoAttention(8, 2, bits=4, support=3, proj_drop=0.5) for _ in range(2))
        self.order, self.calls = order, 0

    def forward(self, x, mask=None):
        self.calls += 1
        for index in self.order:
            x = x + self.layers[index](x, key_padding_mask=mask)
        return x


def data(batch=6, n=10, seed=0):
    return torch.randn(batch, n, 8, generator=torch.Generator().manual_seed(seed))


def fit(model, batches, **kwargs):
    return fit_hashers(model, batches, **{"options": QUICK, **kwargs})


def state(model):
    return {name: hasher.state_dict() for name, hasher in hashers_of(model).items()}


def same(a, b):
    """Whether the hashers of two models, or two states of them, are equal bit for bit."""
    a, b = (x if isinstance(x, dict) else state(x) for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[n][key], b[n][key]) for n in a for key in a[n])


@pytest.fixture(scope="module")
def expected():
    """The hashers of a tower fitted on `data()`."""
    model = Tower()
    fit(model, [data()])
    return state(model)


def test_each_layer_learns_from_what_it_receives():
    model, x = Tower(), data()
    assert fit(model, [x], seed=3) == NAMES
    model.eval()
    for index, layer in enumerate(model.layers):
        received = layer.qk(x).unflatten(-1, (2, 4)).transpose(1, 2)
        alone = KernelHasher(2, 4, bits=4, support=3).fit(received, seed=3 + index, options=QUICK)
        assert same(alone, layer.hasher)
        x = x + layer(x)


def test_a_layer_that_runs_twice_is_fitted_once():
    model, progress = Tower(order=(0, 0, 1)), []
    with fitting(model, options=QUICK, progress=progress.append) as names, torch.no_grad():
        model(data())
        model(data(seed=1))
    assert names == progress == NAMES


MASK = torch.arange(10).expand(6, 10) >= 7
BATCHES = {
    "tensor": lambda: [data()],
    "tuple": lambda: [(data(), torch.arange(6))],
    "list": lambda: [[data(), "labels"]],
    "mapping": lambda: [{"x": data(), "mask": None}],
    "several": lambda: [data()[:1], data()[1:3], data()[3:]],
    "several tuples": lambda: [(x, len(x)) for x in data().split(4)],
    "several mappings": lambda: [{"x": x} for x in data().split(2)],
    "generator": lambda: (x for x in data().split(2)),
    "loader": lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data()), batch_size=4),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_kind(kind, expected):
    model = Tower()
    assert fit(model, BATCHES[kind]()) == NAMES
    assert same(model, expected)
    assert model.calls == 1


def test_batches_of_different_structure():
    for batches in ([data(3), (data(3), None)], [{"x": data(3)}, {"x": data(3), "names": "abc"}]):
        with pytest.raises(ValueError, match=r"^batches must have the same structure"):
            fit(Tower(), batches)


def test_masks_are_carried_along():
    model, other = Tower(), Tower()
    fit(model, [{"x": x, "mask": mask} for x, mask in zip(data().split(3), MASK.split(3), strict=True)])
    fit(other, [data()], forward=lambda m, x: m(x, mask=MASK))
    assert same(model, other)
    changed = data().masked_fill(MASK.unsqueeze(-1), 9.0)
    fit(other, [{"x": changed, "mask": MASK}])
    assert same(model, other)


def test_only_as_many_samples_as_asked_for():
    pulled = []

    def stream():
        for index in range(100):
            pulled.append(index)
            yield data(batch=4, seed=index)

    model, other = Tower(), Tower()
    fit(model, stream(), samples=6)
    assert pulled == [0, 1]
    fit(other, [torch.cat([data(4), data(4, seed=1)[:2]])])
    assert same(model, other)


def test_seeds(expected):
    models = [Tower() for _ in range(2)]
    before = torch.get_rng_state()
    fit(models[0], [data()])
    fit(models[1], [data()], seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(models[0], expected)
    assert not same(models[1], expected)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def hooks(model):
    return sum(len(hasher._forward_pre_hooks) for hasher in hashers_of(model).values())


def fail(model, batch):
    model(batch)
    raise KeyboardInterrupt


@pytest.mark.parametrize("forward", [None, fail])
def test_nothing_is_left_behind(forward):
    model, during = Tower(), []
    model.layers[0].eval()
    model.layers[1].proj_drop.eval()
    before = modes(model)
    model.register_forward_pre_hook(lambda module, _: during.append((modes(module), torch.is_grad_enabled())))
    if forward is None:
        fit(model, [data()])
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(model, [data()], forward=forward)
    assert [any(modes.values()) or grad for modes, grad in during] == [False]
    assert modes(model) == before
    assert len(set(before.values())) == 2
    assert hooks(model) == 0


def test_inside_a_training_step():
    model = Tower().train()
    with fitting(model, options=QUICK) as names:
        assert (names, hooks(model)) == ([], 2)
        model(data()).square().mean().backward()
    assert names == NAMES
    assert hooks(model) == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ZeroDivisionError), fitting(model):
        _ = 1 / 0
    assert hooks(model) == 0


class Skips(Tower):
    def forward(self, x):
        return self.layers[1](x)


EACH = "^batches: each must be a tensor, or a list, tuple or dict of tensors, got"
MISTAKES = {
    "no hasher": (lambda: nn.Linear(8, 8), [data()], {}, ValueError, "Linear holds no hasher to fit"),
    "empty": (Tower, [], {}, ValueError, "^batches is empty"),
    "one tensor": (Tower, data(), {}, TypeError, "got one Tensor: put it in a list$"),
    "no batches": (Tower, None, {}, TypeError, "^batches must be an iterable .* tensors, got NoneType$"),
    "a path": (Tower, ["photo.png"], {}, TypeError, f"{EACH} str$"),
    "no samples": (Tower, [data()], {"samples": 0}, ValueError, "^samples must be at least 1, got 0$"),
    "lengths": (
        Tower,
        [data(), data(n=9)],
        {},
        ValueError,
        r"^batches must agree .* got \(6, 10, 8\) and \(6, 9, 8\)",
    ),
    "few tokens": (
        Tower,
        [data(1, n=2)],
        {},
        ValueError,
        r"^layers\.0\.hasher: tokens .* fewer than support=3",
    ),
    "not reached": (Skips, [data()], {}, RuntimeError, "never reached these hashers: layers.0.hasher$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    make, batches, kwargs, error, message = MISTAKES[mistake]
    model = make()
    before, functions = modes(model), copy.deepcopy(state(model))
    with pytest.raises(error, match=message) as caught:
        fit(model, batches, **kwargs)
    assert "\n" not in str(caught.value)
    assert modes(model) == before
    assert hooks(model) == 0
    assert same(model, functions)
    assert not any(hasher.is_fitted for hasher in hashers_of(model).values())


@pytest.mark.parametrize("hasher", [KernelHasher(2, 4, support=3), LshHasher(2, 4), SignHasher(2, 4)])
def test_memory_without_content_is_filled(hasher):
    tokens = data().view(6, 10, 2, 4).transpose(1, 2)
    fitted = copy.deepcopy(hasher).fit(tokens, options=QUICK)
    empty = copy.deepcopy(fitted).to("meta").to_empty(device="cpu")
    assert empty.is_fitted == (not hasher.learns)
    assert all(x.isfinite().all() for x in empty.state_dict().values())
    empty.load_state_dict(fitted.state_dict())
    assert torch.equal(empty(tokens), fitted(tokens))


def test_drawn_hashers_are_left_alone_by_models_and_drawn_anew_by_fit():
    hasher = LshHasher(2, 4, seed=0)
    before = hasher.planes.clone()
    tokens = data().view(6, 10, 2, 4).transpose(1, 2)
    assert fit(hasher, [tokens], seed=5) == [""]
    assert torch.equal(hasher.planes, before)
    hasher.fit(tokens, seed=5)
    assert torch.equal(hasher.planes, LshHasher(2, 4, seed=5).planes)


def test_a_compiled_model_is_fitted_too():
    model = Tower()
    fit(model, [data()])
    compiled = torch.compile(model, backend="eager")
    compiled(data())
    before = {name: hasher.weight.clone() for name, hasher in hashers_of(model).items()}
    with fitting(compiled, seed=9, options=QUICK) as names:
        compiled(data())
    assert len(names) == len(before)
    for name, hasher in hashers_of(model).items():
        assert not torch.equal(hasher.weight, before[name])


def test_a_context_that_reaches_nothing_says_so():
    with pytest.raises(RuntimeError, match="no hasher of Tower was reached"), fitting(Tower()):
        pass


def test_refitting_every_few_epochs():
    model = Tower()
    refit = RefitHashers(model, every=3, seed=10, options=QUICK)
    assert [refit(epoch, [data()]) for epoch in range(7)] == [True, False, False, True, False, False, True]
    resumed = copy.deepcopy(model)
    for epoch in (6, 9):
        assert RefitHashers(resumed, every=3, seed=10, options=QUICK)(epoch, [data()])
        other = Tower()
        fit(other, [data()], seed=10 + epoch)
        assert same(resumed, other)
        assert same(resumed, model) == (epoch == 6)


def test_texts_padded_batch_by_batch_are_padded_alike():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(50, 16), EcoAttention(16, 2, support=5)

        def forward(self, input_ids, attention_mask):
            return self.attention(self.words(input_ids), key_padding_mask=~attention_mask.bool())

    torch.manual_seed(0)
    ids = torch.randint(1, 50, (4, 9))
    mask = torch.ones_like(ids)
    mask[:2, 6:] = 0
    short = {"input_ids": ids[:2, :6], "attention_mask": mask[:2, :6]}
    rest = {"input_ids": ids[2:], "attention_mask": mask[2:]}
    apart, together = Reader(), Reader()
    together.load_state_dict(apart.state_dict())
    options = {"options": FitOptions(steps=2, pairs=2), "progress": False}
    fit_hashers(apart, [short, rest], **options)
    fit_hashers(together, [{"input_ids": ids, "attention_mask": mask}], **options)
    torch.testing.assert_close(apart.state_dict(), together.state_dict())
