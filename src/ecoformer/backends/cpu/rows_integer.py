"""What the kernels of integer attention do with rows of whole numbers, in vectors of 16.

A row is an array and the offset of its first number, as in `rows.py`. Buckets, tables and sums are int32,
mixed rows are int64, values and outputs int8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecoformer.backends.cpu.compiler import cgutils, inlined, int64, ir, types
from ecoformer.backends.cpu.vectors import I32, I64, LANES, emitted, integer, steps

I8 = ir.IntType(8)
_LARGEST = 127
_Step = Callable[[Any], None]


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


def _along(builder: Any, length: Any, step: Callable[[_Lanes, Any], None], *widths: int) -> None:
    """Full vectors of a row, the widest first, then its last numbers one by one."""
    done = integer(0)
    for lanes in widths or (LANES, 1):
        full = builder.and_(length, integer(-lanes))
        with steps(builder, done, full, lanes) as index:
            step(_Lanes(builder, lanes), index)
        done = full


def _each_digit(builder: Any, code: Any, digit: Any, digits: Any, two: bool, step: _Step) -> None:
    """Code for the rows that belong to a code's digits, of which there are two or any number."""

    def row(g: Any) -> Any:
        value = builder.lshr(code, builder.mul(g, digit))
        value = builder.and_(value, builder.sub(builder.shl(integer(1), digit), integer(1)))
        return builder.add(builder.shl(g, digit), value)

    if two:
        step(row(integer(0)))
        step(row(integer(1)))
    else:
        with steps(builder, integer(0), digits, 1) as g:
            step(row(g))


def _either(builder: Any, digits: Any, emit: Callable[[bool], None]) -> None:
    """Code for two digits, which most codes have, and for any number of them."""
    with builder.if_else(builder.icmp_signed("==", digits, integer(2))) as blocks:
        for two, block in zip((True, False), blocks, strict=True):
            with block:
                emit(two)


def _by_columns(builder: Any, length: Any, digits: Any, emit: Callable[[_Lanes, Any, bool], None]) -> None:
    """Code for some columns of all rows, then for the next ones: no loop inside the one over rows."""

    def step(to: _Lanes, index: Any) -> None:
        _either(builder, digits, lambda two: emit(to, index, two))

    _along(builder, length, step, 32, LANES, 1)


@emitted("aiiiii")
def add_counts(
    builder: Any, memory: Any, counts: Any, code: Any, digit: Any, digits: Any, weight: Any
) -> None:
    """Add a key's weight to the counts of its buckets."""
    one = _Lanes(builder, 1)
    weight = builder.trunc(weight, I32)

    def add(row: Any) -> None:
        one.store(I32, builder.add(one.load(I32, memory, counts, row), weight), memory, counts, row)

    _either(builder, digits, lambda two: _each_digit(builder, code, digit, digits, two, add))


@emitted("aiiii", types.int64)
def sum_tallies(builder: Any, exact: Any, below: Any, code: Any, digit: Any, digits: Any) -> Any:
    """What a query's code reads of the keys' weights."""
    total, one = cgutils.alloca_once_value(builder, integer(0)), _Lanes(builder, 1)

    def add(row: Any) -> None:
        builder.store(builder.add(builder.load(total), one.load(I64, exact, below, row)), total)

    _either(builder, digits, lambda two: _each_digit(builder, code, digit, digits, two, add))
    return builder.load(total)


@emitted("aiaiiiiiaiiii")
def add_values(builder: Any, memory: Any, buckets: Any, lists: Any, *numbers: Any) -> None:
    """Add weight * v to its buckets, for `count` rows of int8 values; `codes` and `weights` are lists."""
    codes, weights, count, digit, digits, v, v0, dv, length, wide = numbers
    one = _Lanes(builder, 1)

    def columns(to: _Lanes, index: Any, two: bool) -> None:
        with steps(builder, integer(0), count, 1) as i:
            weight = to.splat(I32, one.load(I64, lists, weights, i))
            value = builder.mul(to.wider(to.load(I8, v, v0, index, builder.mul(i, dv)), I32), weight)

            def add(row: Any) -> None:
                at = one.total(buckets, index, builder.mul(row, wide))
                to.store(I32, builder.add(to.load(I32, memory, at), value), memory, at)

            _each_digit(builder, one.load(I64, lists, codes, i), digit, digits, two, add)

    _by_columns(builder, length, digits, columns)


