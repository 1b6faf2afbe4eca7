"""ListOps: nested lists such as [MAX 4 3 [MIN 2 3 ] 1 ], whose value, 0 to 9, is the class.

The rules are the Long Range Arena's: an argument is a list with probability 1/4 while depth allows, a list
has 2 to 10 arguments, MED is the median rounded down, SM the sum modulo 10.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ecoformer.data.registry import register_dataset
from ecoformer.data.splits import Arrays, Splits
from ecoformer.data.texts import PAD

TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Texts of the token ids; 0 is padding."""

_DIGIT, _OPERATOR, _END = 1, 11, 15
_LIST_SHARE = 0.25
_FRUITLESS = 100_000


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
    if not 4 <= min_length <= max_length or min(depth, arguments) < 2 or min(count, test_count) < 1:
        raise ValueError(
            f"4 <= min_length={min_length} <= max_length={max_length}, depth={depth} and "
            f"arguments={arguments} at least 2, count={count} and test_count={test_count} at least 1"
        )
    draw = random.Random(seed).random
    found: dict[bytes, int] = {}
    fruitless = 0
    while len(found) < count + test_count:
        tokens: list[int] = []
        value = draw_list(draw, tokens, depth, arguments, max_length)
        fruitless += 1
        if value is not None and min_length <= len(tokens) <= max_length and bytes(tokens) not in found:
            found[bytes(tokens)], fruitless = value, 0
        if fruitless == _FRUITLESS:
            raise ValueError(
                f"there are only {len(found)} such lists: lower count={count}, or allow longer ones"
            )
    inputs = torch.full((len(found), max_length), PAD, dtype=torch.uint8)
    for row, ids in zip(inputs, found, strict=True):
        row[: len(ids)] = torch.frombuffer(bytearray(ids), dtype=torch.uint8)
    targets = torch.tensor(list(found.values()))
    train, test = Arrays(inputs[:count], targets[:count]), Arrays(inputs[count:], targets[count:])
    return Splits(train, test, "text", 10, len(TOKENS), max_length)


def draw_list(
    draw: Callable[[], float], tokens: list[int], depth: int, arguments: int, longest: int
) -> int | None:
    """Add a random list to `tokens`; its value, or None where that makes more than `longest` tokens."""
    operator, values = int(4 * draw()), []
    tokens.append(_OPERATOR + operator)
    for _ in range(2 + int((arguments - 1) * draw())):
        if depth > 2 and draw() < _LIST_SHARE:
            value = draw_list(draw, tokens, depth - 1, arguments, longest)
        else:
            value = int(10 * draw())
            tokens.append(_DIGIT + value)
        if value is None or len(tokens) >= longest:
            return None
        values.append(value)
    tokens.append(_END)
    return _applied(operator, values)


def _applied(operator: int, values: list[int]) -> int:
    if operator == 3:
        return sum(values) % 10
    values, last = sorted(values), len(values) - 1
    return (values[0], values[-1], (values[last // 2] + values[(last + 1) // 2]) // 2)[operator]
