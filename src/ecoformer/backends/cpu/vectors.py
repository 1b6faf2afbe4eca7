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
    """Whole vectors of a row first, then its last numbers one by one."""
    whole = builder.and_(length, integer(-LANES))
    with steps(builder, integer(0), whole, LANES) as index:
        vector(index)
    with steps(builder, whole, length, 1) as index:
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
            px, pw, py = (pointer_of(context, builder, signature, arguments, i) for i in (0, 4, 7))
            _, x0, dx, length, _, w0, dw, _, y0, dy = arguments
            starts = [builder.add(x0, builder.mul(dx, integer(i))) for i in range(rows)]
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
            for one, start in zip(sums, starts, strict=True):
                factor = splat(builder, builder.load(builder.gep(px, [builder.add(start, index)])))
                term = builder.fmul(factor, weights, flags=FUSED)
                one.add_incoming(builder.fadd(one, term, flags=FUSED), body)
            index.add_incoming(builder.add(index, integer(1)), body)
            builder.branch(head)
            builder.position_at_end(end)
            for i, one in enumerate(sums):
                store(builder, one, py, builder.add(y0, builder.mul(dy, integer(i))))
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


@intrinsic
def square_sum(typing: Any, x: Any, x0: Any, length: Any) -> Any:
    """The sum of a row's squares."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        px = pointer_of(context, builder, signature, arguments, 0)
        _, x0, length = arguments
        sums = cgutils.alloca_once_value(builder, ZERO)
        rest = cgutils.alloca_once_value(builder, ir.Constant(F32, 0.0))
        builder.store(ZERO, sums)
        builder.store(ir.Constant(F32, 0.0), rest)

        def vector(index: Any) -> None:
            value = load(builder, px, builder.add(x0, index))
            term = builder.fmul(value, value, flags=FUSED)
            builder.store(builder.fadd(builder.load(sums), term, flags=FUSED), sums)

        def single(index: Any) -> None:
            value = builder.load(builder.gep(px, [builder.add(x0, index)]))
            builder.store(builder.fadd(builder.load(rest), builder.fmul(value, value)), rest)

        along(builder, length, vector, single)
        total, width = builder.load(sums), LANES
        while width > 1:
            width //= 2
            lanes = ir.VectorType(I32, width)
            halves = [
                builder.shuffle_vector(total, total, ir.Constant(lanes, list(range(start, start + width))))
                for start in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.fadd(builder.extract_element(total, ir.Constant(I32, 0)), builder.load(rest))

    return types.float32(x, types.int64, types.int64), emit