@emitted("aiaii")
def copy_words(builder: Any, y: Any, y0: Any, x: Any, x0: Any, length: Any) -> None:
    """y = x."""
    cgutils.raw_memcpy(builder, builder.gep(y, [y0]), builder.gep(x, [x0]), length, 4)


@emitted("aii")
def set_wide(builder: Any, exact: Any, index: Any, number: Any) -> None:
    """A single int64. An index that cannot be negative takes fewer steps than numba's."""
    _Lanes(builder, 1).store(I64, number, exact, index)


@emitted("aiaiiii")
def add_rows(builder: Any, y: Any, y0: Any, x: Any, x0: Any, count: Any, stride: Any, length: Any) -> None:
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


@emitted("aiiiii")
def sum_rows(builder: Any, memory: Any, y0: Any, x0: Any, count: Any, z0: Any, length: Any) -> None:
    """`count` rows of y = rows of x, which follow each other, + z."""

    def step(to: _Lanes, index: Any) -> None:
        more = to.load(I32, memory, z0, index)
        with cgutils.for_range_slice(builder, index, builder.mul(count, length), length) as (at, _):
            to.store(I32, builder.add(to.load(I32, memory, x0, at), more), memory, y0, at)

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


@emitted("aiiii")
def divide(builder: Any, lists: Any, bottoms: Any, drops: Any, narrow: Any, factor: Any) -> None:
    """Of 16 denominators the reciprocals, in their place, and how far numerators are shifted, at `drops`.

    See `reference.integer_division`. Dividends and divisors are below 2^46 and 2^24, so exact in fp64. A
    quotient a / b that is not whole is at least 1 / b below the next whole number; rounding adds at most
    a / b * 2^-53, which is less, so truncation finds the whole quotient.
    """
    to = _Lanes(builder, LANES)
    doubles, zero = ir.VectorType(ir.DoubleType(), LANES), to.constant(I64, 0)
    low, wide = to.splat(I64, builder.shl(integer(1), narrow)), to.splat(I64, narrow)
    bottom = to.chosen("<", to.load(I64, lists, bottoms), low)
    kind = ir.FunctionType(bottom.type, [bottom.type, ir.IntType(1)])
    leading = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctlz.v{LANES}i64")
    zeros = builder.call(leading, [bottom, ir.Constant(ir.IntType(1), 1)])
    length = builder.sub(to.constant(I64, 64), zeros)
    drop = to.chosen("<", builder.sub(builder.sub(length, wide), to.constant(I64, 8)), zero)
    short = to.chosen("<", builder.sub(length, to.constant(I64, 24)), zero)
    by = builder.sub(builder.add(builder.add(wide, drop), to.constant(I64, 8)), short)
    above = builder.sitofp(builder.shl(to.splat(I64, factor), by), doubles)
    below = builder.sitofp(builder.lshr(bottom, short), doubles)
    to.store(I64, builder.fptosi(builder.fdiv(above, below), bottom.type), lists, bottoms)
    to.store(I64, to.chosen(">", drop, to.constant(I64, 32)), lists, drops)  # beyond, numerators are 0


