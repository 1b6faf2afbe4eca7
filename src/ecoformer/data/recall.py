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
    joined: bool = False,
    count: int = 20_000,
    test_count: int = 2_000,
    seed: int = 0,
) -> Splits:
    """Rows k1 v1 k2 v2 ... q1 q2 ...; the target of a query is the number of the value that follows its key.

    Token ids: 0 is padding, which does not occur, 1 to `keys` are keys, the next `values` are values. Targets
    are 0 to `values` - 1, and `IGNORED` outside queries. No list occurs in both splits.

    With `joined` a pair is one token, p1 p2 ... q1 q2 ...: a model need not find out first that a value
    belongs to the key before it. Ids 1 to `keys` are the keys of queries; value v of key k, both counted
    from 0, is 1 + `keys` + k * `values` + v. The lists are the same.

    Args:
        pairs: keys of a list, all different.
        queries: different keys whose values are the targets, at most `pairs`.
        keys: number of different keys.
        values: number of different values; a list may hold one twice.
        joined: make a key and its value one token.
        count: lists to learn from.
        test_count: lists to test on.
        seed: of all draws.
    """
    sizes = {"pairs": pairs, "queries": queries, "keys": keys, "values": values}
    if not 1 <= queries <= pairs <= keys or min(values, count, test_count) < 1:
        raise ValueError(f"queries={queries} <= pairs={pairs} <= keys={keys} and all others must be positive")
    vocabulary = 1 + keys + (keys * values if joined else values)
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
    if joined:
        train, test = (_joined(part, pairs, keys, values) for part in (train, test))
    return Splits(train, test, "tokens", values, vocabulary, train.inputs.shape[1])


def _draw(
    count: int, *, pairs: int, queries: int, keys: int, values: int, generator: torch.Generator
) -> Arrays:
    inputs = torch.empty(count, 2 * pairs + queries, dtype=torch.int16)
    targets = torch.full_like(inputs, IGNORED)
    for rows, answers in zip(torch.split(inputs, _CHUNK), torch.split(targets, _CHUNK), strict=True):
        listed = _distinct(len(rows), pairs, keys, generator)
        bound = torch.randint(values, (len(rows), pairs), generator=generator)
        asked = _distinct(len(rows), queries, pairs, generator)
        rows[:, : 2 * pairs : 2] = 1 + listed
        rows[:, 1 : 2 * pairs : 2] = 1 + keys + bound
        rows[:, 2 * pairs :] = 1 + listed.gather(1, asked)
        answers[:, 2 * pairs :] = bound.gather(1, asked)
    return Arrays(inputs, targets)


def _distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Rows (count, size) of different numbers below `of`, in random order."""
    return torch.rand(count, of, generator=generator, dtype=torch.float64).argsort(dim=1)[:, :size]


def _lists(rows: Arrays, pairs: int) -> list[bytes]:
    return [row.tobytes() for row in rows.inputs[:, : 2 * pairs].numpy()]


def _joined(rows: Arrays, pairs: int, keys: int, values: int) -> Arrays:
    """Rows whose pairs are one token each."""
    inputs, width = rows.inputs.long(), 2 * pairs
    key, value = inputs[:, :width:2] - 1, inputs[:, 1:width:2] - 1 - keys
    inputs = torch.cat([1 + keys + key * values + value, inputs[:, width:]], dim=1)
    return Arrays(inputs.to(torch.int16), rows.targets[:, pairs:].contiguous())
