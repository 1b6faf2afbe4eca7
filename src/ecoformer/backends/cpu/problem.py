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
    """Weight of the constant feature."""
    q: int
    q_batch: int
    q_head: int
    q_token: int
    k: int
    """0 where queries are also the keys."""
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
    support: int
    mean: int
    sigma: int
    weight: int
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
    scale: int
    features: int
    projections: int
    buckets: int
    tables: int
    sums: int
    row: int
    integers: int
    """Where integers begin, in fp32 numbers."""
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


def digit_of(bits: int, channels: int, keys: int) -> int:
    """Bits of a digit: 8 where there are keys enough and the cache is large enough, else 4."""
    buckets = (bits + 7) // 8 * 256
    return 8 if bits > 4 and keys >= _MANY and buckets * padded(channels) * 4 <= _BYTES else 4


def places(dim: int, channels: int, samples: int, bits: int, digit: int, keys: int) -> Places:
    """Where everything lies."""
    m, b, c = padded(samples), padded(bits), padded(channels)
    rows = digits(bits, digit) << digit
    tokens = padded(max(keys, 2 * BLOCK))  # a block of keys and one of queries, in causal order
    second = dim * (m if samples else b)
    offset = second + samples * b
    mean = offset + m
    scale = mean + m
    features = scale + BLOCK
    projections = features + BLOCK * m
    buckets = projections + BLOCK * b
    tables = buckets + rows * c
    sums = tables + rows * c
    row = sums + (2 * bits + 2) * c
    integers = row + 2 * c
    denominators = rows
    tallies = denominators + rows
    wheres = tallies + padded(bits + 2)
    codes = wheres + padded(digits(bits, digit))
    end = integers * 4 + (codes + tokens) * 8 + tokens
    return Places(
        0,
        second,
        offset,
        mean,
        scale,
        features,
        projections,
        buckets,
        tables,
        sums,
        row,
        integers,
        0,
        denominators,
        tallies,
        wheres,
        codes,
        tokens,
        end,
    )
