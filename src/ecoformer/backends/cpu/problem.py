"""One call in numbers: sizes, addresses and strides, and the layout of a thread's scratch memory."""

from __future__ import annotations

from collections import namedtuple
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecoformer.backends.fused import FusedCall

BLOCK = 48
"""Tokens that are hashed together: their features stay in the first cache."""
STRETCH = 4096
"""Tokens whose values are summed at once; longer sums are sums of these, which keeps rounding small."""
LANES = 16
"""Rows in scratch memory are padded to a multiple of this."""
PART = 16
"""Tokens of causal order that read the tables of one state, and each other pair by pair."""

_BYTES = 1 << 18
"""Most memory for buckets of 8 bits, and as much again for tables; beyond, digits have 4 bits."""
_MANY = 1024
"""Keys from which buckets of 8 bits pay for their folding."""
_LEAST = 256
"""Tokens that are worth a thread of their own."""
FULL, GATHER, SCATTER, CAUSAL = range(4)
"""What is done with a share: heads from tokens to output, one of two passes, or heads in causal order."""


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
    """The output, or its gradient in the backward."""
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
    """Codes of all tokens, then a byte each that says whether they are NaN; or 0."""
    sums: int
    """The parts' sums between two passes."""
    tallies: int
    """The parts' tallies between two passes."""
    kept_sums: int
    """The heads' states for the backward, or 0."""
    kept_tallies: int


class Team(NamedTuple):
    """What the threads of a call share."""

    members: int
    """How many have joined."""
    taken: int
    """How many shares are taken."""
    finished: int
    """How many shares are done."""
    job: int
    """After GATHER follows SCATTER: as many shares again, which wait until all is gathered."""
    parts: int
    """Heads, or parts of heads."""
    shares: int
    scratch: int
    """The address of all threads' scratch memory, `size` bytes each."""
    size: int
    problem: int
    layout: int
    gradients: int
    """The address of `Gradients`, in a backward."""


class Gradients(NamedTuple):
    """Addresses of gradients in fp32, contiguous, 0 where one is not needed."""

    q: int
    k: int
    """The same as q where keys are made of the queries' tokens."""
    v: int
    key_weight: int
    weight: int
    """(parts, m or D, b), b padded: of the hash functions of queries, or of both."""
    key_hash: int
    levels: int
    """(parts, 2, G) in fp64: sums over queries of what a group reads times its gradient, and of the products
    of bits and their gradients."""
    bits: int
    """(heads, N, b), b padded: where codes are shared, the gradients of bits between two passes."""


class Worker(NamedTuple):
    """What one thread works with: the call, and its scratch memory by type of number."""

    p: Problem
    at: Any
    """`Layout`."""
    memory: Any
    """fp32."""
    exact: Any
    """fp64: sums of weights, and denominators."""
    rows: Any
    """int64."""
    codes: Any
    nans: Any


def padded(number: int) -> int:
    """The next multiple of a vector's lanes."""
    return (number + LANES - 1) // LANES * LANES


def digits(bits: int, digit: int) -> int:
    """How many digits a code has."""
    return (bits + digit - 1) // digit