@emitted("aiiaiaiiiiiiiii")
def read_rows(
    builder: Any, out: Any, out0: Any, dout: Any, table: Any, t0: Any, lists: Any, *numbers: Any
) -> None:
    """`count` rows of outputs: the sum of a row for each digit, / 2^drop, * factor, / 2^shift, as int8.

    `codes`, `factors` and `drops` are lists.
    """
    codes, factors, drops, count, digit, digits, length, wide, shift = numbers
    one = _Lanes(builder, 1)
    half = builder.shl(integer(1), builder.sub(shift, integer(1)))

    def columns(to: _Lanes, index: Any, two: bool) -> None:
        sums = cgutils.alloca_once(builder, to.kind(I32))
        with steps(builder, integer(0), count, 1) as i:
            drop, factor = one.load(I64, lists, drops, i), one.load(I64, lists, factors, i)
            # Two shifts: what is added to round does not fit in 32 bits together with the largest numbers.
            last = builder.zext(builder.icmp_signed(">", drop, integer(0)), I64)
            drop, last = (to.splat(I32, by) for by in (builder.sub(drop, last), last))
            builder.store(to.constant(I32, 0), sums)

            def add(row: Any) -> None:
                found = to.load(I32, table, t0, index, builder.mul(row, wide))
                builder.store(builder.add(builder.load(sums), found), sums)

            _each_digit(builder, one.load(I64, lists, codes, i), digit, digits, two, add)
            part = builder.ashr(builder.add(builder.ashr(builder.load(sums), drop), last), last)
            product = builder.add(builder.mul(part, to.splat(I32, factor)), to.splat(I32, half))
            found = builder.ashr(product, to.splat(I32, shift))
            found = to.chosen("<", found, to.constant(I32, -_LARGEST))
            found = to.chosen(">", found, to.constant(I32, _LARGEST))
            to.store(I8, builder.trunc(found, to.kind(I8)), out, out0, index, builder.mul(i, dout))

    _by_columns(builder, length, digits, columns)


@emitted("ai", types.int64)
def octet_at(builder: Any, octets: Any, index: Any) -> Any:
    """A single int8."""
    return builder.sext(_Lanes(builder, 1).load(I8, octets, index), I64)


def _by_size(builder: Any, codes: Any, index: Any, size: Any, access: Callable[..., Any]) -> list[Any]:
    """Access to number `index` of codes of `size` bytes; what it gave for each size, and where."""
    blocks = {width: builder.append_basic_block(f"code.{width}") for width in (1, 2, 4, 8)}
    end, found = builder.append_basic_block("code.end"), []
    choice = builder.switch(size, blocks[8])
    for width, block in blocks.items():
        choice.add_case(integer(width), block)
        builder.position_at_end(block)
        kind = ir.IntType(8 * width)
        pointer = builder.bitcast(codes, kind.as_pointer())
        found.append((access(builder.gep(pointer, [index]), kind), block))
        builder.branch(end)
    builder.position_at_end(end)
    return found


@emitted("aii", types.int64)
def code_at(builder: Any, codes: Any, index: Any, size: Any) -> Any:
    """Number `index` of packed codes of `size` bytes; bits above are 0."""

    def read(place: Any, kind: Any) -> Any:
        number = builder.load(place)
        return number if kind == I64 else builder.zext(number, I64)

    found = _by_size(builder, codes, index, size, read)
    code = builder.phi(I64)
    for number, block in found:
        code.add_incoming(number, block)
    return code


@emitted("aiii")
def store_code(builder: Any, codes: Any, index: Any, size: Any, code: Any) -> None:
    """The inverse of `code_at`."""

    def write(place: Any, kind: Any) -> None:
        builder.store(code if kind == I64 else builder.trunc(code, kind), place)

    _by_size(builder, codes, index, size, write)


@emitted("aiaii", types.int64)
def reached(builder: Any, x: Any, x0: Any, least: Any, l0: Any, count: Any) -> Any:
    """Bit r says whether number r of x is at least that of `least`."""
    code = cgutils.alloca_once(builder, I64)
    builder.store(integer(0), code)

    def step(to: _Lanes, r: Any) -> None:
        flags = builder.icmp_signed(">=", to.load(I32, x, x0, r), to.load(I32, least, l0, r))
        bits = builder.zext(builder.bitcast(flags, ir.IntType(to.lanes)), I64)
        builder.store(builder.or_(builder.load(code), builder.shl(bits, r)), code)

    _along(builder, count, step, 16, 8, 1)
    return builder.load(code)


@emitted("i", types.int64)
def bit_length(builder: Any, number: Any) -> Any:
    """How many bits a number of at least 0 has."""
    return builder.sub(integer(64), builder.ctlz(number, ir.Constant(ir.IntType(1), 0)))
