"""Vector instructions for the kernels, in LLVM's own language: 16 lanes of fp32, whatever the machine has.

Loops that numba vectorises by itself check at run time whether arrays overlap, and keep sums in memory; for
rows of 32 numbers that costs more than the work. Rows are named by an array and the offset of their first
number. Products and sums may be contracted to fused multiply-adds; nothing assumes that NaN is absent.
"""

from __future__ import annotations

import os
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

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
FUSED = ("contract",)
Emit = Callable[..., Any]


def integer(value: int) -> Any:
    """A constant."""
    return ir.Constant(I64, value)


def pointer_of(context: Any, builder: Any, signature: Any, arguments: Any, index: int) -> Any:
    """Where the numbers of an array lie that is argument `index`."""
    return context.make_array(signature.args[index])(context, builder, arguments[index]).data


def load(builder: Any, pointer: Any, offset: Any) -> Any:
    """16 numbers, wherever they begin."""
    return builder.load(builder.bitcast(builder.gep(pointer, [offset]), VECTOR.as_pointer()), align=4)


def store(builder: Any, value: Any, pointer: Any, offset: Any) -> None:
    """16 numbers to anywhere."""
    builder.store(value, builder.bitcast(builder.gep(pointer, [offset]), VECTOR.as_pointer()), align=4)


def splat(builder: Any, value: Any) -> Any:
    """16 times the same number."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, nothing, zeros)


@contextmanager
def steps(builder: Any, start: Any, stop: Any, step: int) -> Iterator[Any]:
    """A loop."""
    with cgutils.for_range_slice(builder, start, stop, integer(step)) as (index, _):
        yield index


def along(builder: Any, length: Any, vector: Emit, single: Emit) -> None:
    """Full vectors of a row first, then its last numbers one by one."""
    full = builder.and_(length, integer(-LANES))
    with steps(builder, integer(0), full, LANES) as index:
        vector(index)
    with steps(builder, full, length, 1) as index:
        single(index)


def _tile(rows: int, transposed: bool = False) -> Any:
    @intrinsic
    def product(
        typing: Any, x: Any, x0: Any, dx: Any, length: Any, w: Any, w0: Any, dw: Any, y: Any, y0: Any, dy: Any
    ) -> Any:
        """Rows of y = rows of x times 16 columns of w, sums over `length`; 0 is a start, d a stride.

        If `transposed`, columns of x take the place of rows, and the product is added to y.
        """
        index = types.int64
        signature = types.void(x, index, index, index, w, index, index, y, index, index)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            px, pw, py = (pointer_of(context, builder, signature, arguments, i) for i in (0, 4, 7))
            _, x0, dx, length, _, w0, dw, _, y0, dy = arguments
            across = integer(1) if transposed else dx
            starts = [builder.add(x0, builder.mul(across, integer(i))) for i in range(rows)]
            before = builder.basic_block
            head, body, end = (builder.append_basic_block(f"tile.{name}") for name in ("head", "body", "end"))
            builder.branch(head)
            builder.position_at_end(head)
            index = builder.phi(I64)
            index.add_incoming(integer(0), before)
            sums = [builder.phi(VECTOR) for _ in range(rows)]
            for one in sums:
                one.add_incoming(ZERO, before)
            builder.cbranch(builder.icmp_signed("<", index, length), body, end)
            builder.position_at_end(body)
            weights = load(builder, pw, builder.add(w0, builder.mul(index, dw)))
            along_x = builder.mul(index, dx) if transposed else index
            for one, start in zip(sums, starts, strict=True):
                factor = splat(builder, builder.load(builder.gep(px, [builder.add(start, along_x)])))
                term = builder.fmul(factor, weights, flags=FUSED)
                one.add_incoming(builder.fadd(one, term, flags=FUSED), body)
            index.add_incoming(builder.add(index, integer(1)), body)
            builder.branch(head)
            builder.position_at_end(end)
            for i, one in enumerate(sums):
                to = builder.add(y0, builder.mul(dy, integer(i)))
                total = builder.fadd(load(builder, py, to), one) if transposed else one
                store(builder, total, py, to)
            return context.get_dummy_value()

        return signature, emit

    return product


tile_product = _tile(TILE)
row_product = _tile(1)
tile_outer = _tile(TILE, transposed=True)
row_outer = _tile(1, transposed=True)


def _pointer_to(number: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.int64), emit

    return pointer


_float_pointer = _pointer_to(types.float32)
_double_pointer = _pointer_to(types.float64)
_integer_pointer = _pointer_to(types.int64)
_byte_pointer = _pointer_to(types.uint8)
_ANY_LENGTH = 1 << 40


@inlined
def floats(address: int) -> Any:
    """The fp32 numbers at an address; their number is not known."""
    return carray(_float_pointer(address), (_ANY_LENGTH,))


@inlined
def doubles(address: int) -> Any:
    """The fp64 numbers at an address."""
    return carray(_double_pointer(address), (_ANY_LENGTH,))


@inlined
def integers(address: int) -> Any:
    """The int64 numbers at an address."""
    return carray(_integer_pointer(address), (_ANY_LENGTH,))


@inlined
def octets(address: int) -> Any:
    """The bytes at an address."""
    return carray(_byte_pointer(address), (_ANY_LENGTH,))


@intrinsic
def claim(typing: Any, numbers: Any, index: Any) -> Any:
    """One of the integers, and to all other threads it is one more at once."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(pointer_of(context, builder, signature, arguments, 0), [arguments[1]])
        return builder.atomic_rmw("add", place, integer(1), "seq_cst")

    return types.int64(numbers, types.int64), emit


