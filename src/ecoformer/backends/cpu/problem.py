"""One call in numbers: sizes, addresses and strides, and where things lie in a thread's scratch memory."""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 48
"""Tokens that are hashed together: their features stay in the first cache."""
STRETCH = 4096
"""Tokens whose values are summed in one go; longer sums are sums of these, which keeps rounding small."""
LANES = 16
"""Rows in scratch memory are padded to a multiple of this."""


_BYTES = 1 << 18
"""Most memory for buckets of whole bytes, and as much again for tables; beyond, digits are half a byte."""
_MANY = 1024
"""Keys from which buckets of whole bytes pay their folding."""
WHOLE, GATHER, SCATTER, CAUSAL = range(4)
"""What is done with a share: heads from tokens to output, or one of two passes, or heads in causal order."""


class Problem(NamedTuple):
    """Sizes in tokens and numbers, addresses in bytes (0 for what is absent), strides in numbers."""

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    channels: int
    samples: int
    """m, or 0 for hash functions without a kernel."""
    bits: int
    digit: int
    """Bits of a code that select a bucket together."""
    pieces: int
    """Into how many parts the tokens of a head are split."""
    constant: int
    """What the paper's affinity adds to h . g."""
    group: int
    """s, bits of a group; 0 for the paper's affinity."""
    scale: int
    """Of groups (H, G), as `ratio`; `floor` (H,)."""
    ratio: int
    floor: int
    q: int
    q_batch: int
    q_head: int
    q_token: int
    k: int
    """0 where queries are also the keys, with the same hash functions."""
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
    mask: int
    mask_batch: int
    mask_token: int
    key_weight: int
    key_weight_batch: int
    key_weight_head: int
    key_weight_token: int
    support: int
    mean: int
    sigma: int
    weight: int
    key_support: int
    key_mean: int
    key_sigma: int
    key_hash: int
    """A of the keys' own hash functions, or 0."""
    codes: int
    """Where codes lie between two passes, and after them a byte each that says whether they are NaN; or 0."""
    sums: int
    """Where the parts' sums lie between two passes."""
    tallies: int
    """Where the parts' code sums lie between two passes."""


class Places(NamedTuple):
    """Offsets in scratch memory: of fp32 numbers from its start, of integers from `integers`, in numbers."""

    first: int
    """The matrix that tokens are multiplied with, (D, m) or (D, b)."""
    second: int
    """The matrix that features are multiplied with, (m, b)."""
    offset: int
    mean: int
    inverse: int
    """1 / sigma."""
    keys: int
    """The same from here on for the keys' own hash functions."""
    scale: int
    features: int
    projections: int
    buckets: int
    tables: int
    sums: int
    row: int
    levels: int
    """What a group counts by the bits that differ, for all values of these."""
    integers: int
    """Where integers begin, in fp32 numbers. Counts, denominators and tallies of groups are fp64."""
    counts: int
    denominators: int
    tallies: int
    rows: int
    codes: int
    """Codes, and after `tokens` of them a byte each that says whether they are NaN."""
    tokens: int
    end: int
    """All of it, in bytes."""


class Team(NamedTuple):
    """What the threads of a call share."""

    members: int
    """How many have joined."""
    taken: int
    """How many shares are taken."""
    finished: int
    """How many shares are done."""
    job: int
    """For GATHER, SCATTER follows: shares as many again, which wait until all is gathered."""
    parts: int
    """Heads, or parts of heads."""
    shares: int
    scratch: int
    """The address of all threads' scratch memory, `size` bytes each."""
    size: int
    problem: int
    layout: int


PROBLEM_SIZE, PLACES_SIZE, TEAM_SIZE = (len(each._fields) for each in (Problem, Places, Team))
MEMBERS, TAKEN, FINISHED = range(3)
"""Where a `Team` counts."""
KEYS, CODES = Problem._fields.index("k"), Problem._fields.index("codes")
"""Where these addresses are in a `Problem`."""


def padded(number: int) -> int:
    """The next multiple of a vector's lanes."""
    return (number + LANES - 1) // LANES * LANES


def digits(bits: int, digit: int) -> int:
    """How many digits a code has."""
    return (bits + digit - 1) // digit


def digit_of(bits: int, channels: int, keys: int, group: int = 1) -> int:
    """Bits of a digit: 8 where there are keys enough and the cache is large enough, else 4.

    Fewer where a multiple of `group` bits must be: groups are not cut.
    """
    buckets = (bits + 7) // 8 * 256
    widest = 8 if bits > 4 and keys >= _MANY and buckets * padded(channels) * 4 <= _BYTES else 4
    return max(group, widest // group * group)


def state_rows(bits: int, group: int) -> int:
    """Rows of a state: the bits and the values' own sum, or the values of all groups."""
    return bits // group << group if group else bits + 1


def places(
    dim: int, channels: int, samples: int, bits: int, digit: int, keys: int, group: int, apart: bool
) -> Places:
    """Where everything lies."""
    m, b, c = padded(samples), padded(bits), padded(channels)
    rows, state = digits(bits, digit) << digit, state_rows(bits, group)
    tokens = padded(max(keys, 2 * BLOCK))  # a block of keys and one of queries, in causal order
    second = dim * (m if samples else b)
    offset = second + samples * b
    mean = offset + m
    inverse = mean + m
    functions = inverse + LANES
    scale = functions * (2 if apart else 1)
    features = scale + BLOCK
    projections = features + BLOCK * m
    buckets = projections + BLOCK * b
    tables = buckets + rows * c
    sums = tables + rows * c
    row = sums + 2 * state * c
    levels = row + 2 * c
    integers = levels + padded(state)
    denominators = max(rows, state)
    tallies = denominators + max(rows, state)
    wheres = tallies + padded(state + 1)
    codes = wheres + padded(digits(bits, digit))
    end = integers * 4 + (codes + tokens) * 8 + tokens
    return Places(
        0,
        second,
        offset,
        mean,
        inverse,
        functions if apart else 0,
        scale,
        features,
        projections,
        buckets,
        tables,
        sums,
        row,
        levels,
        integers,
        0,
        denominators,
        tallies,
        wheres,
        codes,
        tokens,
        end,
    )