def digit_of(bits: int, channels: int, keys: int, group: int = 1) -> int:
    """Bits of a digit: 8 where there are keys enough and the cache is large enough, else 4.

    Digits hold complete groups, so they may have fewer bits, or as many as a group.
    """
    buckets = (bits + 7) // 8 * 256
    widest = 8 if bits > 4 and keys >= _MANY and buckets * padded(channels) * 4 <= _BYTES else 4
    return max(group, widest // group * group)


def pieces_of(heads: int, tokens: int, threads: int) -> int:
    """Into how many parts the tokens of a head are split: more than one where threads outnumber heads."""
    return max(1, min(-(-threads // heads), tokens // _LEAST)) if heads < threads else 1


def state_rows(bits: int, group: int) -> int:
    """Rows of a state: the bits and the values' own sum, or the values of all groups."""
    return bits // group << group if group else bits + 1


def layout(
    dim: int = 1,
    channels: int = 1,
    samples: int = 1,
    bits: int = 1,
    digit: int = 4,
    keys: int = 1,
    group: int = 0,
    separate: bool = False,
    causal: bool = False,
    backward: bool = False,
) -> dict[str, int]:
    """Offsets in a thread's scratch memory, in numbers; `separate`: keys have their own hash functions.

    fp32 numbers come first. From `integers` on there are fp64 numbers and integers of 64 bits, whose offsets
    count from there. From `codes` on there are codes, and after `tokens` of them a byte each that says
    whether they are NaN. `end` is the size of it all in bytes.
    """
    m, d, b, c = padded(samples), padded(dim), padded(bits), padded(channels)
    rows, state = digits(bits, digit) << digit, state_rows(bits, group)
    more = int(backward)
    functions = {
        "first": dim * (m if samples else b),  # the matrix that tokens are multiplied with, (D, m) or (D, b)
        "second": samples * b,  # the matrix that features are multiplied with, (m, b)
        "offset": m,
        "mean": m,
        "inverse": LANES,  # 1 / sigma
        # For the backward: the last matrix transposed, (b, m) or (b, D), and support samples (m, D).
        "turned": more * bits * (m if samples else d),
        "support": more * samples * d,
    }
    size = sum(functions.values())
    floats = functions | {
        "keys": size if separate else 0,  # the same from here on for the keys' own hash functions
        "scale": BLOCK,
        "features": BLOCK * m,
        "projections": BLOCK * b,
        "buckets": rows * c,
        "tables": rows * c,
        "sums": state * c,  # the rows of a state; their tallies are at `tallies`
        "recent": state * c if causal else 0,  # the sums of the current block in causal order
        "row": c,
        "zeros": c,
        "levels": padded(state),  # what a group counts by the bits that differ, for all values of these
        # Rows that the tokens of a part of causal order read from each other, then their weights.
        "items": PART * (c + 1) if causal else 0,
        # From here on for the backward alone: the state's gradient, its tallies at `grad_tallies`.
        "grads": more * state * c,
        "columns": 0 if group else more * channels * b,  # the state's rows of bits, transposed
        # Products of a block's rows with the derivatives, by the bits of their codes, of what these read.
        "dots": more * (BLOCK * b + LANES),
        # The same derivatives of tallies: for each group's values, or for all bits; then those of one token.
        "flips": more * padded(state * group if group else bits),
        "weights": more * b,
        "same": more * b,  # products of one row with what each group reads; tallies at `same_tallies`
        # In causal order: derivatives of two tokens' affinity by bits, and those of all levels.
        "pair": more * b,
        "level_flips": padded(state * group) if backward and causal else 0,
        "bit_grads": more * BLOCK * b,
        "feature_grads": more * BLOCK * m,
        "token_grads": more * BLOCK * d,
        "weight_grads": more * (samples or dim) * b,
    }
    tokens = padded(max(keys, 2 * BLOCK))  # a block of keys and one of queries, in causal order
    integers = {
        "counts": max(rows, state),
        "denominators": max(rows, state),
        "tallies": padded(state + 1),
        "rows": padded(digits(bits, digit)),  # where the rows are that a token reads
        # From here on for the backward alone.
        "grad_tallies": more * padded(state + 1),
        "same_tallies": more * b,
        "levels_grads": more * padded(2 * bits),  # what the gradients of scale and ratio are found from
        # In causal order 1 / denominator, its gradient, and that of the number of keys, for each query.
        "divisors": 3 * tokens if backward and causal else 0,
    }
    at = dict(zip(floats, accumulate(floats.values(), initial=0), strict=False))
    at["keys"] = size if separate else 0
    at["integers"] = sum(floats.values())
    at |= dict(zip(integers, accumulate(integers.values(), initial=0), strict=False))
    at["codes"], at["tokens"] = sum(integers.values()), tokens
    at["end"] = at["integers"] * 4 + (at["codes"] + tokens) * 8 + tokens
    return at


_namedtuple: Any = namedtuple
Layout: Any = _namedtuple("Layout", layout())
"""`layout` as the kernels read it."""
PROBLEM_SIZE, LAYOUT_SIZE, TEAM_SIZE = (len(each._fields) for each in (Problem, Layout, Team))
GRADIENTS_SIZE = len(Gradients._fields)
MEMBERS, TAKEN, FINISHED = range(3)
"""Where a `Team` counts."""


def keep_for(call: FusedCall) -> list[Tensor]:
    """Memory for what the backward needs: each head's state, and codes where queries and keys share them.

    In causal order the backward computes states again.
    """
    if call.causal:
        return []
    batch, heads, _, channels = call.v.shape
    rows = state_rows(call.bits, call.group)
    sums = call.v.new_empty(batch * heads, rows, padded(channels), dtype=torch.float32)
    tallies = call.v.new_empty(batch * heads, rows + 1, dtype=torch.float64)
    return [sums, tallies, empty_codes(call)] if call.shared_codes else [sums, tallies]


def empty_codes(call: FusedCall) -> Tensor:
    """Memory for all tokens' codes, and whether they are NaN."""
    batch, heads, keys, _ = call.v.shape
    return call.v.new_empty(batch * heads * keys * 9, dtype=torch.uint8)
