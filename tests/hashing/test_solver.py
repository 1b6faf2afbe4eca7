"""Learning bit by bit, against the dense solver of the reference and against hashers that do not learn."""

import pytest
import torch
from torch.nn import functional as F

from ecoformer import FitOptions, KernelHasher, KlshHasher, LshHasher, SignHasher, reference
from ecoformer.hashing.kernel import spread_support
from ecoformer.hashing.pairs import SparseLabels, find_pairs
from ecoformer.hashing.solver import _Solver, learn_bits

HEADS, BATCH, N, M, BITS = 3, 2, 24, 6, 5
EPS = torch.finfo(torch.float64).eps
every_number_of_steps = pytest.mark.parametrize("steps", [30, 0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Problem:
    """Zero-mean kernel features (H, B, N, m) of random tokens, and their labels, sparse and dense."""

    def __init__(self, heads=HEADS, seed=0, pairs=4, dtype=torch.float64):
        tokens = torch.randn(heads, BATCH, N, 4, generator=generator(seed), dtype=torch.float64)
        unit = reference.unit(tokens)
        kernel = reference.rbf_kernel(unit, unit[:, :1, :M], sigma=1.0)
        self.features = (kernel - kernel.mean(dim=(1, 2), keepdim=True)).to(dtype)
        self.pairs = find_pairs(unit, pairs)
        self.sparse = SparseLabels(self.pairs)
        self.dense = reference.pairwise_labels(unit, pairs)

    def learn(self, steps, bits=BITS):
        return learn_bits(self.features, self.sparse, bits, steps, torch.full((len(self.features),), EPS))

    def codes(self, weights):
        return reference.sign(self.features @ weights.unsqueeze(1))

    def objective(self, weights):
        """Eq. (12) of every head, summed over samples."""
        return reference.objective(self.codes(weights), self.dense).sum(dim=-1)


def random_codes(bits, seed=5):
    return reference.sign(torch.randn(HEADS, BATCH, N, bits, generator=generator(seed), dtype=torch.float64))


@pytest.mark.parametrize("learned", [0, 1, 4])
def test_residual_is_never_formed_and_yet_the_same(learned):
    problem = Problem()
    solver = _Solver(problem.features, problem.sparse, BITS, 0, torch.full((HEADS,), EPS))
    others, bit = random_codes(learned), random_codes(1, seed=6)[..., 0]
    residual = reference.residual(others, problem.dense, BITS)
    pull = solver._pull(bit, others)
    torch.testing.assert_close(solver._score(bit, pull), reference.bit_score(bit, residual).sum(dim=-1))
    symmetric = (residual + residual.mT) / 2
    torch.testing.assert_close(pull, (symmetric @ bit.unsqueeze(-1)).squeeze(-1))


def test_learning_lowers_the_objective():
    problem = Problem()
    one_bit = [problem.objective(problem.learn(steps, bits=1)) for steps in (0, 30)]
    assert (one_bit[1] <= one_bit[0]).all()
    all_bits = [problem.objective(problem.learn(steps)).sum() for steps in (0, 30)]
    assert all_bits[1] < all_bits[0]


@every_number_of_steps
def test_padding_teaches_nothing(steps):
    """Rows of zero features without pairs, anywhere, leave the weights' directions as they are."""
    problem = Problem()
    weights = problem.learn(steps)
    padded = Problem()
    place = torch.cat([torch.arange(0, 10), torch.arange(13, 13 + N - 10)])
    wide = N + 5
    padded.features = torch.zeros(HEADS, BATCH, wide, M, dtype=torch.float64)
    padded.features[:, :, place] = problem.features
    found = type(problem.pairs)(
        *(torch.zeros(HEADS, BATCH, wide, x.shape[-1], dtype=x.dtype) for x in problem.pairs)
    )
    for new, old in zip(found, problem.pairs, strict=True):
        new[:, :, place] = old if old.is_floating_point() else place[old]
    padded.sparse = SparseLabels(found)
    learned, expected = (F.normalize(x, dim=1) for x in (padded.learn(steps), weights))
    torch.testing.assert_close(learned, expected, rtol=1e-6, atol=1e-8)


@every_number_of_steps
@pytest.mark.parametrize("features", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 9])
def test_constant_features_give_finite_weights(steps, features, n):
    constant = torch.full((1, 2, n, M), features)
    labels = SparseLabels(find_pairs(torch.ones(1, 2, n, 4), 2))
    weights = learn_bits(constant, labels, BITS, steps, torch.full((1,), EPS))
    assert weights.shape == (1, M, BITS)
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("pairs", 0, "must be at least 1, got 0"),
        ("steps", -1, "must be at least 0, got -1"),
        ("support", "all", 'must be "kmeans" or "random", got \'all\''),
    ],
)
def test_bad_options(argument, value, message):
    with pytest.raises(ValueError, match=rf"^FitOptions\.{argument} {message}$"):
        FitOptions(**{argument: value})


