"""The attention layers of the paper's hardware table, as operations."""

from __future__ import annotations

from .checks import whole
from .ops import FullyConnected, Op

__all__ = ["attention_layer", "printed_layer"]

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


def attention_layer(
    mechanism: str, *, batch: int = 16, tokens: int = 3136, dim: int = 32, bits: int = 16, support: int = 25
) -> Work:
    """A whole layer of one head, every query of every sample included.

    Projections and hash functions have weights that all samples share, so they run once over batch · tokens
    rows. Keys, values and the sums over them belong to a sample: those products run once for each.

    Args:
        mechanism: "softmax" or "eco".
        batch: samples.
        tokens: of a sample.
        dim: of a token.
        bits: of a code; for "eco".
        support: samples that a hash function compares with; for "eco".

    Returns:
        Operations with the number of times each runs, as `simulate_all` takes them.
    """
    _check(mechanism)
    batch, tokens, dim = whole("batch", batch), whole("tokens", tokens), whole("dim", dim)
    bits, support = whole("bits", bits), whole("support", support)
    rows = batch * tokens
    project = FullyConnected(rows, dim, dim)
    if mechanism == "softmax":
        similarity, mix = FullyConnected(tokens, dim, tokens), FullyConnected(tokens, tokens, dim)
        return [(project, 4), (similarity, batch), (mix, batch)]
    return [
        (project, 3),
        (FullyConnected(rows, dim, support), 1),
        (FullyConnected(rows, support, bits), 1),
        (FullyConnected(bits, tokens, dim), batch),
        (FullyConnected(tokens, bits, dim, weight_bits=2), batch),
        (FullyConnected(tokens, bits, 1), batch),
    ]


def _check(mechanism: str) -> None:
    if mechanism not in ("softmax", "eco"):
        raise ValueError(f'mechanism must be "softmax" or "eco", got {mechanism!r}')
