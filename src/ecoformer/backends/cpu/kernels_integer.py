"""Integer attention: buckets, tables and outputs of whole numbers, and what threads call.

Steps are those of `sums.py`. Sums are exact in any order, so digits, pieces and threads do not change a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ecoformer.backends.cpu.compiler import (
    callback,
    compiled,
    digest_of_sources,
    inlined,
    int64,
    to_fixed_tuple,
)
from ecoformer.backends.cpu.problem import (
    GATHER,
    LANES,
    MEMBERS,
    SCATTER,
    digits,
    padded,
)
from ecoformer.backends.cpu.rows import clear_row
from ecoformer.backends.cpu.rows_integer import (
    add_counts,
    add_rows,
    add_values,
    add_words,
    bit_length,
    code_at,
    copy_words,
    divide,
    narrow_row,
    octet_at,
    reached,
    read_rows,
    set_wide,
    store_code,
    sum_rows,
    sum_tallies,
    weigh_planes,
)
from ecoformer.backends.cpu.shares import shares, team_at
from ecoformer.backends.cpu.vectors import claim, integers, octets, signed_octets, words

_padded = inlined(padded)
_digits = inlined(digits)


BLOCK = 128
"""Tokens whose codes are looked up together."""


class IntegerProblem(NamedTuple):
    """Sizes in numbers, addresses in bytes (0 for what is absent), strides in numbers; see `Problem`."""

    batch: int
    heads: int
    queries: int
    keys: int
    channels: int
    bits: int
    group: int
    digit: int
    pieces: int
    reach: int
    """The shift of the heaviest keys."""
    levels: int
    multiplier: int
    codes_q: int
    q_size: int
    """Bytes of a packed code."""
    q_batch: int
    q_head: int
    q_token: int
    codes_k: int
    k_size: int
    k_batch: int
    k_head: int
    k_token: int
    v: int
    v_batch: int
    v_head: int
    v_token: int
    out: int
    out_batch: int
    out_head: int
    out_token: int
    exponent: int
    exponent_batch: int
    exponent_head: int
    exponent_token: int
    mask: int
    mask_batch: int
    mask_token: int
    states: int
    """The parts' states between two passes."""


class Scratch(NamedTuple):
    """Offsets in a thread's scratch memory: of int32 numbers, then, from `wide` on, of int64 numbers."""

    buckets: int
    counts: int
    """Sums of key weights by bucket."""
    tables: int
    planes: int
    """Sums over all values of one group at each distance; rows of it, narrowed, afterwards."""
    sums: int
    """A state: sums of the values of all groups, then their `tallies`."""
    tallies: int
    wide: int
    mixed: int
    mixed_tallies: int
    below: int
    """Denominators by row of the tables."""
    codes: int
    """Of a block of tokens."""
    weights: int
    """Of these keys, or queries' denominators, then their reciprocals."""
    shifts: int
    """Of what queries read."""
    end: int
    """Of all, in bytes."""


def scratch_of(channels: int, bits: int, group: int, digit: int) -> Scratch:
    """How a thread's scratch memory is laid out."""
    wide, rows, state = padded(channels), digits(bits, digit) << digit, bits // group << group
    sizes = [rows * wide, padded(rows), rows * wide, padded(group + 1 << group) * wide, state * wide]
    sizes.append(padded(state))
    at = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    wide_sizes = [state * wide, padded(state), padded(rows), BLOCK, BLOCK, BLOCK]
    at += [sum(wide_sizes[:i]) for i in range(len(wide_sizes))]
    return Scratch._make([*at, 4 * at[6] + 8 * sum(wide_sizes)])


class IntegerWorker(NamedTuple):
    """What one thread works with."""

    p: IntegerProblem
    at: Scratch
    memory: Any
    """int32."""
    exact: Any
    """int64."""


_PROBLEM, _SCRATCH = len(IntegerProblem._fields), len(Scratch._fields)


@compiled
def _heaviest(p: IntegerProblem, batch: int, head: int) -> Any:
    """The largest exponent of all visible keys."""
    exponents, masks = signed_octets(p.exponent), octets(p.mask)
    start, hidden = batch * p.exponent_batch + head * p.exponent_head, batch * p.mask_batch
    peak = int64(-128)
    for t in range(p.keys):
        if not (p.mask and masks[hidden + t * p.mask_token]):
            peak = max(peak, int64(exponents[start + t * p.exponent_token]))
    return peak


@inlined
def _gather(w: IntegerWorker, batch: int, head: int, first: int, last: int) -> None:
    """Keys `first` to `last` to an empty state."""
    p, at = w.p, w.at
    clear_row(w.memory, at.buckets, at.tables - at.buckets)
    clear_row(w.memory, at.sums, at.wide - at.sums)
    peak = _heaviest(p, batch, head) if p.exponent else int64(0)
    for begin in range(first, last, BLOCK):
        _fill(w, batch, head, begin, min(begin + BLOCK, last), peak)
    _fold(w)


