"""Vector instructions for the kernels, in LLVM's own language: 16 lanes of fp32, whatever the machine has.

Loops that numba vectorises by itself check at run time whether arrays overlap, and keep sums in memory; for
rows of 32 numbers that costs more than the work. Rows are named by an array and the offset of their first
number. Products and sums may be contracted to fused multiply-adds; nothing assumes that NaN is absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from ecoformer.backends.cpu import problem
from ecoformer.backends.cpu.compiler import carray, cgutils, inlined, intrinsic, ir, types

LANES = 16
TILE = 6
"""Tokens of a tile: its 6 x 16 sums and their factors fill the 16 registers of 8 lanes that most have."""

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
FUSED = ("contract",)
padded, digits, state_rows = inlined(problem.padded), inlined(problem.digits), inlined(problem.state_rows)
"""For kernels."""
Emit = Callable[..., Any]
_KINDS = {"i": types.int64, "f": types.float32}


def emitted(kinds: str, returns: Any = types.void) -> Callable[[Emit], Any]:
    """Decorator: make an intrinsic of a function that writes its code.

    Args:
        kinds: of the arguments, one letter each: "a" for an array, whose address the function gets, "i" for
            an int64, "f" for an fp32 number.
        returns: numba's type of the result.
    """

    def decorate(emit: Emit) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = [
                context.make_array(kind)(context, builder, x).data if letter == "a" else x
                for letter, kind, x in zip(kinds, signature.args, arguments, strict=True)
            ]
            found = emit(builder, *values)
            return context.get_dummy_value() if found is None else found

        def typed(_: Any, *given: Any) -> Any:
            return returns(
                *(_KINDS.get(letter, kind) for letter, kind in zip(kinds, given, strict=True))
            ), code

        names = ["context", *(f"{letter}{i}" for i, letter in enumerate(kinds))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


def integer(value: int) -> Any:
    """A constant."""
    return ir.Constant(I64, value)


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
    """Rows of y = rows of x times 16 columns of w, sums over `length`; 0 is a start, d a stride.

    If `transposed`, columns of x take the place of rows, and the product is added to y.
    """

    @emitted("aiiiaiiaii")
    def product(
        builder: Any,
        x: Any,
        x0: Any,
        dx: Any,
        length: Any,
        w: Any,
        w0: Any,
        dw: Any,
        y: Any,
        y0: Any,
        dy: Any,
    ) -> None:
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
        weights = load(builder, w, builder.add(w0, builder.mul(index, dw)))
        along_x = builder.mul(index, dx) if transposed else index
        for one, start in zip(sums, starts, strict=True):
            factor = splat(builder, builder.load(builder.gep(x, [builder.add(start, along_x)])))
            term = builder.fmul(factor, weights, flags=FUSED)
            one.add_incoming(builder.fadd(one, term, flags=FUSED), body)
        index.add_incoming(builder.add(index, integer(1)), body)
        builder.branch(head)
        builder.position_at_end(end)
        for i, one in enumerate(sums):
            to = builder.add(y0, builder.mul(dy, integer(i)))
            total = builder.fadd(load(builder, y, to), one) if transposed else one
            store(builder, total, y, to)

    return product


tile_product = _tile(TILE)
row_product = _tile(1)
tile_outer = _tile(TILE, transposed=True)
row_outer = _tile(1, transposed=True)


def _numbers(kind: Any) -> Any:
    """A function that makes an array, of unknown length, of the numbers at an address."""
    pointer_type, many = types.CPointer(kind), 1 << 40
    llvm = {types.float32: F32, types.float64: ir.DoubleType()}
    llvm |= {types.int32: I32, types.int64: I64, types.uint8: ir.IntType(8), types.int8: ir.IntType(8)}

    @emitted("i", pointer_type)
    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, llvm[kind].as_pointer())

    @inlined
    def numbers(address: int) -> Any:
        return carray(pointer(address), (many,))

    return numbers


floats = _numbers(types.float32)
doubles = _numbers(types.float64)
words = _numbers(types.int32)
integers = _numbers(types.int64)
signed_octets = _numbers(types.int8)
octets = _numbers(types.uint8)


@emitted("ai", types.int64)
def claim(builder: Any, numbers: Any, index: Any) -> Any:
    """One of the integers, and to all other threads it is one more at once."""
    return builder.atomic_rmw("add", builder.gep(numbers, [index]), integer(1), "seq_cst")


@emitted("ai", types.int64)
def current(builder: Any, numbers: Any, index: Any) -> Any:
    """One of the integers that other threads `claim`, and with it all that they wrote before."""
    return builder.load_atomic(builder.gep(numbers, [index]), "acquire", 8)


@emitted("")
def give_way(builder: Any) -> None:
    """Let another thread have this core, where the system has a call for that."""
    if hasattr(os, "sched_yield"):
        kind = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


@emitted("i", types.int64)
def count_bits(builder: Any, number: Any) -> Any:
    """How many bits of an integer are 1."""
    return builder.ctpop(number)


@emitted("ai", types.int64)
def sign_bits(builder: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is at least zero."""
    mask = builder.fcmp_ordered(">=", load(builder, y, y0), ZERO)
    return builder.zext(builder.bitcast(mask, ir.IntType(LANES)), I64)


