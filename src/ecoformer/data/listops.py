"""ListOps: nested lists such as [MAX 4 3 [MIN 2 3 ] 1 ], whose value, 0 to 9, is the class.

The rules are the Long Range Arena's: an argument is a list with probability 1/4 while depth allows, a list
has 2 to 10 arguments, MED is the median rounded down, SM the sum modulo 10. Trees of a batch are drawn level
by level, all at once.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.data.texts import PAD

TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Texts of the token ids; 0 is padding."""

_DIGIT, _OPERATOR, _END = 1, 11, 15
_LIST_SHARE = 0.25
_BATCH = 2048
_FRUITLESS = 50


class _Level(NamedTuple):
    """The nodes of a depth, over all trees of a batch, in the order of their parents.

    `parent` counts the nodes one level up, and at the top the trees.
    """

    parent: Tensor
    is_list: Tensor


@register_dataset("listops")
def listops(
    *,
    min_length: int = 500,
    max_length: int = 2000,
    count: int = 96_000,
    test_count: int = 2_000,
    depth: int = 10,
    arguments: int = 10,
    seed: int = 0,
) -> Splits:
    """Nested lists as token ids (N, max_length), see `TOKENS`; no list occurs twice.

    Args:
        min_length: least tokens of a list, brackets included.
        max_length: most tokens of a list, and the length of a row.
        count: lists to learn from.
        test_count: lists to test on.
        depth: most levels; the innermost are digits.
        arguments: most arguments of a list.
        seed: of all draws.
    """
    shape = {"min_length": min_length, "max_length": max_length, "depth": depth, "arguments": arguments}
    settings = {**shape, "count": count, "test_count": test_count, "seed": seed}
    least = {"min_length": 4, "max_length": min_length, "depth": 2, "arguments": 2}
    for name, low in {**least, "count": 1, "test_count": 1}.items():
        if settings[name] < low:
            raise ValueError(f"{name} must be at least {low}, got {settings[name]}")
    generator = torch.Generator().manual_seed(seed)
    known: set[bytes] = set()
    rows: list[Tensor] = []
    values: list[Tensor] = []
    missing, fruitless = count + test_count, 0
    while missing:
        ids, results = draw_lists(_BATCH, generator, **shape)
        new = _unknown(ids, known)[:missing]
        fruitless = 0 if len(new) else fruitless + 1
        if fruitless == _FRUITLESS:
            given = ", ".join(f"{name}={value}" for name, value in shape.items())
            raise ValueError(
                f"{given} gave {count + test_count - missing} different lists and no more: widen them, or "
                f"lower count={count}"
            )
        rows.append(ids[new])
        values.append(results[new])
        missing -= len(new)
    inputs, targets = torch.cat(rows), torch.cat(values)
    train, test = Arrays(inputs[:count], targets[:count]), Arrays(inputs[count:], targets[count:])
    return Splits(train, test, "text", 10, len(TOKENS), shape["max_length"])


def _unknown(ids: Tensor, known: set[bytes]) -> Tensor:
    """Indices of rows that are new; adds them to `known`, as digests, which are shorter than rows."""
    new = []
    for i, row in enumerate(ids.numpy()):
        digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        if digest not in known:
            known.add(digest)
            new.append(i)
    return torch.tensor(new, dtype=torch.int64)


