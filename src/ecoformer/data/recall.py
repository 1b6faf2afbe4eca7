"""Associative recall: a list of keys and values, then queries: keys whose values are the targets."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Splits

_CHUNK = 4096
_ATTEMPTS = 20


@register_dataset("recall")
def recall(
    *,
    pairs: int = 32,
    queries: int = 8,
    keys: int = 128,
    values: int = 64,
    count: int = 20_000,
    test_count: int = 2_000,
    seed: int = 0,
) -> Splits:
    """Rows p1 p2 ... q1 q2 ...: pairs of a key and a value, then keys whose values are the targets.

    A pair is one token, so that a model need not find out first which value belongs to a key. Token ids: 0 is
    padding, which does not occur, 1 to `keys` are the keys of queries; value v of key k, both counted from 0,
    is 1 + `keys` + k * `values` + v. Targets are 0 to `values` - 1, and `IGNORED` outside queries. No list
    occurs in both splits.

    Args:
        pairs: keys of a list, all different.
        queries: different keys whose values are the targets, at most `pairs`.
        keys: number of different keys.
        values: number of different values; a list may hold one twice.
        count: lists to learn from.
        test_count: lists to test on.
        seed: of all draws.
    """
    sizes = {"pairs": pairs, "queries": queries, "keys": keys, "values": values}
    if not 1 <= queries <= pairs <= keys or min(values, count, test_count) < 1:
        raise ValueError(f"queries={queries} <= pairs={pairs} <= keys={keys} and all others must be positive")
    vocabulary = 1 + keys + keys * values
    if vocabulary > 2**15:
        raise ValueError(f"keys={keys} and values={values} make {vocabulary} token ids, at most {2**15} fit")
    generator = torch.Generator().manual_seed(seed)
    train, test = (_draw(n, **sizes, generator=generator) for n in (count, test_count))
    known = set(_lists(train, pairs))
    for _ in range(_ATTEMPTS):
        twice = torch.tensor([row in known for row in _lists(test, pairs)])
        if not twice.any():
            break
        again = _draw(int(twice.sum()), **sizes, generator=generator)
        test.inputs[twice], test.targets[twice] = again.inputs, again.targets
    else:
        raise ValueError(
            f"pairs={pairs}, keys={keys}, values={values} give too few lists for test_count={test_count} new "
            f"ones beside count={count}: raise one of the first three, or lower count"
        )
    return Splits(train, test, "tokens", values, vocabulary, train.inputs.shape[1])


def _draw(
    count: int, *, pairs: int, queries: int, keys: int, values: int, generator: torch.Generator
) -> Arrays:
    inputs = torch.empty(count, pairs + queries, dtype=torch.int16)
    targets = torch.full_like(inputs, IGNORED)
    for rows, answers in zip(torch.split(inputs, _CHUNK), torch.split(targets, _CHUNK), strict=True):
        listed = _distinct(len(rows), pairs, keys, generator)
        bound = torch.randint(values, (len(rows), pairs), generator=generator)
        asked = _distinct(len(rows), queries, pairs, generator)
        rows[:, :pairs] = 1 + keys + listed * values + bound
        rows[:, pairs:] = 1 + listed.gather(1, asked)
        answers[:, pairs:] = bound.gather(1, asked)
    return Arrays(inputs, targets)


def _distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Rows (count, size) of different numbers below `of`, in random order."""
    return torch.rand(count, of, generator=generator, dtype=torch.float64).argsort(dim=1)[:, :size]


def _lists(rows: Arrays, pairs: int) -> list[bytes]:
    return [row.tobytes() for row in rows.inputs[:, :pairs].numpy()]
