"""ListOps: generated lists against an evaluator that reads their text, one token after another."""

import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoformer.data import load
from ecoformer.data.listops import TOKENS, draw_list

OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def words(row):
    kept = [TOKENS[i] for i in row.tolist() if i]
    assert not row[len(kept) :].any(), "padding is at the end"
    return kept


def evaluate(tokens):
    """The value, the depth and the most arguments of a list, which must be well formed."""
    stack, depth, most = [[]], 0, 0
    for token in tokens:
        if token in OPERATORS:
            stack.append([token])
            depth = max(depth, len(stack))
        elif token == "]":
            operator, *values = stack.pop()
            assert len(values) >= 2
            most = max(most, len(values))
            stack[-1].append(OPERATORS[operator](values))
        else:
            stack[-1].append(int(token))
    assert len(stack) == len(stack[0]) == 1
    return stack[0][0], depth, most


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 13), st.integers(20, 80), st.integers(3, 6), st.integers(3, 7), st.integers(0, 999))
def test_values(least, spare, depth, arguments, seed):
    sizes = {"min_length": least, "max_length": least + spare, "depth": depth, "arguments": arguments}
    splits = load("listops", **sizes, seed=seed, count=40, test_count=5)
    assert splits.train.inputs.shape == (40, least + spare)
    for part in (splits.train, splits.test):
        for row, target in zip(part.inputs, part.targets.tolist(), strict=True):
            tokens = words(row)
            assert least <= len(tokens) <= least + spare
            value, levels, most = evaluate(tokens)
            assert value == target
            assert levels <= depth
            assert most <= arguments


def test_lists_of_the_long_range_arena():
    splits = load("listops", count=300, test_count=20)
    assert splits.train.inputs.shape == (300, 2000)
    assert splits.train.inputs.dtype == torch.uint8
    assert (splits.kind, splits.classes, splits.vocabulary, splits.length) == ("text", 10, 16, 2000)
    found = [evaluate(words(row)) for row in splits.train.inputs]
    assert [value for value, *_ in found] == splits.train.targets.tolist()
    assert max(depth for _, depth, _ in found) == 10
    assert {most for *_, most in found} == {10}
    lengths = (splits.train.inputs > 0).sum(1)
    assert lengths.min() >= 500
    assert lengths.max() <= 2000


def test_shares():
    """A quarter of what may be a list is one; operators, digits and sizes are equally frequent."""
    draw, ids = random.Random(0).random, []
    for _ in range(10_000):
        assert draw_list(draw, ids, 3, 4, 10**6) is not None
    counts = torch.tensor(ids).bincount(minlength=16)[1:].float()
    digits, operators = counts[:10], counts[10:14]
    assert counts[14] == operators.sum()
    assert (digits / digits.mean() - 1).abs().max() < 0.06
    assert (operators / operators.mean() - 1).abs().max() < 0.06
    # A top list has 3 arguments on average, of which a quarter are lists of 3 digits.
    assert abs(float(operators.sum()) / 10_000 - 1.75) < 0.05
    assert abs(float(digits.sum()) / 10_000 - (3 * 0.75 + 3 * 0.25 * 3)) < 0.1


def test_no_list_occurs_twice():
    splits = load("listops", min_length=4, max_length=5, count=3000, test_count=500, depth=2, arguments=3)
    rows = torch.cat([splits.train.inputs, splits.test.inputs])
    assert len(rows.unique(dim=0)) == 3500
    with pytest.raises(ValueError, match=r"only 400 such lists: .*count=900"):
        load("listops", min_length=4, max_length=4, count=900, depth=2, arguments=2, test_count=1)


def test_seeds():
    small = {"min_length": 10, "max_length": 40, "count": 30, "test_count": 4}
    first = load("listops", **small)
    assert torch.equal(load("listops", **small).test.inputs, first.test.inputs)
    assert not torch.equal(load("listops", **small, seed=1).train.inputs, first.train.inputs)


@pytest.mark.parametrize("options", [{"min_length": 3}, {"max_length": 499}, {"depth": 1}, {"arguments": 1}])
def test_wrong_settings(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        load("listops", **options)