def draw_lists(
    trees: int, generator: torch.Generator, *, depth: int, arguments: int, min_length: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """Of so many random lists, those of fitting length: token ids (N, max_length) of uint8, values (N,)."""
    levels = _grown(trees, generator, depth, arguments, max_length)
    length = _lengths(levels)[0]
    levels = _only(levels, (length >= min_length) & (length <= max_length))
    operators = [torch.randint(4, level.parent.shape, generator=generator) for level in levels]
    digits = [torch.randint(10, level.parent.shape, generator=generator) for level in levels]
    return _written(levels, operators, digits, max_length), _values(levels, operators, digits)


def _grown(
    trees: int, generator: torch.Generator, depth: int, arguments: int, max_length: int
) -> list[_Level]:
    """Trees without numbers; those that became too long stop growing."""
    levels: list[_Level] = []
    parent = tree = torch.arange(trees)
    length = torch.zeros(trees, dtype=torch.int64)
    for level in range(1, depth + 1):
        is_list = torch.rand(len(parent), generator=generator) < _LIST_SHARE
        if level == 1:
            is_list.fill_(True)  # a bare digit is never long enough
        elif level == depth:
            is_list.fill_(False)
        levels.append(_Level(parent, is_list))
        length += tree.bincount(minlength=trees) + tree[is_list].bincount(minlength=trees)
        parent = (is_list & (length <= max_length)[tree]).nonzero().squeeze(1)
        sizes = torch.randint(2, arguments + 1, parent.shape, generator=generator)
        parent = parent.repeat_interleave(sizes)
        tree = tree[parent]
    return levels


def _lengths(levels: list[_Level]) -> list[Tensor]:
    """Tokens of every node with all below it, level by level."""
    lengths = [1 + level.is_list.long() for level in levels]
    for depth in range(len(levels) - 1, 0, -1):
        lengths[depth - 1].index_add_(0, levels[depth].parent, lengths[depth])
    return lengths


def _only(levels: list[_Level], kept: Tensor) -> list[_Level]:
    """The levels of some trees."""
    chosen = []
    for level in levels:
        number = kept.cumsum(0) - 1
        kept = kept[level.parent]
        chosen.append(_Level(number[level.parent[kept]], level.is_list[kept]))
    return chosen


def _written(levels: list[_Level], operators: list[Tensor], digits: list[Tensor], width: int) -> Tensor:
    """Token ids of the trees, (N, width)."""
    trees = len(levels[0].parent)
    ids = torch.full((trees, width), PAD, dtype=torch.uint8)
    row, inside = torch.arange(trees), torch.zeros(trees, dtype=torch.int64)
    for level, length, operator, digit in zip(levels, _lengths(levels), operators, digits, strict=True):
        row = row[level.parent]
        start = inside[level.parent] + _before(length, level.parent)
        ids[row, start] = torch.where(level.is_list, _OPERATOR + operator, _DIGIT + digit).to(torch.uint8)
        ids[row[level.is_list], (start + length - 1)[level.is_list]] = _END
        inside = start + 1
    return ids


def _before(length: Tensor, parent: Tensor) -> Tensor:
    """Tokens of a node's earlier siblings."""
    before = length.cumsum(0) - length
    sizes = parent.bincount()
    sizes = sizes[sizes > 0]
    return before - before[sizes.cumsum(0) - sizes].repeat_interleave(sizes)


def _values(levels: list[_Level], operators: list[Tensor], digits: list[Tensor]) -> Tensor:
    """Values of the trees, from the innermost level outwards."""
    values = digits[-1]
    for depth in range(len(levels) - 2, -1, -1):
        is_list, outer = levels[depth].is_list, digits[depth].clone()
        owner = (is_list.cumsum(0) - 1)[levels[depth + 1].parent]
        outer[is_list] = _applied(operators[depth][is_list], values, owner)
        values = outer
    return values


def _applied(operator: Tensor, arguments: Tensor, owner: Tensor) -> Tensor:
    """The operators of lists (N,) on their arguments, each of which says whose it is."""
    counts = (owner * 10 + arguments).bincount(minlength=10 * len(operator)).view(-1, 10)
    up_to = counts.cumsum(1)
    size = up_to[:, -1:]
    # The k-th smallest argument is as large as there are digits that at most k arguments reach up to.
    ranks = torch.cat([torch.zeros_like(size), size - 1, (size - 1) // 2, size // 2], dim=1)
    least, most, low, high = (up_to.unsqueeze(1) <= ranks.unsqueeze(2)).sum(2).unbind(1)
    total = (counts * torch.arange(10)).sum(1)
    results = torch.stack([least, most, (low + high) // 2, total % 10], dim=1)
    return results.gather(1, operator.unsqueeze(1)).squeeze(1)
