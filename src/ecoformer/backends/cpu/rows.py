"""What the kernels do with rows of fp32 numbers, in vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ecoformer.backends.cpu.compiler import cgutils, intrinsic, ir, types
from ecoformer.backends.cpu.vectors import (
    F32,
    FUSED,
    I32,
    LANES,
    VECTOR,
    ZERO,
    Emit,
    along,
    integer,
    load,
    pointer_of,
    splat,
    steps,
    store,
)

Step = Callable[[Any, Any, list[Any]], list[Any]]


def _rows(count: int, step: Step) -> Any:
    """An intrinsic's code: `step` on the numbers of `count` rows, what it returns written to the first ones.

    Arguments are (row, offset) `count` times, the rows' length, and fp32 scalars.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [pointer_of(context, builder, signature, arguments, 2 * i) for i in range(count)]
        starts = [arguments[2 * i + 1] for i in range(count)]
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
        return context.get_dummy_value()

    return emit


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

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

    x = _chosen(builder, "<", x, _LOWEST)
    rounded = multiply_add(x, _like(x, _LOG2_E), _like(x, _ROUNDER))
    n = builder.fsub(rounded, _like(x, _ROUNDER))
    rest = multiply_add(n, _like(x, -_LN2_HIGH), x)
    rest = multiply_add(n, _like(x, -_LN2_LOW), rest)
    series = _like(x, 1 / 720)
    for factorial in (120, 24, 6, 2, 1, 1):
        series = multiply_add(series, rest, _like(x, 1 / factorial))
    integers = ir.VectorType(I32, LANES) if x.type == VECTOR else I32
    bias, places = (ir.Constant(integers, [c] * LANES if x.type == VECTOR else c) for c in (127, 23))
    power = builder.shl(builder.add(builder.bitcast(rounded, integers), bias), places)
    return builder.fmul(series, builder.bitcast(power, x.type))


