"""Associative recall: a list of keys and values, then keys whose values are asked for."""

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
        queries: keys asked for, all different, at most `pairs`.
        keys: different keys there are.
        values: different values there are; a list may hold one twice.
        joined: whether a key and its value are one token.
        count: lists to learn from.
        test_count: lists to test on.
        seed: of all draws.
    """
    sizes = {"pairs": pairs, "queries": queries, "keys": keys, "values": values}
    for name, size in (sizes | {"count": count, "test_count": test_count}).items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if pairs > keys:
        raise ValueError(f"pairs={pairs} different keys need at least as many keys, got keys={keys}")
    if queries > pairs:
        raise ValueError(f"queries={queries} must be at most pairs={pairs}: each key is asked for once")
    vocabulary = 1 + keys + (keys * values if joined else values)
    if vocabulary > 2**15:
        tokens = "keys + keys * values, as joined pairs need," if joined else "keys + values"
        raise ValueError(f"{tokens} must be below {2**15}, got keys={keys} and values={values}")
    generator = torch.Generator().manual_seed(seed)
    train = _draw(count, pairs, queries, keys, values, generator)
    test = _draw(test_count, pairs, queries, keys, values, generator)
    width = 2 * pairs
    known = _rows(train.inputs[:, :width])
    for _ in range(_ATTEMPTS):
        twice = torch.tensor([row in known for row in _row_bytes(test.inputs[:, :width])])
        if not twice.any():
            if joined:
                train, test = (_join(part, pairs, keys, values) for part in (train, test))
            return Splits(train, test, "tokens", values, vocabulary, train.inputs.shape[1])
        again = _draw(int(twice.sum()), pairs, queries, keys, values, generator)
        test.inputs[twice], test.targets[twice] = again.inputs, again.targets
    raise ValueError(
        f"pairs={pairs}, keys={keys}, values={values} give too few lists for {test_count} new ones beside "
        f"count={count}: raise one of the first three, or lower count"
    )


def _draw(count: int, pairs: int, queries: int, keys: int, values: int, generator: torch.Generator) -> Arrays:
    parts = [
        _draw_chunk(min(_CHUNK, count - start), pairs, queries, keys, values, generator)
        for start in range(0, count, _CHUNK)
    ]
    return Arrays(torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts]))


def _draw_chunk(
    count: int, pairs: int, queries: int, keys: int, values: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    listed = _distinct(count, pairs, keys, generator)
    bound = torch.randint(values, (count, pairs), generator=generator)
    asked = _distinct(count, queries, pairs, generator)
    rows = torch.stack([1 + listed, 1 + keys + bound], dim=-1).flatten(1)
    inputs = torch.cat([rows, 1 + listed.gather(1, asked)], dim=1)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, 2 * pairs :] = bound.gather(1, asked)
    return inputs.to(torch.int16), targets.to(torch.int16)


def _join(rows: Arrays, pairs: int, keys: int, values: int) -> Arrays:
    """Rows whose pairs are one token each."""
    inputs, width = rows.inputs.long(), 2 * pairs
    key, value = inputs[:, :width:2] - 1, inputs[:, 1:width:2] - 1 - keys
    inputs = torch.cat([1 + keys + key * values + value, inputs[:, width:]], dim=1)
    return Arrays(inputs.to(torch.int16), rows.targets[:, pairs:].contiguous())


def _distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Rows (count, size) of different numbers below `of`, in random order."""
    return torch.rand(count, of, generator=generator, dtype=torch.float64).argsort(dim=1)[:, :size]


def _rows(ids: Tensor) -> set[bytes]:
    return set(_row_bytes(ids))


def _row_bytes(ids: Tensor) -> list[bytes]:
    return [row.tobytes() for row in ids.numpy()]
