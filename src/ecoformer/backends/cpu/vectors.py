"""Vector instructions for the kernels, in LLVM's own language: 16 lanes of fp32, whatever the machine has.

Loops that numba vectorises by itself check at run time whether arrays overlap, and keep sums in memory; for
rows of 32 numbers that costs more than the work. Rows are named by an array and the offset of their first
number. Products and sums may be contracted to fused multiply-adds; nothing assumes that NaN is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ecoformer.backends.cpu.compiler import (
    carray,
    cgutils,
    inlined,
    intrinsic,
    ir,
    types,
)

LANES = 16
TILE = 6
"""Tokens of a tile: its 6 x 16 sums and their factors fill the 16 registers of 8 lanes that most have."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_FUSED = ("contract",)
_Emit = Callable[..., Any]


def _integer(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, arguments[index]).data


def _load(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(pointer, [offset]), _VECTOR.as_pointer()), align=4)


def _store(builder: Any, value: Any, pointer: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(pointer, [offset]), _VECTOR.as_pointer()), align=4)


def _splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, nothing, zeros)


@contextmanager
def _steps(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, start, stop, _integer(step)) as (index, _):
        yield index


def _along(builder: Any, length: Any, vector: _Emit, single: _Emit) -> None:
    """Whole vectors of a row first, then its last numbers one by one."""
    whole = builder.and_(length, _integer(-LANES))
    with _steps(builder, _integer(0), whole, LANES) as index:
        vector(index)
    with _steps(builder, whole, length, 1) as index:
        single(index)


def _tile(rows: int) -> Any:
    @intrinsic
    def product(
        typing: Any, x: Any, x0: Any, dx: Any, length: Any, w: Any, w0: Any, dw: Any, y: Any, y0: Any, dy: Any
    ) -> Any:
        """Rows of y = rows of x times 16 columns of w, sums over `length`; 0 is a start, d a stride."""
        whole = types.int64
        signature = types.void(x, whole, whole, whole, w, whole, whole, y, whole, whole)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            px, pw, py = (_pointer(context, builder, signature, arguments, i) for i in (0, 4, 7))
            _, x0, dx, length, _, w0, dw, _, y0, dy = arguments
            starts = [builder.add(x0, builder.mul(dx, _integer(i))) for i in range(rows)]
            before = builder.basic_block
            head, body, end = (builder.append_basic_block(f"tile.{name}") for name in ("head", "body", "end"))
            builder.branch(head)
            builder.position_at_end(head)
            index = builder.phi(_I64)
            index.add_incoming(_integer(0), before)
            sums = [builder.phi(_VECTOR) for _ in range(rows)]
            for one in sums:
                one.add_incoming(_ZERO, before)
            builder.cbranch(builder.icmp_signed("<", index, length), body, end)
            builder.position_at_end(body)
            weights = _load(builder, pw, builder.add(w0, builder.mul(index, dw)))
            for one, start in zip(sums, starts, strict=True):
                factor = _splat(builder, builder.load(builder.gep(px, [builder.add(start, index)])))
                term = builder.fmul(factor, weights, flags=_FUSED)
                one.add_incoming(builder.fadd(one, term, flags=_FUSED), body)
            index.add_incoming(builder.add(index, _integer(1)), body)
            builder.branch(head)
            builder.position_at_end(end)
            for i, one in enumerate(sums):
                _store(builder, one, py, builder.add(y0, builder.mul(dy, _integer(i))))
            return context.get_dummy_value()

        return signature, emit

    return product


tile_product = _tile(TILE)
row_product = _tile(1)


def _pointer_to(number: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.int64), emit

    return pointer


_float_pointer = _pointer_to(types.float32)
_integer_pointer = _pointer_to(types.int64)
_byte_pointer = _pointer_to(types.uint8)
_ANY_LENGTH = 1 << 40


@inlined
def floats(address: int) -> Any:
    """The fp32 numbers at an address; their number is not known."""
    return carray(_float_pointer(address), (_ANY_LENGTH,))


@inlined
def integers(address: int) -> Any:
    """The int64 numbers at an address."""
    return carray(_integer_pointer(address), (_ANY_LENGTH,))


@inlined
def octets(address: int) -> Any:
    """The bytes at an address."""
    return carray(_byte_pointer(address), (_ANY_LENGTH,))


