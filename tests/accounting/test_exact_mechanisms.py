"""The exact accounting of every mechanism: meta tensors count like real ones, and small cases by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import executed

import ecoformer
from ecoformer.attention import Attention
from ecoformer.operations import Counts

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "softmax": [{}, {"local": 3}],
    "eco": [{}, {"bits": 5, "support": 3}, {"bits": 1, "support": 1, "bias": "tight"}],
    "sharp_eco": [{}, {"bits": 6, "groups": 3, "separate": False, "key_weights": False}],
    "klsh_eco": [{"bits": 8, "support": 7}],
    "lsh_eco": [{"bits": 16}, {"bits": 3, "bias": "tight"}],
    "bi_eco": [{"bits": 9}, {"features": "channels"}],
    "performer": [{"features": 7}],
    "fp_eco": [{"features": 9}],
    "linformer": [{"seq_len": 23, "k": 5}],
    "reformer": [{"bucket_size": 4, "rounds": 2}, {"bucket_size": 2, "rounds": 3, "max_buckets": 4}],
    "combiner": [{}, {"block": 4}],
}
CASES = [(name, options) for name, some in OPTIONS.items() for options in some]


def _layer(name: str, dim: int, heads: int, **options: Any) -> Attention:
    layer = ecoformer.create_attention(name, dim, heads, **options).eval()
    if hasattr(layer, "hasher"):
        layer.hasher.fitted.fill_(True)
    return layer


def _on_meta(layer: Attention, batch: int, tokens: int) -> Counts:
    counts, uncounted = executed(layer.to("meta"), torch.empty(batch, tokens, layer.dim, device="meta"))
    assert uncounted == ()
    return counts


def test_every_mechanism_is_tested() -> None:
    assert ecoformer.list_attentions() == sorted(OPTIONS)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_meta_tensors_count_like_real_ones(name: str, options: dict[str, Any]) -> None:
    for dim, heads, batch, tokens in ((15, 3, 2, 10), (10, 1, 3, 1)):
        layer = _layer(name, dim, heads, **options)
        real = executed(layer, torch.randn(batch, tokens, dim))
        assert real == (_on_meta(layer, batch, tokens), ())


def test_softmax_by_hand() -> None:
    n, d, h = 50, 24, 3
    counts = _on_meta(_layer("softmax", d, h), 1, n)
    assert counts.mul == 4 * n * d * d + (2 * n * n * d + h * n * n) + h * n * n  # the last divides
    assert counts.exp == h * n * n
    assert counts.lookup == counts.shift == 0
    reads = 4 * (n * d + 3 * d * d + 3 * d) + 4 * 3 * n * d + 4 * (n * d + d * d + d)
    assert counts.bytes == reads + 4 * (3 * n * d + n * d + n * d)


def test_eco_by_hand() -> None:
    n, d, h, m, b = 50, 24, 3, 25, 16
    c = d // h
    counts = _on_meta(_layer("eco", d, h, bits=b, support=m), 1, n)
    token = 2 * c + c + c + m * c + m + m * b + b * c + b * (c + 1) + c
    once = m * c + 1 + c + 1  # the support samples' lengths, two sigma, the bias
    assert counts.mul == 3 * n * d * d + h * (n * token + once)
    assert counts.exp == h * n * (m + 1)


@pytest.mark.parametrize("name", ["eco", "klsh_eco", "lsh_eco", "bi_eco", "performer", "fp_eco"])
def test_linear_mechanisms_are_linear_in_tokens(name: str) -> None:
    layer = _layer(name, 24, 3)
    one, two, three = (_on_meta(layer, 2, n).to_dict() for n in (100, 200, 300))
    assert all(three[k] - two[k] == two[k] - one[k] for k in one)