@pytest.mark.parametrize("support", ["kmeans", "random"])
@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 12, 3)])
def test_what_fitting_stores(support, lengths):
    """Sigma is the mean squared distance, mu the kernel's mean, g(Q) A of root mean square 1."""
    x = torch.randn(3, 2, 20, 6, generator=generator(), dtype=torch.float64)
    present = torch.arange(20) < torch.tensor(lengths)[:, None]
    hasher = KernelHasher(2, 6, BITS, support=5).double()
    hasher.fit(x, key_padding_mask=~present, options=FitOptions(support, pairs=4, steps=5))
    for head in range(2):
        unit = reference.unit(x[:, head][present])
        distances = reference.squared_distances(unit, hasher.support_samples[head])
        assert support == "kmeans" or (distances.min(dim=0).values < 1e-12).all()
        torch.testing.assert_close(hasher.sigma[head], distances.mean())
        kernel = torch.exp(-distances / (2 * distances.mean()))
        torch.testing.assert_close(hasher.mean[head], kernel.mean(dim=0))
        y = (kernel - kernel.mean(dim=0)) @ hasher.weight[head]
        torch.testing.assert_close(y.square().mean(dim=0), torch.ones(BITS, dtype=torch.float64))


@pytest.mark.parametrize("make", [KernelHasher, KlshHasher])
def test_support_comes_from_all_samples_and_no_token_twice(make):
    x = torch.randn(3, 2, 4, 6, generator=generator())
    hasher = make(2, 6, BITS, support=11).fit(x, options=FitOptions(support="random"))
    moved = make(2, 6, BITS, support=11).fit(x).support_samples
    assert torch.equal(moved, hasher.support_samples) == (make is KlshHasher)
    for head in range(2):
        likeness = hasher.support_samples[head] @ reference.unit(x[:, head].flatten(0, 1)).mT
        torch.testing.assert_close(likeness.amax(dim=-1), torch.ones(11))
        assert len(set(likeness.argmax(dim=-1).tolist())) == 11


@pytest.mark.parametrize("content", [7.0, float("nan")])
def test_support_moves_by_k_means(content):
    unit = reference.unit(torch.randn(2, 3, 20, 4, generator=generator(), dtype=torch.float64))
    valid = torch.arange(20) < torch.tensor([20, 12, 3])[:, None]
    start = unit[:, 0, :5].clone()
    start[:, 4] = 50  # nobody is near this one: it stays
    moved = spread_support(unit.masked_fill(~valid[..., None], content), valid, start)
    for tokens, centres, found in zip(unit[:, valid], start, moved, strict=True):
        for _ in range(10):
            nearest = reference.squared_distances(tokens, centres).argmin(dim=-1)
            centres = torch.stack(
                [tokens[nearest == j].mean(dim=0) if j in nearest else c for j, c in enumerate(centres)]
            )
        torch.testing.assert_close(found, centres)
        assert (found[4] == 50).all()


def manifold(batch, seed, heads=2, n=128, dim=32):
    """Noisy tokens along random curves on one smooth surface of two dimensions."""
    surface, draws = generator(11), generator(seed)
    maps = [torch.randn(heads, 1, k, dim, generator=surface) for k in (2, dim)]
    phase = 2 * torch.pi * torch.rand(heads, batch, 1, 2, generator=draws)
    time = torch.linspace(0, 2 * torch.pi, n).unsqueeze(-1) * torch.tensor([3, 5])
    noise = torch.randn(heads, batch, n, dim, generator=draws)
    return (torch.sin(2 * torch.sin(time + phase) @ maps[0]) @ maps[1] + noise).transpose(0, 1)


def test_learned_codes_are_ahead_on_unseen_tokens():
    """By more than the spread over seeds: the worst learned codes beat the best others of every kind."""
    makers = {
        "learned": (KernelHasher, {}),
        "klsh": (KlshHasher, {}),
        "lsh": (LshHasher, {}),
        "channels": (SignHasher, {"bits": 16}),
        "fourier": (SignHasher, {"bits": 16, "features": "fourier"}),
    }
    objectives = {name: [] for name in makers}
    for seed in range(2):
        seen, unseen = manifold(2, seed), manifold(2, seed + 100)
        for name, (maker, kwargs) in makers.items():
            hasher = maker(2, 32, **kwargs).fit(seen, seed=seed)
            found = reference.objective(hasher.codes(unseen), reference.pairwise_labels(unseen, 10))
            objectives[name] += found.mean(dim=0).tolist()
    worst = max(objectives.pop("learned"))
    assert {name: min(values) for name, values in objectives.items() if min(values) <= worst} == {}