@compiled
def _fill(w: IntegerWorker, batch: int, head: int, first: int, last: int, peak: int) -> None:
    """Values of keys to their buckets; those that are hidden or too light weigh nothing."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    masks, exponents = octets(p.mask), signed_octets(p.exponent)
    m0, e0 = batch * p.mask_batch, batch * p.exponent_batch + head * p.exponent_head
    codes, count = octets(p.codes_k), _digits(p.bits, p.digit)
    c0, known = batch * p.k_batch + head * p.k_head, _known(p.bits)
    for i in range(last - first):
        t = first + i
        shift = int64(0)
        if p.exponent:
            shift = p.reach + octet_at(exponents, e0 + t * p.exponent_token) - peak
        hidden = p.mask and octet_at(masks, m0 + t * p.mask_token) != 0
        weight = int64(0) if hidden or shift < 0 else int64(1) << shift
        code = code_at(codes, c0 + t * p.k_token, p.k_size) & known
        set_wide(exact, at.codes + i, code)
        set_wide(exact, at.weights + i, weight)
        add_counts(memory, at.counts, code, p.digit, count, weight)
    v0 = batch * p.v_batch + head * p.v_head + first * p.v_token
    lists = (at.codes, at.weights, last - first, p.digit, count)
    add_values(memory, at.buckets, exact, *lists, octets(p.v), v0, p.v_token, p.channels, _padded(p.channels))


@inlined
def _known(bits: int) -> Any:
    """All bits of a code."""
    return int64(-1) if bits == 64 else (int64(1) << bits) - 1


@compiled
def _fold(w: IntegerWorker) -> None:
    """Sums of each group's values from the buckets of digits, see `sums.fold`."""
    p, at, memory = w.p, w.at, w.memory
    wide, values = _padded(p.channels), int64(1) << p.group
    for g in range(_digits(p.bits, p.digit)):
        base, count = at.buckets + (g << p.digit) * wide, at.counts + (g << p.digit)
        for i in range(min(p.digit, p.bits - g * p.digit) // p.group - 1, -1, -1):
            row = ((g * p.digit) // p.group + i) << p.group
            lows = int64(1) << (i * p.group)
            for value in range(values):
                to, bucket = row + value, value * lows
                add_rows(memory, at.sums + to * wide, memory, base + bucket * wide, lows, wide, wide)
                add_rows(memory, at.tallies + to, memory, count + bucket, lows, int64(1), int64(1))
            if i:
                others = values - 1
                add_rows(memory, base, memory, base + lows * wide, others, lows * wide, lows * wide)
                add_rows(memory, count, memory, count + lows, others, lows, lows)


@compiled
def _mix(w: IntegerWorker, to: int, sums: int, levels: int, wide: int) -> Any:
    """What all values of a group read, from their own sums, in rows of `wide` numbers; see `weigh_planes`.

    Bit by bit: values at distance d are those at distance d where the bit is the same and at d - 1 where
    it differs. Planes are sums of different keys, which fit in 32 bits.
    """
    p, at, memory = w.p, w.at, w.memory
    stride, planes = wide << p.group, at.planes
    copy_words(memory, planes, memory, sums, stride)
    clear_row(memory, planes + stride, p.group * stride)
    for r in range(p.group):
        half = wide << r
        for d in range(r + 1, 0, -1):
            for first in range(0, stride, 2 * half):
                one, two = planes + d * stride + first, planes + (d - 1) * stride + first
                add_words(memory, one, memory, two + half, half)
                add_words(memory, one + half, memory, two, half)
    return weigh_planes(w.exact, to, memory, planes, stride, words(p.levels), levels, p.group + 1, stride)


@compiled
def _tabulate(w: IntegerWorker, head: int) -> Any:
    """Tables and denominators from the state, and how many bits numerators lost."""
    p, at, memory, exact = w.p, w.at, w.memory, w.exact
    wide, values, groups = _padded(p.channels), int64(1) << p.group, p.bits // p.group
    sizes = int64(0)
    for j in range(groups):
        levels, row = (head * groups + j) * (p.group + 1), j << p.group
        sizes |= _mix(w, at.mixed + row * wide, at.sums + row * wide, levels, wide)
        _mix(w, at.mixed_tallies + row, at.tallies + row, levels, int64(1))
    narrow = max(int64(0), bit_length(sizes) + bit_length(int64(groups - 1)) - 30)
    for g in range(_digits(p.bits, p.digit)):
        base, below = at.tables + (g << p.digit) * wide, at.below + (g << p.digit)
        for i in range(min(p.digit, p.bits - g * p.digit) // p.group):
            # Every group is rounded by itself, whatever it is joined with.
            row, lows = ((g * p.digit) // p.group + i) << p.group, int64(1) << (i * p.group)
            to = at.planes if i else base
            narrow_row(memory, to, exact, at.mixed + row * wide, values * wide, narrow)
            for value in range(values - 1, -1, -1):
                tally = exact[at.mixed_tallies + row + value]
                if i == 0:
                    exact[below + value] = tally
                    continue
                place, one = value * lows, to + value * wide
                sum_rows(memory, base + place * wide, base, lows, one, wide)
                for low in range(lows):
                    exact[below + place + low] = exact[below + low] + tally
    return narrow


@compiled
def _scatter(w: IntegerWorker, batch: int, head: int, first: int, last: int, narrow: int) -> None:
    """What queries `first` to `last` read from the tables."""
    p, at, exact = w.p, w.at, w.exact
    codes, count, known = octets(p.codes_q), _digits(p.bits, p.digit), _known(p.bits)
    c0 = batch * p.q_batch + head * p.q_head
    factor, shift = int64(words(p.multiplier)[2 * head]), int64(words(p.multiplier)[2 * head + 1]) + 8
    for begin in range(first, last, BLOCK):
        tokens = min(BLOCK, last - begin)
        for i in range(tokens):
            code = code_at(codes, c0 + (begin + i) * p.q_token, p.q_size) & known
            set_wide(exact, at.codes + i, code)
            set_wide(exact, at.weights + i, sum_tallies(exact, at.below, code, p.digit, count))
        for i in range(0, tokens, LANES):
            divide(exact, at.weights + i, at.shifts + i, narrow, factor)
        to = batch * p.out_batch + head * p.out_head + begin * p.out_token
        lists = (at.codes, at.weights, at.shifts, tokens, p.digit, count)
        out, sizes = (octets(p.out), to, p.out_token), (p.channels, _padded(p.channels))
        read_rows(*out, w.memory, at.tables, exact, *lists, *sizes, shift)


@inlined
def _run(job: int, first: int, last: int, w: IntegerWorker) -> None:
    """Parts `first` to `last` of all heads."""
    p, at, memory = w.p, w.at, w.memory
    size, states = at.wide - at.sums, words(p.states)
    for unit in range(first, last):
        group, piece = unit // p.pieces, unit % p.pieces
        head, batch = group // p.batch, group % p.batch
        if job == SCATTER:
            clear_row(memory, at.sums, size)
            add_rows(memory, at.sums, states, group * p.pieces * size, p.pieces, size, size)
        else:
            _gather(w, batch, head, piece * p.keys // p.pieces, (piece + 1) * p.keys // p.pieces)
        if job == GATHER:
            copy_words(states, unit * size, memory, at.sums, size)
            continue
        narrow = _tabulate(w, head)
        begin, end = piece * p.queries // p.pieces, (piece + 1) * p.queries // p.pieces
        _scatter(w, batch, head, begin, end, narrow)


class Packing(NamedTuple):
    """Sizes, addresses and strides in numbers of `pack`."""

    rows: int
    codes: int
    """Of a row."""
    bits: int
    size: int
    """Bytes of a packed code."""
    sums: int
    sums_row: int
    least: int
    out: int


_PACKING = len(Packing._fields)


def _entries(digest: int) -> Any:
    """As `kernels.work`, for integer attention and for packing."""

    @callback
    def attend(data: Any) -> None:
        if digest == 0:
            return
        numbers, team = team_at(data)
        p = IntegerProblem(*to_fixed_tuple(integers(team.problem), _PROBLEM))
        at = Scratch(*to_fixed_tuple(integers(team.layout), _SCRATCH))
        address = team.scratch + claim(numbers, MEMBERS) * team.size
        w = IntegerWorker(p, at, words(address), integers(address + 4 * at.wide))
        for job, first, last in shares(numbers, team):
            _run(job, first, last, w)

    @callback
    def pack(data: Any) -> None:
        if digest == 0:
            return
        numbers, team = team_at(data)
        p = Packing(*to_fixed_tuple(integers(team.problem), _PACKING))
        sums, least, out = words(p.sums), words(p.least), octets(p.out)
        for _, first, last in shares(numbers, team):
            for row in range(first, last):
                for j in range(p.codes):
                    start = j * p.bits
                    code = reached(sums, row * p.sums_row + start, least, start, p.bits)
                    store_code(out, row * p.codes + j, p.size, code)

    return attend, pack


attend, pack = _entries(digest_of_sources())
