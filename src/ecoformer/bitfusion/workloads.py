"""The two rows of the paper's hardware table that are known to the digit, as operations."""

from __future__ import annotations

from .ops import FullyConnected, Op

__all__ = ["printed_layer"]

Work = list[tuple[Op, int]]
"""Operations, and how often each runs."""


def printed_layer(mechanism: str) -> Work:
    """The operations whose sum is the printed row of "softmax" (the Transformer) or "eco".

    They are those of a layer over 3136 tokens of dimension 32, but with 16 query rows in all, not with 16
    samples of 3136 queries. The printed energy is in nJ, and the printed latency is cycles / 500e3 / 16 ms.
    """
    _check(mechanism)
    project = FullyConnected(16, 32, 32)
    read = FullyConnected(16, 3136, 32)
    if mechanism == "softmax":
        return [(project, 4), (FullyConnected(16, 32, 3136), 1), (read, 1)]
    hashing: Work = [(FullyConnected(16, 32, 25), 1), (FullyConnected(16, 25, 16), 1)]
    context = FullyConnected(16, 16, 32, weight_bits=2)
    return [(project, 3), *hashing, (read, 1), (context, 1), (FullyConnected(16, 16, 1), 1)]


def _check(mechanism: str) -> None:
    if mechanism not in ("softmax", "eco"):
        raise ValueError(f'mechanism must be "softmax" or "eco", got {mechanism!r}')