@intrinsic
def sign_bits(typing: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is at least zero."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, _pointer(context, builder, signature, arguments, 0), arguments[1])
        mask = builder.bitcast(builder.fcmp_ordered(">=", values, _ZERO), ir.IntType(LANES))
        return builder.zext(mask, _I64)

    return types.int64(y, types.int64), emit


@intrinsic
def nan_bits(typing: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, _pointer(context, builder, signature, arguments, 0), arguments[1])
        mask = builder.bitcast(builder.fcmp_unordered("uno", values, values), ir.IntType(LANES))
        return builder.zext(mask, _I64)

    return types.int64(y, types.int64), emit


@intrinsic
def square_sum(typing: Any, x: Any, x0: Any, length: Any) -> Any:
    """The sum of a row's squares."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px = _pointer(context, builder, signature, arguments, 0)
        _, x0, length = arguments
        sums = cgutils.alloca_once_value(builder, _ZERO)
        rest = cgutils.alloca_once_value(builder, ir.Constant(_F32, 0.0))
        builder.store(_ZERO, sums)
        builder.store(ir.Constant(_F32, 0.0), rest)

        def vector(index: Any) -> None:
            value = _load(builder, px, builder.add(x0, index))
            term = builder.fmul(value, value, flags=_FUSED)
            builder.store(builder.fadd(builder.load(sums), term, flags=_FUSED), sums)

        def single(index: Any) -> None:
            value = builder.load(builder.gep(px, [builder.add(x0, index)]))
            builder.store(builder.fadd(builder.load(rest), builder.fmul(value, value)), rest)

        _along(builder, length, vector, single)
        total, width = builder.load(sums), LANES
        while width > 1:
            width //= 2
            lanes = ir.VectorType(_I32, width)
            halves = [
                builder.shuffle_vector(total, total, ir.Constant(lanes, list(range(start, start + width))))
                for start in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.fadd(builder.extract_element(total, ir.Constant(_I32, 0)), builder.load(rest))

    return types.float32(x, types.int64, types.int64), emit


def _rows(count: int, step: Callable[[Any, Any, list[Any]], list[Any]]) -> Any:
    """An intrinsic's code: `step` on the numbers of `count` rows, what it returns written to the first ones.

    Arguments are (row, offset) `count` times, the rows' length, and fp32 scalars.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [_pointer(context, builder, signature, arguments, 2 * i) for i in range(count)]
        starts = [arguments[2 * i + 1] for i in range(count)]
        length, given = arguments[2 * count], list(arguments[2 * count + 1 :])
        wide = [_splat(builder, value) for value in given]

        def vector(index: Any) -> None:
            offsets = [builder.add(start, index) for start in starts]
            values = [_load(builder, p, o) for p, o in zip(pointers, offsets, strict=True)]
            for i, value in enumerate(step(builder, values, wide)):
                _store(builder, value, pointers[i], offsets[i])

        def single(index: Any) -> None:
            places = [
                builder.gep(p, [builder.add(start, index)]) for p, start in zip(pointers, starts, strict=True)
            ]
            for i, value in enumerate(step(builder, [builder.load(place) for place in places], given)):
                builder.store(value, places[i])

        _along(builder, length, vector, single)
        return context.get_dummy_value()

    return emit


_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts: the first has few bits, so that its multiples are exact."""
_ROUNDER = 12582912.0
"""1.5 * 2^23: what is added to it is rounded to a whole number, which then is in its last bits."""
_LOWEST = -87.0
"""Below, the result would have no full precision; it is 1e-38 there, nothing beside other features."""


def _like(value: Any, number: float) -> Any:
    """A constant of the type of a vector or a single number."""
    return ir.Constant(value.type, [number] * LANES if value.type == _VECTOR else number)


def _chosen(builder: Any, relation: str, x: Any, bound: float) -> Any:
    """The bound where x has that relation to it, else x, also where x is NaN."""
    edge = _like(x, bound)
    return builder.select(builder.fcmp_ordered(relation, x, edge), edge, x)


def _exponential(builder: Any, x: Any) -> Any:
    """e^x for x <= 0: 2^n for the nearest n, times a polynomial of what is left; NaN stays NaN."""

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    x = _chosen(builder, "<", x, _LOWEST)
    rounded = multiply_add(x, _like(x, _LOG2_E), _like(x, _ROUNDER))
    n = builder.fsub(rounded, _like(x, _ROUNDER))
    rest = multiply_add(n, _like(x, -_LN2_HIGH), x)
    rest = multiply_add(n, _like(x, -_LN2_LOW), rest)
    series = _like(x, 1 / 720)
    for factorial in (120, 24, 6, 2, 1, 1):
        series = multiply_add(series, rest, _like(x, 1 / factorial))
    whole = ir.VectorType(_I32, LANES) if x.type == _VECTOR else _I32
    bias, places = (ir.Constant(whole, [c] * LANES if x.type == _VECTOR else c) for c in (127, 23))
    power = builder.shl(builder.add(builder.bitcast(rounded, whole), bias), places)
    return builder.fmul(series, builder.bitcast(power, x.type))


def _kernel(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    product, offset, mean = rows
    scale, shift = scalars
    exponent = builder.fmul(product, scale, flags=_FUSED)
    exponent = builder.fadd(exponent, builder.fadd(offset, shift), flags=_FUSED)
    return [builder.fsub(_exponential(builder, _chosen(builder, ">", exponent, 0.0)), mean)]


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
    whole, single = types.int64, types.float32
    signature = types.void(y, whole, offset, whole, mean, whole, whole, single, single)
    return signature, _rows(3, _kernel)


@intrinsic
def add_row(typing: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any) -> Any:
    """y += x."""
    whole = types.int64
    return types.void(y, whole, x, whole, whole), _rows(2, lambda b, rows, _: [b.fadd(rows[0], rows[1])])


def _folded(builder: Any, rows: list[Any], _: Any) -> list[Any]:
    total, low, high = rows
    return [builder.fadd(total, builder.fsub(high, low)), builder.fadd(low, high)]


@intrinsic
def fold_row(typing: Any, y: Any, y0: Any, low: Any, low0: Any, high: Any, high0: Any, length: Any) -> Any:
    """y += high - low, then low += high."""
    whole = types.int64
    return types.void(y, whole, low, whole, high, whole, whole), _rows(3, _folded)


def _scaled(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    return [builder.fadd(rows[1], builder.fmul(scalars[0], rows[2], flags=_FUSED), flags=_FUSED)]


@intrinsic
def table_row(
    typing: Any, y: Any, y0: Any, base: Any, base0: Any, x: Any, x0: Any, length: Any, scale: Any
) -> Any:
    """y = base + scale x."""
    whole = types.int64
    signature = types.void(y, whole, base, whole, x, whole, whole, types.float32)
    return signature, _rows(3, _scaled)


def _running(builder: Any, rows: list[Any], scalars: list[Any]) -> list[Any]:
    """The recent sum with the token's value, and the output with what was summed up."""
    recent, out, earlier, value = rows
    sign, weight = scalars
    recent = builder.fadd(recent, builder.fmul(sign, value, flags=_FUSED), flags=_FUSED)
    seen = builder.fadd(earlier, recent)
    return [recent, builder.fadd(out, builder.fmul(weight, seen, flags=_FUSED), flags=_FUSED)]


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
    whole, single = types.int64, types.float32
    signature = types.void(recent, whole, out, whole, earlier, whole, value, whole, whole, single, single)
    return signature, _rows(4, _running)


@intrinsic
def divide_row(typing: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any, by: Any) -> Any:
    """y = x / by."""
    whole = types.int64
    signature = types.void(y, whole, x, whole, whole, types.float32)
    return signature, _rows(2, lambda b, rows, scalars: [b.fdiv(rows[1], scalars[0])])


@intrinsic
def read_rows(typing: Any, y: Any, y0: Any, table: Any, rows: Any, count: Any, length: Any, by: Any) -> Any:
    """y = the sum of `count` rows of a table, at the offsets in `rows`, divided by a number."""
    whole = types.int64
    signature = types.void(y, whole, table, rows, whole, whole, types.float32)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        py, pt, pr = (_pointer(context, builder, signature, arguments, i) for i in (0, 2, 3))
        _, y0, _, _, count, length, by = arguments
        wide = _splat(builder, by)

        def summed(zero: Any, value_at: _Emit) -> Any:
            sums = cgutils.alloca_once(builder, zero.type)
            builder.store(zero, sums)
            with _steps(builder, _integer(0), count, 1) as which:
                value = value_at(builder.load(builder.gep(pr, [which])))
                builder.store(builder.fadd(builder.load(sums), value), sums)
            return builder.load(sums)

        def vector(index: Any) -> None:
            total = summed(_ZERO, lambda row: _load(builder, pt, builder.add(row, index)))
            _store(builder, builder.fdiv(total, wide), py, builder.add(y0, index))

        def single(index: Any) -> None:
            zero = ir.Constant(_F32, 0.0)
            total = summed(zero, lambda row: builder.load(builder.gep(pt, [builder.add(row, index)])))
            builder.store(builder.fdiv(total, by), builder.gep(py, [builder.add(y0, index)]))

        _along(builder, length, vector, single)
        return context.get_dummy_value()

    return signature, emit