def _kernel(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    product, offset, mean = rows
    scale, shift = scalars
    exponent = builder.fmul(product, scale, flags=FUSED)
    exponent = builder.fadd(exponent, builder.fadd(offset, shift), flags=FUSED)
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


@intrinsic
def inverse_lengths(typing: Any, y: Any, y0: Any, length: Any, scale: Any) -> Any:
    """y = scale / sqrt(y); zero where y is zero, NaN where it is infinite."""
    return types.void(y, types.int64, types.int64, types.float32), _rows(1, _inverse_lengths)


@intrinsic
def kernel_row(
    typing: Any,
    y: Any,
    y0: Any,
    offset: Any,
    offset0: Any,
    mean: Any,
    mean0: Any,
    length: Any,
    scale: Any,
    shift: Any,
) -> Any:
    """y = exp(min(scale y + offset + shift, 0)) - mean."""
    index, single = types.int64, types.float32
    signature = types.void(y, index, offset, index, mean, index, index, single, single)
    return signature, _rows(3, _kernel)


def _kernel_grad(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    grad, feature, mean = rows
    return [builder.fmul(builder.fmul(grad, scalars[0]), builder.fadd(feature, mean))]


def _passed(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    grad, y = rows[0], builder.fmul(rows[1], scalars[0])
    above, below = (builder.fcmp_ordered(sign, y, _like(y, one)) for sign, one in (("<=", 1.0), (">=", -1.0)))
    return [builder.select(builder.and_(above, below), builder.fmul(grad, scalars[0]), _like(grad, 0.0))]


def _combined(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    y, one, two = rows
    for row, number in ((one, scalars[0]), (two, scalars[1])):
        y = builder.fadd(y, builder.fmul(number, row, flags=FUSED), flags=FUSED)
    return [y]


def _blended(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    one = builder.fmul(scalars[0], rows[1])
    return [builder.fadd(one, builder.fmul(scalars[1], rows[2], flags=FUSED), flags=FUSED)]


def _of_two(step: Step) -> Any:
    """An intrinsic that makes a row of two others and two numbers."""

    @intrinsic
    def row(
        typing: Any, y: Any, y0: Any, one: Any, one0: Any, two: Any, two0: Any, length: Any, a: Any, b: Any
    ) -> Any:
        index, single = types.int64, types.float32
        return types.void(y, index, one, index, two, index, index, single, single), _rows(3, step)

    return row


combine_row = _of_two(_combined)
"""y += a * one + b * two."""
blend_row = _of_two(_blended)
"""y = a * one + b * two."""


@intrinsic
def add_row(typing: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any) -> Any:
    """y += x."""
    index = types.int64
    return types.void(y, index, x, index, index), _rows(2, lambda b, rows, _: [b.fadd(rows[0], rows[1])])


@intrinsic
def add_row_twice(
    typing: Any, y: Any, first: Any, second: Any, x: Any, x0: Any, length: Any, number: Any
) -> Any:
    """y += number * x, at two rows of y."""
    index = types.int64

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        py, px = (pointer_of(context, builder, signature, arguments, i) for i in (0, 3))
        _, first, second, _, x0, length, number = arguments
        wide = splat(builder, number)

        def added(total: Any, term: Any) -> Any:
            return builder.fadd(total, term, flags=FUSED)

        def vector(index: Any) -> None:
            term = builder.fmul(wide, load(builder, px, builder.add(x0, index)), flags=FUSED)
            for start in (first, second):
                place = builder.add(start, index)
                store(builder, added(load(builder, py, place), term), py, place)

        def single(index: Any) -> None:
            value = builder.load(builder.gep(px, [builder.add(x0, index)]))
            term = builder.fmul(number, value, flags=FUSED)
            for start in (first, second):
                place = builder.gep(py, [builder.add(start, index)])
                builder.store(added(builder.load(place), term), place)

        along(builder, length, vector, single)
        return context.get_dummy_value()

    return types.void(y, index, index, x, index, index, types.float32), emit


@intrinsic
def add_signed_row(typing: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any, code: Any, number: Any) -> Any:
    """y += number * h * x, where h is ±1 as the bits of a code."""
    index = types.int64

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        py, px = (pointer_of(context, builder, signature, arguments, i) for i in (0, 2))
        _, y0, _, x0, length, code, number = arguments
        wide = splat(builder, number)

        def signed(index: Any, kind: Any, mask: Any, term: Any) -> Any:
            bits = builder.bitcast(builder.trunc(builder.lshr(code, index), kind), mask)
            return builder.select(bits, term, builder.fneg(term))

        def vector(index: Any) -> None:
            term = builder.fmul(wide, load(builder, px, builder.add(x0, index)))
            term = signed(index, ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES), term)
            place = builder.add(y0, index)
            store(builder, builder.fadd(load(builder, py, place), term), py, place)

        def single(index: Any) -> None:
            term = builder.fmul(number, builder.load(builder.gep(px, [builder.add(x0, index)])))
            place = builder.gep(py, [builder.add(y0, index)])
            bit = ir.IntType(1)
            builder.store(builder.fadd(builder.load(place), signed(index, bit, bit, term)), place)

        along(builder, length, vector, single)
        return context.get_dummy_value()

    return types.void(y, index, x, index, index, index, types.float32), emit


def _carried(builder: Any, rows: list[Any], _: Any) -> list[Any]:
    earlier, recent = rows
    total = builder.fadd(earlier, recent)
    return [total, builder.fsub(recent, builder.fsub(total, earlier))]


@intrinsic
def carry_row(typing: Any, earlier: Any, earlier0: Any, recent: Any, recent0: Any, length: Any) -> Any:
    """earlier += recent, and in recent what rounding lost."""
    index = types.int64
    return types.void(earlier, index, recent, index, index), _rows(2, _carried)


def _folded(builder: Any, rows: list[Any], _: Any) -> list[Any]:
    total, low, high = rows
    return [builder.fadd(total, builder.fsub(high, low)), builder.fadd(low, high)]


@intrinsic
def fold_row(typing: Any, y: Any, y0: Any, low: Any, low0: Any, high: Any, high0: Any, length: Any) -> Any:
    """y += high - low, then low += high."""
    index = types.int64
    return types.void(y, index, low, index, high, index, index), _rows(3, _folded)


def _scaled(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    return [builder.fadd(rows[1], builder.fmul(scalars[0], rows[2], flags=FUSED), flags=FUSED)]


def _running(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    """The recent sum with the token's value, and the output with what was summed up."""
    recent, out, earlier, value = rows
    sign, weight = scalars
    recent = builder.fadd(recent, builder.fmul(sign, value, flags=FUSED), flags=FUSED)
    seen = builder.fadd(earlier, recent)
    return [recent, builder.fadd(out, builder.fmul(weight, seen, flags=FUSED), flags=FUSED)]


@intrinsic
def running_row(
    typing: Any,
    recent: Any,
    recent0: Any,
    out: Any,
    out0: Any,
    earlier: Any,
    earlier0: Any,
    value: Any,
    value0: Any,
    length: Any,
    sign: Any,
    weight: Any,
) -> Any:
    """recent += sign value, then out += weight (earlier + recent)."""
    index, single = types.int64, types.float32
    signature = types.void(recent, index, out, index, earlier, index, value, index, index, single, single)
    return signature, _rows(4, _running)


def _from_one(step: Step) -> Any:
    """An intrinsic that makes a row of another and a number."""

    @intrinsic
    def row(typing: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any, number: Any) -> Any:
        index = types.int64
        return types.void(y, index, x, index, index, types.float32), _rows(2, step)

    return row


pass_row = _from_one(_passed)
"""y = number * y where |number * x| <= 1, else 0."""
divide_row = _from_one(lambda b, rows, scalars: [b.fdiv(rows[1], scalars[0])])
"""y = x / number."""
scale_row = _from_one(lambda b, rows, scalars: [b.fmul(rows[1], scalars[0])])
"""y = number * x."""


def _mixed(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    one, two = rows
    return [
        builder.fadd(x, builder.fmul(scalars[0], y, flags=FUSED), flags=FUSED)
        for x, y in ((one, two), (two, one))
    ]


mix_rows = _from_one(_mixed)
"""y += number * x and x += number * y, at once."""


def _quotient(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    return [builder.fdiv(builder.fadd(rows[1], rows[2]), scalars[0])]


def _from_two(step: Step) -> Any:
    """An intrinsic that makes a row of two others and a number."""

    @intrinsic
    def row(
        typing: Any, y: Any, y0: Any, one: Any, one0: Any, two: Any, two0: Any, length: Any, number: Any
    ) -> Any:
        index = types.int64
        signature = types.void(y, index, one, index, two, index, index, types.float32)
        return signature, _rows(3, step)

    return row


kernel_grad_row = _from_two(_kernel_grad)
"""y *= number * (one + two)."""
table_row = _from_two(_scaled)
"""y = one + number * two."""
read_two_rows = _from_two(_quotient)
"""y = (one + two) / number."""


sum_two_rows = _from_two(lambda b, rows, _: [b.fadd(rows[1], rows[2])])
"""y = one + two."""


def _read_rows(divided: bool) -> Any:
    @intrinsic
    def rows_of_table(
        typing: Any, y: Any, y0: Any, table: Any, rows: Any, count: Any, length: Any, by: Any
    ) -> Any:
        """y = the sum of `count` rows of a table, at the offsets in `rows`, divided by a number or not."""
        index = types.int64

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            py, pt, pr = (pointer_of(context, builder, signature, arguments, i) for i in (0, 2, 3))
            _, y0, _, _, count, length, by = arguments
            wide = splat(builder, by)

            def summed(zero: Any, by: Any, value_at: Emit) -> Any:
                sums = cgutils.alloca_once(builder, zero.type)
                builder.store(zero, sums)
                with steps(builder, integer(0), count, 1) as which:
                    value = value_at(builder.load(builder.gep(pr, [which])))
                    builder.store(builder.fadd(builder.load(sums), value), sums)
                total = builder.load(sums)
                return builder.fdiv(total, by) if divided else total

            def vector(index: Any) -> None:
                total = summed(ZERO, wide, lambda row: load(builder, pt, builder.add(row, index)))
                store(builder, total, py, builder.add(y0, index))

            def single(index: Any) -> None:
                zero = ir.Constant(F32, 0.0)
                total = summed(zero, by, lambda row: builder.load(builder.gep(pt, [builder.add(row, index)])))
                builder.store(total, builder.gep(py, [builder.add(y0, index)]))

            along(builder, length, vector, single)
            return context.get_dummy_value()

        return types.void(y, index, table, rows, index, index, types.float32), emit

    return rows_of_table


read_rows = _read_rows(divided=True)
sum_rows = _read_rows(divided=False)
