# mypy: ignore-errors
"""The state of a head in memory, and sums over many states.

Without groups of bits a state is (F + 1) x (E + 1) numbers as in `eager.py`: sums of f v^T with those of f in
the last column, and the sum of v and the number of keys in the last row. With groups it is the sums of f v^T
(F, E), then those of f (F,). States begin at multiples of four numbers, which are loaded at once. (Without
groups rows of a whole number of cache lines made `gather_grad` 40 % slower on an H200.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import launched


def state_numbers(grouped: bool, features: int, channels: int) -> int:
    """Numbers of a state in memory."""
    return ((features + (not grouped)) * (channels + 1) + 3) // 4 * 4


@triton.jit
def state_size(SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """The same in a kernel."""
    return ((F + (1 if SIZE == 0 else 0)) * (E + 1) + 3) // 4 * 4


@triton.jit
def state_places(
    base, SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):
    """Addresses of the sums of f v^T and of f."""
    feature, channel = tl.arange(0, BF), tl.arange(0, BE)
    if SIZE == 0:
        return base + feature[:, None] * (E + 1) + channel[None, :], base + feature * (E + 1) + E
    else:
        return base + feature[:, None] * E + channel[None, :], base + F * E + feature


@triton.jit
def store_state(
    base, sums, ones, total, count,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Store sums (BF, BE) and ones (BF,), and without groups `total` (BE,) and `count`."""
    row, column = tl.arange(0, BF) < F, tl.arange(0, BE) < E
    of_sums, of_ones = state_places(base, SIZE, E, F, BE, BF)
    tl.store(of_sums, sums, mask=row[:, None] & column[None, :])
    tl.store(of_ones, ones, mask=row)
    if SIZE == 0:
        tl.store(base + F * (E + 1) + tl.arange(0, BE), total, mask=column)
        tl.store(base + F * (E + 1) + E, count)


@triton.jit
def load_state(
    base, SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr
):
    """The inverse of `store_state`; `total` and `count` are zero with groups."""
    row, column = tl.arange(0, BF) < F, tl.arange(0, BE) < E
    of_sums, of_ones = state_places(base, SIZE, E, F, BE, BF)
    sums = tl.load(of_sums, mask=row[:, None] & column[None, :], other=0.0)
    ones = tl.load(of_ones, mask=row, other=0.0)
    if SIZE == 0:
        total = tl.load(base + F * (E + 1) + tl.arange(0, BE), mask=column, other=0.0)
        return sums, ones, total, tl.load(base + F * (E + 1) + E)
    else:
        return sums, ones, 0.0, 0.0


@triton.jit
def load_parts(base, parts, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    """The sum of `parts` consecutive states, without groups."""
    sums, ones, total, count = load_state(base, 0, E, F, BE, BF)
    for part in range(1, parts):
        place = base + part * state_size(0, E, F)
        more, more_ones, more_total, more_count = load_state(place, 0, E, F, BE, BF)
        sums += more
        ones += more_ones
        total += more_total
        count += more_count
    return sums, ones, total, count


@triton.jit
def store_reads(base, inverse, e, start, n, BLOCK: tl.constexpr):
    """Store one over the denominator of each query of a tile, and e, the gradient of its denominator.

    Offsets have 32 bits: with 64 `gather_grad` needs a fifth more registers.
    """
    rows = tl.arange(0, BLOCK)
    base += start * 2
    tl.store(base + rows * 2, inverse, mask=start + rows < n)
    tl.store(base + rows * 2 + 1, e, mask=start + rows < n)


@triton.jit
def load_reads(base, start, n, BLOCK: tl.constexpr):
    """The inverse of `store_reads`; zero beyond the last token."""
    rows = tl.arange(0, BLOCK)
    base += start * 2
    inverse = tl.load(base + rows * 2, mask=start + rows < n, other=0.0)
    return inverse, tl.load(base + rows * 2 + 1, mask=start + rows < n, other=0.0)


@launched
def add_parts(parts_ptr, out, parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum (groups, parts, width) over the parts, in a fixed order, to (groups, width)."""
    stretches = tl.cdiv(width, COLUMNS)
    group = (tl.program_id(0) // stretches).to(tl.int64)
    columns = tl.program_id(0) % stretches * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < parts)[:, None] & (columns < width)[None, :]
        places = parts_ptr + (group * parts + rows)[:, None] * width + columns[None, :]
        total += tl.sum(tl.load(places, mask=inside, other=0.0), axis=0)
    tl.store(out + group * width + columns, total, mask=columns < width)


@launched
def running_sums(states, steps, width, REVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Running sums along the middle axis of (groups, steps + 1, width), in place.

    The first entry (the last if REVERSE) counts as zero whatever it holds, and becomes zero.
    """
    stretches = tl.cdiv(width, COLUMNS)
    group = (tl.program_id(0) // stretches).to(tl.int64)
    columns = tl.program_id(0) % stretches * COLUMNS + tl.arange(0, COLUMNS)
    carry = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, steps + 1, ROWS):
        order = start + tl.arange(0, ROWS)
        rows = order
        if REVERSE:
            rows = steps - order
        inside = (order <= steps)[:, None] & (columns < width)[None, :]
        places = states + (group * (steps + 1) + rows)[:, None] * width + columns[None, :]
        entries = tl.load(places, mask=inside & (order > 0)[:, None], other=0.0)
        tl.store(places, tl.cumsum(entries, axis=0) + carry[None, :], mask=inside)
        carry += tl.sum(entries, axis=0)
