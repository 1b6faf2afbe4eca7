"""What the kernels do with rows of fp32 numbers, in vectors.

A row is an array and the offset of its first number. Functions take their rows, the rows' length, and fp32
numbers, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ecoformer.backends.cpu.compiler import cgutils, ir
from ecoformer.backends.cpu.problem import LANES
from ecoformer.backends.cpu.vectors import (
    F32,
    FUSED,
    I32,
    VECTOR,
    ZERO,
    Emit,
    along,
    emitted,
    integer,
    load,
    splat,
    steps,
    store,
)

Step = Callable[[Any, list[Any], list[Any]], list[Any]]


def _clear(size: int) -> Any:
    """A function that sets numbers of `size` bytes to zero; numba's own loops store them one by one."""

    @emitted("aii")
    def clear(builder: Any, y: Any, y0: Any, length: Any) -> None:
        cgutils.memset(builder, builder.gep(y, [y0]), builder.mul(length, integer(size)), 0)

    return clear


clear_row = _clear(4)
"""y = 0, of fp32 or int32 numbers."""
clear_tallies = _clear(8)
"""y = 0, of fp64 or int64 numbers."""


def _on_rows(count: int, numbers: int, step: Step) -> Any:
    """A function of `count` rows and some numbers: what `step` makes of them is written to the first rows."""

    @emitted("ai" * count + "i" + "f" * numbers)
    def function(builder: Any, *arguments: Any) -> None:
        pointers, starts = arguments[0 : 2 * count : 2], arguments[1 : 2 * count : 2]
        length, given = arguments[2 * count], list(arguments[2 * count + 1 :])
        wide = [splat(builder, value) for value in given]

        def vector(index: Any) -> None:
            offsets = [builder.add(start, index) for start in starts]
            values = [load(builder, p, o) for p, o in zip(pointers, offsets, strict=True)]
            for i, value in enumerate(step(builder, values, wide)):
                store(builder, value, pointers[i], offsets[i])

        def single(index: Any) -> None:
            places = [
                builder.gep(p, [builder.add(start, index)]) for p, start in zip(pointers, starts, strict=True)
            ]
            for i, value in enumerate(step(builder, [builder.load(place) for place in places], given)):
                builder.store(value, places[i])

        along(builder, length, vector, single)

    return function


def _times_plus(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=FUSED), c, flags=FUSED)


