"""What the kernels of integer attention do with rows of whole numbers, in vectors of 16.

A row is an array and the offset of its first number, as in `rows.py`. Buckets, tables and sums are int32,
mixed rows are int64, values and outputs int8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecoformer.backends.cpu.compiler import cgutils, inlined, int64, ir, types
from ecoformer.backends.cpu.vectors import I32, I64, LANES, along, emitted, integer, steps

I8 = ir.IntType(8)
_LARGEST = 127
_LANES_OF_CODES = 8
"""Codes have 8 bits or more, in most cases a multiple of 8."""


class _Lanes:
    """Code for vectors, or for one number where a row ends."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes

    def kind(self, element: Any) -> Any:
        return element if self.lanes == 1 else ir.VectorType(element, self.lanes)

    def constant(self, element: Any, value: int) -> Any:
        return ir.Constant(self.kind(element), value if self.lanes == 1 else [value] * self.lanes)

    def splat(self, element: Any, value: Any) -> Any:
        """An int64 as numbers of another kind, the same in all lanes."""
        if element != I64:
            value = self.builder.trunc(value, element)
        if self.lanes == 1:
            return value
        nothing, zeros = ir.Constant(self.kind(element), ir.Undefined), _Lanes(self.builder, self.lanes)
        first = self.builder.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, nothing, zeros.constant(I32, 0))

    def _place(self, element: Any, pointer: Any, offset: Any) -> Any:
        place = self.builder.gep(pointer, [offset])
        return self.builder.bitcast(place, self.kind(element).as_pointer())

    def load(self, element: Any, pointer: Any, *offsets: Any) -> Any:
        place = self._place(element, pointer, self.total(*offsets))
        return self.builder.load(place, align=element.width // 8)

    def store(self, element: Any, value: Any, pointer: Any, *offsets: Any) -> None:
        place = self._place(element, pointer, self.total(*offsets))
        self.builder.store(value, place, align=element.width // 8)

    def total(self, *numbers: Any) -> Any:
        found = numbers[0]
        for number in numbers[1:]:
            found = self.builder.add(found, number)
        return found

    def wider(self, value: Any, element: Any) -> Any:
        return self.builder.sext(value, self.kind(element))

    def chosen(self, relation: str, value: Any, bound: Any) -> Any:
        """The bound where the value has that relation to it, else the value."""
        return self.builder.select(self.builder.icmp_signed(relation, value, bound), bound, value)


def _along(builder: Any, length: Any, step: Callable[[_Lanes, Any], None]) -> None:
    vector, single = _Lanes(builder, LANES), _Lanes(builder, 1)
    along(builder, length, lambda index: step(vector, index), lambda index: step(single, index))


def _add_value(buckets: int) -> Any:
    @emitted("a" + "i" * buckets + "aiii")
    def add(builder: Any, memory: Any, *arguments: Any) -> None:
        *places, v, v0, length, shift = arguments

        def step(to: _Lanes, index: Any) -> None:
            value = to.wider(to.load(I8, v, v0, index), I32)
            value = builder.shl(value, to.splat(I32, shift))
            for place in places:
                total = builder.add(to.load(I32, memory, place, index), value)
                to.store(I32, total, memory, place, index)

        _along(builder, length, step)

    return add


add_value = _add_value(1)
"""y += v << shift, where v is int8."""
add_value_twice = _add_value(2)
"""y += v << shift and z += v << shift, for different rows y and z."""


@emitted("aii")
def clear_words(builder: Any, y: Any, y0: Any, length: Any) -> None:
    """y = 0."""
    cgutils.memset(builder, builder.gep(y, [y0]), builder.mul(length, integer(4)), 0)


@emitted("aiaii")
def copy_words(builder: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any) -> None:
    """y = x."""
    cgutils.raw_memcpy(builder, builder.gep(y, [y0]), builder.gep(x, [x0]), length, 4)


@emitted("aii")
def add_to_word(builder: Any, memory: Any, index: Any, number: Any) -> None:
    """Add to a single number."""
    to = _Lanes(builder, 1)
    total = builder.add(to.load(I32, memory, index), builder.trunc(number, I32))
    to.store(I32, total, memory, index)


@emitted("ai", types.int64)
def wide_at(builder: Any, exact: Any, index: Any) -> Any:
    """A single int64. An index that cannot be negative takes fewer steps than numba's."""
    return _Lanes(builder, 1).load(I64, exact, index)


@emitted("aiaiiii")
def add_rows(
    builder: Any, y: Any, y0: Any, x: Any, x0: Any, count: Any, stride: Any, length: Any
) -> None:
    """y += the sum of `count` rows of x."""

    def step(to: _Lanes, index: Any) -> None:
        sums = cgutils.alloca_once(builder, to.kind(I32))
        builder.store(to.load(I32, y, y0, index), sums)
        with steps(builder, integer(0), count, 1) as which:
            row = to.load(I32, x, x0, index, builder.mul(which, stride))
            builder.store(builder.add(builder.load(sums), row), sums)
        to.store(I32, builder.load(sums), y, y0, index)

    _along(builder, length, step)


@inlined
def add_words(y: Any, y0: int, x: Any, x0: int, length: int) -> None:
    """y += x."""
    add_rows(y, y0, x, x0, int64(1), int64(0), length)


@emitted("aiiii")
def sum_words(builder: Any, memory: Any, y0: Any, a0: Any, b0: Any, length: Any) -> None:
    """y = a + b."""

    def step(to: _Lanes, index: Any) -> None:
        total = builder.add(to.load(I32, memory, a0, index), to.load(I32, memory, b0, index))
        to.store(I32, total, memory, y0, index)

    _along(builder, length, step)


@emitted("aiaiiaiii", types.int64)
def weigh_planes(
    builder: Any, y: Any, y0: Any, x: Any, x0: Any, stride: Any, levels: Any, l0: Any, count: Any, length: Any
) -> Any:
    """y = the sum of level * row over `count` rows of x, and all bits that the sums' sizes have."""
    bits = {lanes: cgutils.alloca_once(builder, _Lanes(builder, lanes).kind(I64)) for lanes in (LANES, 1)}
    for lanes, place in bits.items():
        builder.store(_Lanes(builder, lanes).constant(I64, 0), place)

    def step(to: _Lanes, index: Any) -> None:
        sums = cgutils.alloca_once(builder, to.kind(I64))
        builder.store(to.constant(I64, 0), sums)
        with steps(builder, integer(0), count, 1) as d:
            level = builder.sext(_Lanes(builder, 1).load(I32, levels, l0, d), I64)
            row = to.wider(to.load(I32, x, x0, index, builder.mul(d, stride)), I64)
            term = builder.mul(row, to.wider(to.splat(I32, level), I64))
            builder.store(builder.add(builder.load(sums), term), sums)
        total = builder.load(sums)
        to.store(I64, total, y, y0, index)
        minus = builder.sub(to.constant(I64, 0), total)
        size = to.chosen("<", total, minus)
        builder.store(builder.or_(builder.load(bits[to.lanes]), size), bits[to.lanes])

    _along(builder, length, step)
    kind = ir.FunctionType(I64, [ir.VectorType(I64, LANES)])
    joined = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.or.v{LANES}i64")
    return builder.or_(builder.call(joined, [builder.load(bits[LANES])]), builder.load(bits[1]))


@emitted("aiaiii")
def narrow_row(builder: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any, by: Any) -> None:
    """y = x / 2^by, rounded to the nearest, halves upwards: int64 to int32."""
    half = builder.lshr(builder.shl(integer(1), by), integer(1))

    def step(to: _Lanes, index: Any) -> None:
        total = builder.add(to.load(I64, x, x0, index), to.splat(I64, half))
        total = builder.ashr(total, to.splat(I64, by))
        to.store(I32, builder.trunc(total, to.kind(I32)), y, y0, index)

    _along(builder, length, step)


def _read(rows: int) -> Any:
    """`rows`: how many rows are read; 0 for as many as an array says."""

    @emitted("aia" + ("i" * rows or "ai") + "iiii")
    def read(builder: Any, out: Any, out0: Any, table: Any, *arguments: Any) -> None:
        *places, length, drop, factor, shift = arguments
        # Two shifts: what is added to round does not fit in 32 bits together with the largest numbers.
        once = builder.select(builder.icmp_signed(">", drop, integer(0)), integer(1), integer(0))
        first, half = builder.sub(drop, once), builder.shl(integer(1), builder.sub(shift, integer(1)))

        def summed(to: _Lanes, index: Any) -> Any:
            if rows:
                return to.total(*(to.load(I32, table, place, index) for place in places))
            sums = cgutils.alloca_once(builder, to.kind(I32))
            builder.store(to.constant(I32, 0), sums)
            with steps(builder, integer(0), places[1], 1) as which:
                place = builder.load(builder.gep(places[0], [which]))
                builder.store(builder.add(builder.load(sums), to.load(I32, table, place, index)), sums)
            return builder.load(sums)

        def step(to: _Lanes, index: Any) -> None:
            part = builder.ashr(summed(to, index), to.splat(I32, first))
            part = builder.ashr(builder.add(part, to.splat(I32, once)), to.splat(I32, once))
            product = builder.add(builder.mul(part, to.splat(I32, factor)), to.splat(I32, half))
            found = builder.ashr(product, to.splat(I32, shift))
            found = to.chosen(
                ">", to.chosen("<", found, to.constant(I32, -_LARGEST)), to.constant(I32, _LARGEST)
            )
            to.store(I8, builder.trunc(found, to.kind(I8)), out, out0, index)

        _along(builder, length, step)

    return read


read_rows = _read(0)
"""Outputs: the sum of `count` rows at the offsets in an array, / 2^drop, * factor, / 2^shift, as int8."""
read_two_rows = _read(2)
"""The same for two rows."""


@emitted("aii", types.int64)
def code_at(builder: Any, codes: Any, index: Any, size: Any) -> Any:
    """Number `index` of packed codes of `size` bytes; a single byte has no sign."""
    end = builder.append_basic_block("code.end")
    blocks = {width: builder.append_basic_block(f"code.{width}") for width in (1, 2, 4, 8)}
    choice = builder.switch(size, blocks[8])
    found = []
    for width, block in blocks.items():
        if width < 8:
            choice.add_case(integer(width), block)
        builder.position_at_end(block)
        kind = ir.IntType(8 * width)
        pointer = builder.bitcast(codes, kind.as_pointer())
        number = builder.load(builder.gep(pointer, [index]), align=width)
        found.append(number if width == 8 else (builder.zext if width == 1 else builder.sext)(number, I64))
        builder.branch(end)
    builder.position_at_end(end)
    code = builder.phi(I64)
    for number, block in zip(found, blocks.values(), strict=True):
        code.add_incoming(number, block)
    return code


@emitted("aiii")
def store_code(builder: Any, codes: Any, index: Any, size: Any, code: Any) -> None:
    """The inverse of `code_at`."""
    with_size = builder.append_basic_block("store.end")
    blocks = {width: builder.append_basic_block(f"store.{width}") for width in (1, 2, 4, 8)}
    choice = builder.switch(size, blocks[8])
    for width, block in blocks.items():
        if width < 8:
            choice.add_case(integer(width), block)
        builder.position_at_end(block)
        kind = ir.IntType(8 * width)
        pointer = builder.bitcast(codes, kind.as_pointer())
        number = code if width == 8 else builder.trunc(code, kind)
        builder.store(number, builder.gep(pointer, [index]), align=width)
        builder.branch(with_size)
    builder.position_at_end(with_size)


@emitted("aiaii", types.int64)
def reached(builder: Any, x: Any, x0: Any, least: Any, l0: Any, count: Any) -> Any:
    """Bit r says whether number r of x is at least that of `least`."""
    code = cgutils.alloca_once(builder, I64)
    builder.store(integer(0), code)
    full = builder.and_(count, integer(-_LANES_OF_CODES))
    for lanes, start, stop in ((_LANES_OF_CODES, integer(0), full), (1, full, count)):
        to = _Lanes(builder, lanes)
        with steps(builder, start, stop, lanes) as r:
            flags = builder.icmp_signed(">=", to.load(I32, x, x0, r), to.load(I32, least, l0, r))
            bits = builder.zext(builder.bitcast(flags, ir.IntType(lanes)), I64)
            builder.store(builder.or_(builder.load(code), builder.shl(bits, r)), code)
    return builder.load(code)


@emitted("i", types.int64)
def bit_length(builder: Any, number: Any) -> Any:
    """How many bits a number of at least 0 has."""
    return builder.sub(integer(64), builder.ctlz(number, ir.Constant(ir.IntType(1), 0)))