@intrinsic
def current(typing: Any, numbers: Any, index: Any) -> Any:
    """One of the integers that other threads `claim`, and with it all that they wrote before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(pointer_of(context, builder, signature, arguments, 0), [arguments[1]])
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(numbers, types.int64), emit


@intrinsic
def give_way(typing: Any) -> Any:
    """Let another thread have this core, where the system has a call for that."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if hasattr(os, "sched_yield"):
            kind = ir.FunctionType(I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def count_bits(typing: Any, number: Any) -> Any:
    """How many bits of an integer are 1."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), emit


@intrinsic
def sign_bits(typing: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is at least zero."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = load(builder, pointer_of(context, builder, signature, arguments, 0), arguments[1])
        mask = builder.bitcast(builder.fcmp_ordered(">=", values, ZERO), ir.IntType(LANES))
        return builder.zext(mask, I64)

    return types.int64(y, types.int64), emit


@intrinsic
def nan_bits(typing: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = load(builder, pointer_of(context, builder, signature, arguments, 0), arguments[1])
        mask = builder.bitcast(builder.fcmp_unordered("uno", values, values), ir.IntType(LANES))
        return builder.zext(mask, I64)

    return types.int64(y, types.int64), emit


def _halves(builder: Any, one: Any, two: Any, width: int, order: tuple[list[int], list[int]]) -> Any:
    """The sum of two choices among the numbers of two vectors."""
    lanes = ir.VectorType(I32, width)
    return builder.fadd(*(builder.shuffle_vector(one, two, ir.Constant(lanes, each)) for each in order))


def _narrowed(builder: Any, total: Any, to: int) -> Any:
    """A vector whose upper half is added to its lower half until it has `to` numbers."""
    width = LANES
    while width > to:
        width //= 2
        total = _halves(builder, total, total, width, (list(range(width)), list(range(width, 2 * width))))
    return total


@intrinsic
def square_sum(typing: Any, x: Any, x0: Any, length: Any) -> Any:
    """The sum of a row's squares."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px = pointer_of(context, builder, signature, arguments, 0)
        sums, rests = _products(builder, px, arguments[1], [(px, arguments[1])], arguments[2])
        return _total(builder, sums[0], rests[0])

    return types.float32(x, types.int64, types.int64), emit


@intrinsic
def dot(typing: Any, x: Any, x0: Any, y: Any, y0: Any, length: Any) -> Any:
    """The inner product of two rows."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px, py = (pointer_of(context, builder, signature, arguments, i) for i in (0, 2))
        sums, rests = _products(builder, px, arguments[1], [(py, arguments[3])], arguments[4])
        return _total(builder, sums[0], rests[0])

    return types.float32(x, types.int64, y, types.int64, types.int64), emit


def _products(
    builder: Any, px: Any, x0: Any, rows: list[tuple[Any, Any]], length: Any, minus: bool = False
) -> tuple[list[Any], list[Any]]:
    """Vectors, and numbers left over, whose sums are the inner products of x with rows.

    If `minus`, all rows but the first are subtracted from the first.
    """
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in rows]
    rests = [cgutils.alloca_once(builder, F32) for _ in rows]
    for one, rest in zip(sums, rests, strict=True):
        builder.store(ZERO, one)
        builder.store(ir.Constant(F32, 0.0), rest)

    def factors(values: list[Any]) -> list[Any]:
        return [values[0], *(builder.fsub(values[0], value) for value in values[1:])] if minus else values

    def vector(index: Any) -> None:
        value = load(builder, px, builder.add(x0, index))
        others = factors([load(builder, py, builder.add(y0, index)) for py, y0 in rows])
        for one, other in zip(sums, others, strict=True):
            term = builder.fmul(value, other, flags=FUSED)
            builder.store(builder.fadd(builder.load(one), term, flags=FUSED), one)

    def single(index: Any) -> None:
        value = builder.load(builder.gep(px, [builder.add(x0, index)]))
        others = factors([builder.load(builder.gep(py, [builder.add(y0, index)])) for py, y0 in rows])
        for rest, other in zip(rests, others, strict=True):
            builder.store(builder.fadd(builder.load(rest), builder.fmul(value, other)), rest)

    along(builder, length, vector, single)
    return [builder.load(one) for one in sums], [builder.load(rest) for rest in rests]


def _total(builder: Any, vector: Any, rest: Any) -> Any:
    """The sum of a vector's numbers and one more."""
    first = builder.extract_element(_narrowed(builder, vector, 1), ir.Constant(I32, 0))
    return builder.fadd(first, rest)


@intrinsic
def signed_sum(typing: Any, x: Any, x0: Any, length: Any, code: Any) -> Any:
    """The sum of h * x, where h is ±1 as the bits of a code, over a multiple of 16 numbers."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px = pointer_of(context, builder, signature, arguments, 0)
        _, x0, length, code = arguments
        sums = cgutils.alloca_once(builder, VECTOR)
        builder.store(ZERO, sums)
        with steps(builder, integer(0), length, LANES) as index:
            value = load(builder, px, builder.add(x0, index))
            bits = builder.trunc(builder.lshr(code, index), ir.IntType(LANES))
            mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
            term = builder.select(mask, value, builder.fneg(value))
            builder.store(builder.fadd(builder.load(sums), term), sums)
        return _total(builder, builder.load(sums), ir.Constant(F32, 0.0))

    return types.float32(x, types.int64, types.int64, types.int64), emit


@intrinsic
def dot_flips(
    typing: Any, x: Any, x0: Any, table: Any, t0: Any, dt: Any, value: Any, bits: Any, length: Any, to: Any
) -> Any:
    """The product of x with row `value` of a table of 2^bits rows with stride dt, which is returned.

    And h/2 times that product minus the one with the row whose bit r differs, where h is ±1 as bit r of
    `value`: for all bits, to `to` on in the table's memory. Up to three more numbers are written there.
    """
    index = types.int64

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px, pt = (pointer_of(context, builder, signature, arguments, i) for i in (0, 2))
        _, x0, _, t0, dt, value, bits, length, to = arguments
        found = cgutils.alloca_once(builder, F32)
        four = ir.VectorType(F32, 4)
        last = builder.sub(bits, integer(1))

        def row(number: Any) -> tuple[Any, Any]:
            return pt, builder.add(t0, builder.mul(number, dt))

        with steps(builder, integer(0), bits, 4) as first:
            flips = []
            for i in range(4):
                bit = builder.add(first, integer(i))
                bit = builder.select(builder.icmp_signed("<", bit, last), bit, last)
                flips.append(builder.xor(value, builder.shl(integer(1), bit)))
            rows = [row(each) for each in (value, *flips)]
            sums, rests = _products(builder, px, x0, rows, length, minus=True)
            builder.store(_total(builder, sums[0], rests[0]), found)
            a, b, c, d = (_narrowed(builder, one, 4) for one in sums[1:])
            pairs = [_halves(builder, x, y, 4, ([0, 1, 4, 5], [2, 3, 6, 7])) for x, y in ((a, b), (c, d))]
            total = _halves(builder, pairs[0], pairs[1], 4, ([0, 2, 4, 6], [1, 3, 5, 7]))
            rest = ir.Constant(four, ir.Undefined)
            for i, number in enumerate(rests[1:]):
                rest = builder.insert_element(rest, number, ir.Constant(I32, i))
            total = builder.fadd(total, rest)
            signs = builder.bitcast(
                builder.trunc(builder.lshr(value, first), ir.IntType(4)), ir.VectorType(ir.IntType(1), 4)
            )
            halves = [ir.Constant(four, [number] * 4) for number in (0.5, -0.5)]
            total = builder.fmul(total, builder.select(signs, *halves))
            place = builder.gep(pt, [builder.add(to, first)])
            builder.store(total, builder.bitcast(place, four.as_pointer()), align=4)
        return builder.load(found)

    return types.float32(x, index, table, index, index, index, index, index, index), emit
