# mypy: ignore-errors
"""The state of a head in memory, and sums over many.

It is (F + 1) x (E + 1) numbers as in `eager.py`, with groups of bits without the last row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ecoformer.backends.triton.hashing import launched


@triton.jit
def state_size(SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Numbers of a state in memory."""
    return (F + (1 if SIZE == 0 else 0)) * (E + 1)


@triton.jit
def store_state(
    base, sums, ones, total, count,
    SIZE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Write sums of f v^T (BF, BE) and of f (BF,); without groups also of v (BE,), and the number of keys."""
    feature, channel = tl.arange(0, BF), tl.arange(0, BE)
    row, column = feature < F, channel < E
    places = base + feature[:, None] * (E + 1) + channel[None, :]
    tl.store(places, sums, mask=row[:, None] & column[None, :])
    tl.store(base + feature * (E + 1) + E, ones, mask=row)
    if SIZE == 0:
        tl.store(base + F * (E + 1) + channel, total, mask=column)
        tl.store(base + F * (E + 1) + E, count)


@triton.jit
def load_rows(base, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    """The sums of f v^T and of f that `store_state` wrote."""
    feature, channel = tl.arange(0, BF), tl.arange(0, BE)
    row, column = feature < F, channel < E
    places = base + feature[:, None] * (E + 1) + channel[None, :]
    sums = tl.load(places, mask=row[:, None] & column[None, :], other=0.0)
    return sums, tl.load(base + feature * (E + 1) + E, mask=row, other=0.0)


@triton.jit
def load_state(base, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    """Read what `store_state` wrote, without groups."""
    channel = tl.arange(0, BE)
    sums, ones = load_rows(base, E, F, BE, BF)
    total = tl.load(base + F * (E + 1) + channel, mask=channel < E, other=0.0)
    return sums, ones, total, tl.load(base + F * (E + 1) + E)


@triton.jit
def load_parts(base, parts, E: tl.constexpr, F: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr):
    """The sum of `parts` states that lie one after another, without groups."""
    sums, ones, total, count = load_state(base, E, F, BE, BF)
    for part in range(1, parts):
        more, more_ones, more_total, more_count = load_state(base + part * ((F + 1) * (E + 1)), E, F, BE, BF)
        sums += more
        ones += more_ones
        total += more_total
        count += more_count
    return sums, ones, total, count


@triton.jit
def store_reads(base, inverse, e, start, n, BLOCK: tl.constexpr):
    """Keep one over the denominator of each query of a tile, and e, its gradient's share in denominators.

    Places in 32 bits: in 64 `gather_grad` takes a fifth more registers, and has fewer warps at a time.
    """
    rows = tl.arange(0, BLOCK)
    base += start * 2
    tl.store(base + rows * 2, inverse, mask=start + rows < n)
    tl.store(base + rows * 2 + 1, e, mask=start + rows < n)


@triton.jit
def load_reads(base, start, n, BLOCK: tl.constexpr):
    """What `store_reads` kept; zero beyond the last token."""
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

    The first entry (the last, if REVERSE) is taken to be zero whatever it holds, and becomes zero.
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