@emitted("ai", types.int64)
def nan_bits(builder: Any, y: Any, y0: Any) -> Any:
    """Bit r says whether number r of 16 is NaN."""
    values = load(builder, y, y0)
    mask = builder.fcmp_unordered("uno", values, values)
    return builder.zext(builder.bitcast(mask, ir.IntType(LANES)), I64)


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


@emitted("aii", types.float32)
def square_sum(builder: Any, x: Any, x0: Any, length: Any) -> Any:
    """The sum of a row's squares."""
    sums, rests = _products(builder, x, x0, [(x, x0)], length)
    return _total(builder, sums[0], rests[0])


@emitted("aiaii", types.float32)
def dot(builder: Any, x: Any, x0: Any, y: Any, y0: Any, length: Any) -> Any:
    """The inner product of two rows."""
    sums, rests = _products(builder, x, x0, [(y, y0)], length)
    return _total(builder, sums[0], rests[0])


@emitted("aiii", types.float32)
def signed_sum(builder: Any, x: Any, x0: Any, length: Any, code: Any) -> Any:
    """The sum of h * x, where h is ±1 as the bits of a code, over a multiple of 16 numbers."""
    sums = cgutils.alloca_once(builder, VECTOR)
    builder.store(ZERO, sums)
    with steps(builder, integer(0), length, LANES) as index:
        value = load(builder, x, builder.add(x0, index))
        bits = builder.trunc(builder.lshr(code, index), ir.IntType(LANES))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        term = builder.select(mask, value, builder.fneg(value))
        builder.store(builder.fadd(builder.load(sums), term), sums)
    return _total(builder, builder.load(sums), ir.Constant(F32, 0.0))


@emitted("aiaiiiiii", types.float32)
def dot_flips(
    builder: Any, x: Any, x0: Any, table: Any, t0: Any, dt: Any, value: Any, bits: Any, length: Any, to: Any
) -> Any:
    """The product of x with row `value` of a table of 2^bits rows with stride dt, which is returned.

    And h/2 times that product minus the one with the row whose bit r differs, where h is ±1 as bit r of
    `value`: for all bits, to `to` on in the table's memory. Up to three more numbers are written there.
    """
    found = cgutils.alloca_once(builder, F32)
    four = ir.VectorType(F32, 4)
    last = builder.sub(bits, integer(1))
    with steps(builder, integer(0), bits, 4) as first:
        flips = []
        for i in range(4):
            bit = builder.add(first, integer(i))
            bit = builder.select(builder.icmp_signed("<", bit, last), bit, last)
            flips.append(builder.xor(value, builder.shl(integer(1), bit)))
        rows = [(table, builder.add(t0, builder.mul(number, dt))) for number in (value, *flips)]
        sums, rests = _products(builder, x, x0, rows, length, minus=True)
        builder.store(_total(builder, sums[0], rests[0]), found)
        a, b, c, d = (_narrowed(builder, one, 4) for one in sums[1:])
        pairs = [_halves(builder, one, two, 4, ([0, 1, 4, 5], [2, 3, 6, 7])) for one, two in ((a, b), (c, d))]
        total = _halves(builder, pairs[0], pairs[1], 4, ([0, 2, 4, 6], [1, 3, 5, 7]))
        rest = ir.Constant(four, ir.Undefined)
        for i, number in enumerate(rests[1:]):
            rest = builder.insert_element(rest, number, ir.Constant(I32, i))
        total = builder.fadd(total, rest)
        signs = builder.trunc(builder.lshr(value, first), ir.IntType(4))
        signs = builder.bitcast(signs, ir.VectorType(ir.IntType(1), 4))
        halves = [ir.Constant(four, [number] * 4) for number in (0.5, -0.5)]
        total = builder.fmul(total, builder.select(signs, *halves))
        place = builder.gep(table, [builder.add(to, first)])
        builder.store(total, builder.bitcast(place, four.as_pointer()), align=4)
    return builder.load(found)
