"""The ledger's formula of the CPU kernels against their own source, run in Python while it counts."""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
import types
from array import array
from collections import Counter

import numpy as np
import pytest
import torch
from calls import make_call, truth

import ecoformer
from ecoformer.accounting.cpu_kernels import code_counts, kernel_counts
from ecoformer.backends.cpu.problem import WHOLE, digit_of, places
from ecoformer.backends.hashing import Hyperplanes

LANES = 16
counted: Counter[str] = Counter()


def count(**kinds):
    counted.update(kinds)


class Whole(int):
    """An integer of the kernels' own that counts what is done with it."""

    def __add__(self, other):
        count(add=1)
        return Whole(int(self) + int(other))

    def __sub__(self, other):
        count(add=1)
        return Whole(int(self) - int(other))

    def __mul__(self, other):
        count(mul=1)
        return Whole(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        count(add=1)
        return Whole(int(other) - int(self))


class Single(float):
    """A number from a square sum or a root."""

    __array_ufunc__ = None

    def __mul__(self, other):
        count(mul=1)
        return Single(float(self) * float(other))

    def __truediv__(self, other):
        count(mul=1)
        return Single(float(self) / float(other))

    def __rtruediv__(self, other):
        count(mul=1)
        return Single(float(other) / float(self))

    __rmul__ = __mul__


class Memory:
    """Numbers at an address."""

    def __init__(self, kind, address, wrap):
        self.numbers, self.wrap = (kind * (1 << 24)).from_address(address), wrap

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [0] * (index.stop - index.start)
        return self.wrap(self.numbers[int(index)])

    def __setitem__(self, index, value):
        self.numbers[int(index)] = value

    def row(self, start, length):
        start = int(start)
        return np.array(self.numbers[start : start + length], dtype=np.float32)

    def put(self, start, values):
        start = int(start)
        self.numbers[start : start + len(values)] = values.tolist()


def product(rows):
    def run(x, x0, dx, length, w, w0, dw, y, y0, dy):
        for i in range(rows):
            weights = np.stack([w.row(w0 + k * dw, LANES) for k in range(length)])
            y.put(y0 + i * dy, x.row(x0 + i * dx, length) @ weights)
        count(mul=rows * length * LANES, add=rows * length * LANES)

    return run


def square_sum(x, x0, length):
    count(mul=length, add=length + LANES)
    return Single(np.square(x.row(x0, length)).sum())


def bits(values):
    count(compare=LANES)
    return sum(1 << i for i, value in enumerate(values) if value)


def kernel_row(y, y0, offset, offset0, mean, mean0, length, scale, shift):
    exponent = y.row(y0, length) * np.float32(scale) + (offset.row(offset0, length) + np.float32(shift))
    y.put(y0, np.exp(np.minimum(exponent, 0)) - mean.row(mean0, length))
    # The exponent; 2^n and the rest; a polynomial of degree 6; their product, n in its place; the mean.
    count(mul=length * (1 + 3 + 6 + 1), add=length * (2 + 4 + 6 + 1 + 1), compare=4 * length, shift=length)


def add_row(y, y0, x, x0, length):
    y.put(y0, y.row(y0, length) + x.row(x0, length))
    count(add=length)


def add_to_bucket(y, y0, x, x0, length):
    add_row(y, y0, x, x0, length)
    if x is not y:  # values come from outside, folded rows from scratch memory
        count(lookup=length)


def add_row_twice(y, first, second, x, x0, length):
    add_to_bucket(y, first, x, x0, length)
    add_to_bucket(y, second, x, x0, length)


def read_two_rows(y, y0, table, first, again, second, length, by):
    y.put(y0, (table.row(first, length) + again.row(second, length)) / np.float32(by))
    count(lookup=2 * length, add=length, mul=length)


def inverse_lengths(y, y0, length, scale):
    squares = y.row(y0, length)
    with np.errstate(divide="ignore"):
        y.put(y0, np.where(squares == 0, 0, np.float32(scale) / np.sqrt(squares)).astype(np.float32))
    count(exp=length, mul=length)


def fold_row(y, y0, low, low0, high, high0, length):
    below, above = low.row(low0, length), high.row(high0, length)
    y.put(y0, y.row(y0, length) + (above - below))
    low.put(low0, below + above)
    count(add=3 * length)


def table_row(y, y0, base, base0, x, x0, length, scale):
    y.put(y0, base.row(base0, length) + np.float32(scale) * x.row(x0, length))
    count(mul=length, add=length)


def read_rows(y, y0, table, rows, number, length, by):
    y.put(y0, sum(table.row(row, length) for row in rows[:number]) / np.float32(by))
    count(lookup=number * length, add=number * length, mul=length)


@pytest.fixture
def counting_kernels(monkeypatch):
    """The kernels' modules, read anew on instructions that are Python and count."""
    same = lambda function: function  # noqa: E731
    number = types.SimpleNamespace(
        sqrt=lambda x: (count(exp=1), Single(math.sqrt(x)))[1], float32=float, inf=math.inf, nan=math.nan
    )
    fakes = {
        "compiler": {
            "compiled": same, "inlined": same, "callback": same, "carray": None,
            "int64": int, "float32": float, "digest_of_sources": lambda: 1,
            "to_fixed_tuple": lambda memory, n: [int(memory[i]) for i in range(n)],
        },
        "vectors": {
            "TILE": 6, "tile_product": product(6), "row_product": product(1), "square_sum": square_sum,
            "claim": None,
            "current": None,
            "give_way": None,
            "floats": lambda address: Memory(ctypes.c_float, int(address), float),
            "integers": lambda address: Memory(ctypes.c_int64, int(address), Whole),
            "octets": lambda address: Memory(ctypes.c_uint8, int(address), int) if address else None,
            "sign_bits": lambda y, y0: bits(y.row(y0, LANES) >= 0),
            "nan_bits": lambda y, y0: bits(np.isnan(y.row(y0, LANES))),
        },
        "rows": {
            "kernel_row": kernel_row, "add_row": add_to_bucket, "fold_row": fold_row, "table_row": table_row,
            "add_row_twice": add_row_twice, "inverse_lengths": inverse_lengths,
            "read_two_rows": read_two_rows, "read_rows": read_rows,
            "carry_row": None, "divide_row": None, "running_row": None,
        },
    }  # fmt: skip
    package = "ecoformer.backends.cpu"
    for name, contents in fakes.items():
        module = types.ModuleType(f"{package}.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
    for name in ("hashing", "sums", "causal", "kernels"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}", raising=False)
    kernels = importlib.import_module(f"{package}.kernels")
    monkeypatch.setattr(sys.modules[f"{package}.hashing"], "np", number)
    yield kernels
    for name in ("hashing", "sums", "causal", "kernels"):
        sys.modules.pop(f"{package}.{name}", None)


def run_counting(kernels, call):
    """The call's output by the counting kernels."""
    batch, heads, tokens, dim = call.q.shape
    bits, channels = call.functions.weight.shape[-1], call.v.shape[-1]
    planes = isinstance(call.functions, Hyperplanes)
    samples = 0 if planes else call.functions.support.shape[1]
    digit = digit_of(bits, channels, tokens)
    at = places(dim, channels, samples, bits, digit, tokens)
    out = torch.empty_like(call.v)

    def place(x):
        return [x.data_ptr(), *x.stride()[:3]]

    numbers = [batch, heads, tokens, tokens, dim, channels, samples, bits, digit, 1]
    numbers += [
        int(call.beta),
        int(call.own_value),
        *place(call.q),
        0,
        *call.q.stride()[:3],
        *place(call.v),
        *place(out),
        0,
        0,
        0,
    ]
    numbers += [0, 0, 0] * planes + [x.data_ptr() for x in call.functions] + [0, 0, 0]
    problem, layout = array("q", numbers), array("q", at)
    scratch = torch.zeros(at.end + (1 << 12), dtype=torch.uint8)
    counted.clear()
    addresses = scratch.data_ptr(), problem.buffer_info()[0], layout.buffer_info()[0]
    kernels._run(WHOLE, 0, batch * heads, *addresses)
    return out


@pytest.mark.parametrize(
    "size",
    [
        {"n": 50, "bits": 16, "samples": 5},
        {"n": 7, "bits": 33, "samples": 17, "dim": 19},
        {"n": 1030, "bits": 13, "samples": 2, "dim": 3, "batch": 1, "heads": 1},
        {"n": 9, "bits": 4, "planes": True, "batch": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("own", [False, True], ids=["all values", "own value"])
def test_the_formula_counts_what_the_kernels_do(size, own, counting_kernels):
    call = make_call(**{"dim": 16, "batch": 2, "heads": 2} | size, own=own)
    out = run_counting(counting_kernels, call)
    torch.testing.assert_close(out, truth(call).float(), rtol=1e-4, atol=1e-5)
    batch, heads, tokens, dim = call.q.shape
    options = {"bits": size["bits"], "bias": "official" if own else "paper"}
    if "planes" not in size:
        options["support"] = size["samples"]
    name = "lsh_eco" if "planes" in size else "eco"
    layer = ecoformer.create_attention(name, dim * heads, heads, **options)
    formula = kernel_counts(layer, batch, tokens)
    expected = {kind: number for kind, number in formula.to_dict().items() if number and kind != "bytes"}
    assert dict(counted) == expected


def test_three_additions_a_channel_where_the_paper_has_32():
    additions = code_counts(ecoformer.EcoAttention(32, 1).hasher, 1, 3136).add / (3136 * 32)
    # Two to buckets, one of two rows of tables, their counts and denominators, the folding and the tables.
    assert 3 < additions < 4