_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts: the first has few bits, so that its multiples are exact."""
_ROUNDER = 12582912.0
"""1.5 * 2^23: what is added to it is rounded to an integer, which then is in its last bits."""
_LOWEST = -87.0
"""Below, the result would have no full precision; it is 1e-38 there, nothing beside other features."""


def _like(value: Any, number: float) -> Any:
    """A constant of the type of a vector or a single number."""
    return ir.Constant(value.type, [number] * LANES if value.type == VECTOR else number)


def _chosen(builder: Any, relation: str, x: Any, bound: float) -> Any:
    """The bound where x has that relation to it, else x, also where x is NaN."""
    edge = _like(x, bound)
    return builder.select(builder.fcmp_ordered(relation, x, edge), edge, x)


def _exponential(builder: Any, x: Any) -> Any:
    """e^x for x <= 0: 2^n for the nearest n, times a polynomial of what is left; NaN stays NaN."""
    x = _chosen(builder, "<", x, _LOWEST)
    rounded = _times_plus(builder, x, _like(x, _LOG2_E), _like(x, _ROUNDER))
    n = builder.fsub(rounded, _like(x, _ROUNDER))
    rest = _times_plus(builder, n, _like(x, -_LN2_HIGH), x)
    rest = _times_plus(builder, n, _like(x, -_LN2_LOW), rest)
    series = _like(x, 1 / 720)
    for factorial in (120, 24, 6, 2, 1, 1):
        series = _times_plus(builder, series, rest, _like(x, 1 / factorial))
    integers = ir.VectorType(I32, LANES) if x.type == VECTOR else I32
    bias, places = (ir.Constant(integers, [c] * LANES if x.type == VECTOR else c) for c in (127, 23))
    power = builder.shl(builder.add(builder.bitcast(rounded, integers), bias), places)
    return builder.fmul(series, builder.bitcast(power, x.type))


def _kernel(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    product, offset, mean = rows
    scale, shift = scalars
    exponent = _times_plus(builder, product, scale, builder.fadd(offset, shift))
    return [builder.fsub(_exponential(builder, _chosen(builder, ">", exponent, 0.0)), mean)]


def _inverse_lengths(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    square, zero = rows[0], _like(rows[0], 0.0)
    empty = builder.fcmp_ordered("==", square, zero)
    name = f"llvm.sqrt.v{LANES}f32" if square.type == VECTOR else "llvm.sqrt.f32"
    kind = ir.FunctionType(square.type, [square.type])
    root = cgutils.get_or_insert_function(builder.module, kind, name)
    length = builder.call(root, [builder.select(empty, _like(square, 1.0), square)])
    finite = builder.fcmp_ordered("<", square, _like(square, math.inf))
    inverse = builder.select(finite, builder.fdiv(scalars[0], length), _like(square, math.nan))
    return [builder.select(empty, zero, inverse)]


def _kernel_grad(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    grad, feature, mean = rows
    return [builder.fmul(builder.fmul(grad, scalars[0]), builder.fadd(feature, mean))]


def _passed(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    grad, y = rows[0], builder.fmul(rows[1], scalars[0])
    above, below = (builder.fcmp_ordered(sign, y, _like(y, one)) for sign, one in (("<=", 1.0), (">=", -1.0)))
    return [builder.select(builder.and_(above, below), builder.fmul(grad, scalars[0]), _like(grad, 0.0))]


def _combined(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    y = _times_plus(builder, scalars[0], rows[1], rows[0])
    return [_times_plus(builder, scalars[1], rows[2], y)]


def _carried(builder: Any, rows: list[Any], _: Any) -> list[Any]:
    earlier, recent = rows
    total = builder.fadd(earlier, recent)
    return [total, builder.fsub(recent, builder.fsub(total, earlier))]


def _running(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    recent, out, earlier, value = rows
    recent = _times_plus(builder, scalars[0], value, recent)
    return [recent, _times_plus(builder, scalars[1], builder.fadd(earlier, recent), out)]


def _added_twice(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    term = builder.fmul(scalars[0], rows[2], flags=FUSED)
    return [builder.fadd(row, term, flags=FUSED) for row in rows[:2]]


inverse_lengths = _on_rows(1, 1, _inverse_lengths)
"""y = a / sqrt(y); zero where y is zero, NaN where it is infinite."""
kernel_row = _on_rows(3, 2, _kernel)
"""y = exp(min(a y + offset + b, 0)) - mean."""
kernel_grad_row = _on_rows(3, 1, _kernel_grad)
"""y *= a * (one + two)."""
pass_row = _on_rows(2, 1, _passed)
"""y = a * y where |a * x| <= 1, else 0."""
combine_row = _on_rows(3, 2, _combined)
"""y += a * one + b * two."""
blend_row = _on_rows(3, 2, lambda b, x, a: [_times_plus(b, a[1], x[2], b.fmul(a[0], x[1]))])
"""y = a * one + b * two."""
add_row = _on_rows(2, 0, lambda b, x, _: [b.fadd(x[0], x[1])])
"""y += x."""
add_row_twice = _on_rows(3, 1, _added_twice)
"""y += a * x and z += a * x, for different rows y and z."""
carry_row = _on_rows(2, 0, _carried)
"""earlier += recent, and in recent what rounding lost."""
fold_row = _on_rows(3, 0, lambda b, x, _: [b.fadd(x[0], b.fsub(x[2], x[1])), b.fadd(x[1], x[2])])
"""y += high - low, then low += high."""
running_row = _on_rows(4, 2, _running)
"""recent += a * value, then out += b * (earlier + recent)."""
divide_row = _on_rows(2, 1, lambda b, x, a: [b.fdiv(x[1], a[0])])
"""y = x / a."""
scale_row = _on_rows(2, 1, lambda b, x, a: [b.fmul(x[1], a[0])])
"""y = a * x."""
mix_rows = _on_rows(2, 1, lambda b, x, a: [_times_plus(b, a[0], x[1 - i], x[i]) for i in range(2)])
"""y += a * x and x += a * y, at once."""
table_row = _on_rows(3, 1, lambda b, x, a: [_times_plus(b, a[0], x[2], x[1])])
"""y = one + a * two."""
read_two_rows = _on_rows(3, 1, lambda b, x, a: [b.fdiv(b.fadd(x[1], x[2]), a[0])])
"""y = (one + two) / a."""


@emitted("aiaiiif")
def add_signed_row(
    builder: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any, code: Any, number: Any
) -> None:
    """y += number * h * x, where h is ±1 as the bits of a code."""
    wide = splat(builder, number)

    def signed(index: Any, kind: Any, mask: Any, term: Any) -> Any:
        bits = builder.bitcast(builder.trunc(builder.lshr(code, index), kind), mask)
        return builder.select(bits, term, builder.fneg(term))

    def vector(index: Any) -> None:
        term = builder.fmul(wide, load(builder, x, builder.add(x0, index)))
        term = signed(index, ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES), term)
        place = builder.add(y0, index)
        store(builder, builder.fadd(load(builder, y, place), term), y, place)

    def single(index: Any) -> None:
        term = builder.fmul(number, builder.load(builder.gep(x, [builder.add(x0, index)])))
        place = builder.gep(y, [builder.add(y0, index)])
        bit = ir.IntType(1)
        builder.store(builder.fadd(builder.load(place), signed(index, bit, bit, term)), place)

    along(builder, length, vector, single)


def _read_rows(divided: bool) -> Any:
    @emitted("aiaaiif")
    def read(builder: Any, y: Any, y0: Any, table: Any, rows: Any, count: Any, length: Any, by: Any) -> None:
        wide = splat(builder, by)

        def summed(zero: Any, by: Any, value_at: Emit) -> Any:
            sums = cgutils.alloca_once(builder, zero.type)
            builder.store(zero, sums)
            with steps(builder, integer(0), count, 1) as which:
                value = value_at(builder.load(builder.gep(rows, [which])))
                builder.store(builder.fadd(builder.load(sums), value), sums)
            total = builder.load(sums)
            return builder.fdiv(total, by) if divided else total

        def vector(index: Any) -> None:
            total = summed(ZERO, wide, lambda row: load(builder, table, builder.add(row, index)))
            store(builder, total, y, builder.add(y0, index))

        def single(index: Any) -> None:
            zero = ir.Constant(F32, 0.0)
            total = summed(zero, by, lambda row: builder.load(builder.gep(table, [builder.add(row, index)])))
            builder.store(total, builder.gep(y, [builder.add(y0, index)]))

        along(builder, length, vector, single)

    return read


read_rows = _read_rows(divided=True)
"""y = the sum of `count` rows of a table, at the offsets in `rows`, divided by a number."""
sum_rows = _read_rows(divided=False)
"""The same without the division."""
