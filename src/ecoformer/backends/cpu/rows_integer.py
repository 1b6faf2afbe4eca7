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
_WIDTHS = (32, 16, 1)
"""Of vectors where most time is spent."""


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


@emitted("aaiiiiiaiii")
def add_values(builder: Any, memory: Any, lists: Any, *numbers: Any) -> None:
    """Add v << shift to its buckets, for `count` rows of int8 values.

    `places`, `tokens` and `shifts` are offsets of lists: where buckets are, `digits` for each token, which
    row of v it is, and its shift.
    """
    places, tokens, shifts, count, digits, v, v0, dv, length = numbers
    one = _Lanes(builder, 1)
    pair = builder.icmp_signed("==", digits, integer(2))
    with steps(builder, integer(0), count, 1) as i:
        start = one.total(v0, builder.mul(one.load(I64, lists, tokens, i), dv))
        shift = one.load(I64, lists, shifts, i)

        def add(*rows: Any, start: Any = start, shift: Any = shift) -> None:
            def step(to: _Lanes, index: Any) -> None:
                value = builder.shl(to.wider(to.load(I8, v, start, index), I32), to.splat(I32, shift))
                for row in rows:
                    to.store(I32, builder.add(to.load(I32, memory, row, index), value), memory, row, index)

            _along(builder, length, step, *_WIDTHS)

        first = builder.mul(i, digits)
        with builder.if_else(pair) as (two, many):
            with two:
                add(*(one.load(I64, lists, places, first, integer(g)) for g in range(2)))
            with many, steps(builder, integer(0), digits, 1) as g:
                add(one.load(I64, lists, places, first, g))


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


@emitted("aii")
def set_wide(builder: Any, exact: Any, index: Any, number: Any) -> None:
    """The same, to write."""
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


@emitted("aiiaaiiiiiii")
def read_rows(builder: Any, out: Any, out0: Any, dout: Any, table: Any, lists: Any, *numbers: Any) -> None:
    """`count` rows of outputs: the sum of `digits` rows, / 2^drop, * factor, / 2^shift, as int8.

    `places`, `factors` and `drops` are offsets of lists.
    """
    places, factors, drops, count, digits, length, shift = numbers
    one = _Lanes(builder, 1)
    half = builder.shl(integer(1), builder.sub(shift, integer(1)))
    pair = builder.icmp_signed("==", digits, integer(2))
    with steps(builder, integer(0), count, 1) as i:
        start, first = one.total(out0, builder.mul(i, dout)), builder.mul(i, digits)
        drop, factor = one.load(I64, lists, drops, i), one.load(I64, lists, factors, i)
        # Two shifts: what is added to round does not fit in 32 bits together with the largest numbers.
        last = builder.select(builder.icmp_signed(">", drop, integer(0)), integer(1), integer(0))
        drop = builder.sub(drop, last)

        by = drop, last, factor

        def finish(to: _Lanes, total: Any, index: Any, start: Any = start, by: Any = by) -> None:
            drop, last, factor = (to.splat(I32, number) for number in by)
            part = builder.ashr(builder.add(builder.ashr(total, drop), last), last)
            product = builder.add(builder.mul(part, factor), to.splat(I32, half))
            found = builder.ashr(product, to.splat(I32, shift))
            found = to.chosen("<", found, to.constant(I32, -_LARGEST))
            found = to.chosen(">", found, to.constant(I32, _LARGEST))
            to.store(I8, builder.trunc(found, to.kind(I8)), out, start, index)

        def summed(to: _Lanes, index: Any, first: Any = first, finish: Any = finish) -> None:
            sums = cgutils.alloca_once(builder, to.kind(I32))
            builder.store(to.constant(I32, 0), sums)
            with steps(builder, integer(0), digits, 1) as g:
                row = to.load(I32, table, one.load(I64, lists, places, first, g), index)
                builder.store(builder.add(builder.load(sums), row), sums)
            finish(to, builder.load(sums), index)

        with builder.if_else(pair) as (two, many):
            with two:
                rows = [one.load(I64, lists, places, first, integer(g)) for g in range(2)]

                def added(to: _Lanes, index: Any, rows: Any = rows, finish: Any = finish) -> None:
                    finish(to, to.total(*(to.load(I32, table, row, index) for row in rows)), index)

                _along(builder, length, added, *_WIDTHS)
            with many:
                _along(builder, length, summed)


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
