"""Same seed and same samples, same hash functions: in whatever order, and on however many ranks."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ecoformer import EcoAttention, FitOptions, KernelHasher, KlshHasher, LshHasher, SignHasher, fit_hashers

HEADS, DIM, BITS, SUPPORT = 2, 6, 8, 5
QUICK = FitOptions(steps=4, pairs=3)
MAKERS = {
    "kernel": lambda: KernelHasher(HEADS, DIM, BITS, SUPPORT),
    "trainable": lambda: KernelHasher(HEADS, DIM, BITS, SUPPORT, trainable=True),
    "klsh": lambda: KlshHasher(HEADS, DIM, BITS, SUPPORT),
    "lsh": lambda: LshHasher(HEADS, DIM, BITS, seed=0),
    "fourier": lambda: SignHasher(HEADS, DIM, BITS, features="fourier", seed=0),
}
every_hasher = pytest.mark.parametrize("kind", MAKERS)


def tokens(batch=7, n=12, seed=0):
    return torch.randn(batch, HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))


def mask(lengths, n=12):
    return torch.arange(n) >= torch.as_tensor(lengths)[:, None]


def fitted(kind="kernel", x=None, options=QUICK, **kwargs):
    return MAKERS[kind]().fit(tokens() if x is None else x, options=options, **kwargs)


def same(a, b):
    """Whether two states (or modules) are equal bit for bit."""
    a, b = (x if isinstance(x, dict) else x.state_dict() for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@every_hasher
@pytest.mark.parametrize("seed", range(2))
def test_order_of_samples_does_not_matter(kind, seed):
    shuffle = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    assert same(fitted(kind), fitted(kind, tokens()[shuffle]))
    lengths = torch.tensor([12, 3, 5, 12, 7, 1, 9])
    shuffled = fitted(kind, tokens()[shuffle], key_padding_mask=mask(lengths[shuffle]))
    assert same(fitted(kind, key_padding_mask=mask(lengths)), shuffled)


@pytest.mark.parametrize("kind", ["kernel", "trainable", "klsh"])
@pytest.mark.parametrize("content", [0.0, 1e3, float("nan")])
def test_what_padding_holds_does_not_matter(kind, content):
    padding = mask([12, 3, 5, 12, 7, 1, 9])
    filled = tokens().masked_fill(padding[:, None, :, None], content)
    assert same(fitted(kind, key_padding_mask=padding), fitted(kind, filled, key_padding_mask=padding))


@pytest.mark.parametrize("kind", ["kernel", "trainable", "klsh"])
def test_how_far_padding_goes_does_not_matter(kind):
    """Up to rounding: codes are those learned from tokens without the padding."""
    x = tokens()
    wide = torch.cat([x, 9 * tokens(n=8, seed=50)], dim=2)
    cut, padded = fitted(kind, x), fitted(kind, wide, key_padding_mask=mask([12] * 7, n=20))
    torch.testing.assert_close(cut.support_samples, padded.support_samples)
    torch.testing.assert_close(cut.sigma, padded.sigma)
    torch.testing.assert_close(cut.mean, padded.mean)
    assert (cut.codes(x) == padded.codes(x)).float().mean() > 0.99


# Cases for two ranks: every sample's rank, its length, and the tokens each rank's tensor is long.
CASES = {
    "uneven": ([0, 1, 1, 1, 1, 1, 1], None, (12, 12)),
    "empty rank": ([1, 1, 1, 1, 1, 1, 1], None, (12, 12)),
    "other lengths, padded": ([1, 0, 1, 0, 0, 1, 1], [11, 8, 12, 3, 5, 4, 12], (8, 12)),
}


def share(case, rank):
    """What a rank holds: its samples as a tensor of its own length, and a mask if it needs one."""
    ranks, lengths, longest = CASES[case]
    mine = torch.tensor(ranks) == rank
    x = tokens()[mine, :, : longest[rank]]
    if lengths is None or all(lengths[i] == longest[rank] for i in mine.nonzero()):
        return x, None
    return x, mask(torch.tensor(lengths)[mine], longest[rank])


def whole(case):
    """What one process holds."""
    lengths = CASES[case][1]
    return tokens(), None if lengths is None else mask(lengths)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(EcoAttention(HEADS * DIM, HEADS, bits=4, support=3) for _ in range(2)))


def images():
    return torch.randn(8, 9, HEADS * DIM, generator=torch.Generator().manual_seed(3))


def work(rank, folder):
    """Everything that two ranks do, in one go: starting processes is what takes the time."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    group, found = dist.group.WORLD, {}
    for case in CASES:
        for kind in MAKERS:
            x, padding = share(case, rank)
            together = fitted(kind, x, key_padding_mask=padding, seed=2, group=group)
            x, padding = whole(case)
            alone = fitted(kind, x, key_padding_mask=padding, seed=2)
            found[case, kind] = (together.state_dict(), alone.state_dict())
    tower, single = model(), model()
    names = fit_hashers(tower, [images()[rank::2]], options=QUICK, group=group)
    try:
        fit_hashers(single, [images()], options=QUICK)
    except ValueError as error:
        found["apart"] = str(error)
    fit_hashers(single, [images()], options=QUICK, group="alone")
    found["model"] = (names, tower.state_dict(), single.state_dict())
    try:
        fitted(x=torch.full_like(tokens(), torch.nan) if rank else tokens(), group=group)
    except ValueError as error:
        found["nan"] = str(error)
    dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@every_hasher
@pytest.mark.parametrize("case", CASES)
def test_ranks_learn_what_one_process_learns(ranks, case, kind):
    for found in ranks:
        together, alone = found[case, kind]
        assert together["fitted"]
        assert same(together, alone)
    assert same(ranks[0][case, kind][0], ranks[1][case, kind][0])


def test_models_on_two_ranks(ranks):
    names, first, single = ranks[0]["model"]
    assert names == ["0.hasher", "1.hasher"]
    assert same(first, ranks[1]["model"][1])
    for key, value in first.items():
        torch.testing.assert_close(value, single[key], msg=key)


def test_broken_tokens_on_one_rank_stop_all(ranks):
    """An error on one rank only would leave the others waiting."""
    for found in ranks:
        assert "tokens (14, 2, 12, 6)" in found["nan"]


def test_ranks_do_not_learn_apart_unless_told_to(ranks):
    for found in ranks:
        assert "pass group=" in found["apart"]
