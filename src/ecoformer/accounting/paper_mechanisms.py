"""The paper's accounting of each mechanism: what happens between its projections, for one sample.

The paper gives counts for softmax and hashed attention that come out to the integer. For the others it prints
totals and no formula, and its sentence on the matter is that multiply-accumulates count, and multiplications
of scalings too. The rules here are readings in that spirit, each from the layer's own settings. Where one
fits the print, it was chosen among several plausible ones because it does: the fit is no evidence for it.

- performer: fits all six printed figures, on PVTv2-B0 and on the Long Range Arena, with 256 features;
- linformer: fits the Long Range Arena's three with k=256, and those on PVTv2-B0 with k=95;
- reformer: fits the Long Range Arena's three with 64-token chunks and 2 rounds;
- bi_eco: hashed attention with 256 features in the place of the hash functions; near the print, not equal;
- fp_eco is printed with the Performer's figures and gets its rule; but its projections are three, not four;
- lsh_eco, combiner, and reformer on PVTv2-B0: the print is not derived. They count what our implementation
  does.

They treat small terms unlike each other. The scaling of scores is a multiplication in softmax, an addition
too in linformer (without it the energy is 3.73, printed 3.74), and in reformer a scaling of queries, not of
pairs as the layer does it (which makes 2.50 or 2.51, printed 2.49). The performer's exponentials count, no
others do.

Letters: n tokens, H heads of C channels, b bits, m support samples, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ecoformer.accounting.counts import Counts, mac
from ecoformer.attention import (
    Attention,
    CombinerAttention,
    HashedAttention,
    LinformerAttention,
    PerformerAttention,
    ReformerAttention,
)

Rule = Callable[[Any, int], Counts]


def softmax(layer: Attention, tokens: int) -> Counts:
    """Scores, their scaling, and the weighted sum of the values."""
    return attention_to(tokens, tokens, layer.dim, layer.num_heads)


def attention_to(tokens: int, keys: int, dim: int, heads: int) -> Counts:
    """Softmax attention of every token to so many keys; the scaling is a multiplication a pair and head."""
    pairs = tokens * keys
    return Counts(mul=2 * pairs * dim + heads * pairs, add=2 * pairs * dim)


def eco(layer: HashedAttention, tokens: int) -> Counts:
    """Kernel (2 m; its squares are free), hash functions (m b), and what all codes cost."""
    hasher: Any = layer.hasher
    m, b, c = int(hasher.support), int(hasher.bits), layer.head_dim
    kernel = Counts(mul=2 * m + m * b, add=2 * m * c + m * b)
    return (kernel + _codes(b, c)) * (layer.num_heads * tokens)


def lsh_eco(layer: HashedAttention, tokens: int) -> Counts:
    """One product with each hyperplane, and what all codes cost."""
    b, c = layer.hasher.bits, layer.head_dim
    return (mac(b * c) + _codes(b, c)) * (layer.num_heads * tokens)


def bi_eco(layer: HashedAttention, tokens: int) -> Counts:
    """One product for each random feature, none where bits are signs of channels; what all codes cost."""
    hasher: Any = layer.hasher
    b, c = int(hasher.bits), layer.head_dim
    features = mac(b * c) if hasher.features == "fourier" else Counts()
    return (features + _codes(b, c)) * (layer.num_heads * tokens)


def _codes(b: int, c: int) -> Counts:
    """Sums over keys and their read: codes only add; the denominator, the bias and the division multiply."""
    return Counts(mul=b + 1 + c, add=2 * b + 2 * b * c + c)


def performer(layer: PerformerAttention, tokens: int) -> Counts:
    """Products 4 C F: features of queries and of keys, the keys' context, its read.

    Multiplications besides: of queries and keys the scaling and the squares (4 C), the exponential and its
    factor (4 F); denominator (F), division (C). Additions besides: with scaling and squares (4 C), half the
    square and the floor (4 F), the sum of keys and the denominator (2 F).
    """
    f, c = layer.features, layer.head_dim
    rest = Counts(mul=5 * f + 5 * c, add=6 * f + 4 * c)
    return (mac(4 * c * f) + rest) * (layer.num_heads * tokens)


def linformer(layer: LinformerAttention, tokens: int) -> Counts:
    """Keys and values mixed to k rows, attention to those; the scaling counts as an addition too."""
    if tokens > layer.seq_len:
        raise ValueError(f"linformer was built for seq_len={layer.seq_len}, got N={tokens} tokens")
    k, c = layer.k, layer.head_dim
    return mac(4 * k * c + k) * (layer.num_heads * tokens)


def reformer(layer: ReformerAttention, tokens: int) -> Counts:
    """In each round: rotations, attention to two chunks, unit keys and scaled queries (C each).

    Tokens are padded to whole pairs of chunks, and padding costs what tokens cost, as it does in the layer.
    Sorting is free.
    """
    chunk, c = layer.bucket_size, layer.head_dim
    padded = -(-tokens // (2 * chunk)) * 2 * chunk
    rotations = min(padded // chunk, layer.max_buckets) // 2
    one = c * rotations + 2 * (2 * chunk) * c + 2 * c
    return mac(layer.rounds * one) * (layer.num_heads * padded)


def combiner(layer: CombinerAttention, tokens: int) -> Counts:
    """Attention to the block and to all summaries, and within the block to make its summary.

    Tokens are padded to whole blocks; queries are scaled (C); maxima are free.
    """
    size, c = layer.block or math.isqrt(tokens - 1) + 1, layer.head_dim
    blocks = -(-tokens // size)
    return mac(2 * (size + blocks) * c + 2 * c + c) * (layer.num_heads * blocks * size)


_RULES: dict[str, Rule] = {
    "softmax": softmax,
    "eco": eco,
    "klsh_eco": eco,
    "lsh_eco": lsh_eco,
    "bi_eco": bi_eco,
    "performer": performer,
    "fp_eco": performer,
    "linformer": linformer,
    "reformer": reformer,
    "combiner": combiner,
}


def mechanism_rule(layer: Attention) -> Rule | None:
    """The rule of a layer's mechanism; None for one that was registered elsewhere."""
    return _RULES.get(layer.name)
