"""Each mechanism's closed formula is what PyTorch executes, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.accounting.counts import Counts
from ecoformer.accounting.executed import executed
from ecoformer.accounting.mechanisms import formula, leaf_formula, list_formulas, register_formula
from ecoformer.accounting.mechanisms.registry import _REGISTRY
from ecoformer.attention import Attention

# Batches and tokens: even, odd, one sample, one token, and more or fewer tokens than fill blocks.
CALLS = [(2, 10), (1, 23), (3, 7), (2, 16), (2, 1), (1, 1)]
# Channels and heads: an odd number of channels a head, one head, one channel a head.
SIZES = [(15, 3), (10, 1), (4, 4)]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "softmax": [{}],
    "eco": [{}, {"bits": 5, "support": 3, "sigma": "input"}, {"bits": 1, "support": 1, "bias": "official"}],
    "klsh_eco": [{"bits": 8, "support": 7}],
    "lsh_eco": [{"bits": 16}, {"bits": 3, "bias": "official"}],
    "bi_eco": [{"bits": 9}, {"features": "channels"}, {"features": "channels", "bits": 1}],
    "performer": [{"features": 7}, {"features": 1}],
    "fp_eco": [{"features": 9}],
    "linformer": [{"seq_len": 23, "k": 5}, {"seq_len": 40, "k": 1}],
    "reformer": [
        {"bucket_size": 4, "rounds": 2},
        {"bucket_size": 3, "rounds": 1},
        {"bucket_size": 2, "rounds": 3, "max_buckets": 4},
        {"bucket_size": 64, "rounds": 2},
    ],
    "combiner": [{}, {"block": 4}, {"block": 1}],
}
EXTRAS: list[dict[str, Any]] = [{}, {"local": 3}, {"qkv_bias": False, "out_proj": False}]
CASES = [(name, options) for name, some in OPTIONS.items() for options in some]


def _layer(name: str, dim: int, heads: int, **options: Any) -> Attention:
    layer = ecoformer.create_attention(name, dim, heads, **options).eval()
    if hasattr(layer, "hasher"):
        layer.hasher._set_fitted()
    return layer


def _on_meta(layer: Attention, batch: int, tokens: int, **call: Any) -> tuple[Counts, tuple[str, ...]]:
    return executed(layer, torch.empty(batch, tokens, layer.dim, device="meta"), **call)


def test_every_mechanism_has_a_formula_and_is_tested() -> None:
    assert list_formulas() == ecoformer.list_attentions() == sorted(OPTIONS)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize(("dim", "heads"), SIZES)
def test_formula_is_what_is_executed(name: str, options: dict[str, Any], dim: int, heads: int) -> None:
    layer = _layer(name, dim, heads, **options).to("meta")
    for batch, tokens in CALLS:
        assert _on_meta(layer, batch, tokens) == (formula(layer, batch, tokens), ()), (batch, tokens)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("extra", EXTRAS[1:], ids=str)
def test_formula_with_local_branch_and_without_projections(name: str, extra: dict[str, Any]) -> None:
    for dim, heads in SIZES[:2]:
        layer = _layer(name, dim, heads, **OPTIONS[name][0], **extra).to("meta")
        for batch, tokens in CALLS[:2]:
            assert _on_meta(layer, batch, tokens) == (formula(layer, batch, tokens), ()), (dim, batch, tokens)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_formula_with_an_images_local_branch(name: str) -> None:
    layer = _layer(name, 12, 3, **OPTIONS[name][0], local=(3, 3)).to("meta")
    assert _on_meta(layer, 2, 15, grid=(3, 5)) == (formula(layer, 2, 15), ())


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_formula_with_frozen_weights(name: str) -> None:
    for dim, heads in SIZES[:2]:
        layer = _layer(name, dim, heads, **OPTIONS[name][0]).to("meta").requires_grad_(False)
        for batch, tokens in CALLS[:3]:
            assert _on_meta(layer, batch, tokens) == (formula(layer, batch, tokens), ()), (batch, tokens)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_meta_tensors_count_like_real_ones(name: str, options: dict[str, Any]) -> None:
    for dim, heads in SIZES[:2]:
        layer = _layer(name, dim, heads, **options)
        for batch, tokens in ((2, 10), (3, 1)):
            real = executed(layer, torch.randn(batch, tokens, dim))
            assert real == (formula(layer, batch, tokens), ()), (dim, batch, tokens)


def test_softmax_beside_the_papers_count() -> None:
    n, d, h = 50, 24, 3
    counts = formula(_layer("softmax", d, h), 1, n)
    assert counts.mul == 4 * n * d * d + (2 * n * n * d + h * n * n) + h * n * n  # the last divides
    assert counts.exp == h * n * n
    assert counts.lookup == counts.shift == 0


def test_eco_beside_the_papers_count() -> None:
    n, d, h, m, b = 50, 24, 3, 25, 16
    c = d // h
    counts = formula(_layer("eco", d, h, bits=b, support=m), 1, n)
    token = 2 * c + c + c + m * c + m + m * b + b * c + b * (c + 1) + c
    once = m * c + 1 + c + 1  # the support samples' lengths, two sigma, the bias
    assert counts.mul == 3 * n * d * d + h * (n * token + once)
    assert counts.exp == h * n * (m + 1)


def test_linear_mechanisms_are_linear_in_tokens() -> None:
    for name in ("eco", "klsh_eco", "lsh_eco", "bi_eco", "performer", "fp_eco"):
        layer = _layer(name, 24, 3)
        one, two, three = (formula(layer, 2, n).to_dict() for n in (100, 200, 300))
        assert all(three[k] - two[k] == two[k] - one[k] for k in one), name


def test_a_users_mechanism_registers_its_formula() -> None:
    class Mine(ecoformer.attention.SoftmaxAttention):
        name = "mine"

    with pytest.raises(ValueError, match="no formula is registered for 'mine'"):
        formula(Mine(8, 2), 1, 4)
    try:
        register_formula("mine")(lambda layer, batch, tokens: Counts(mul=batch * tokens * layer.dim))
        assert formula(Mine(8, 2), 3, 4) == Counts(mul=96)
    finally:
        _REGISTRY.pop("mine", None)
    with pytest.raises(ValueError, match="registered already"):
        register_formula("eco")(lambda layer, batch, tokens: Counts())


@pytest.mark.parametrize("sizes", [(0, 4), (1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        formula(_layer("softmax", 8, 2), *sizes)


LEAVES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(5, 7), (2, 3, 5)),
    (nn.Linear(5, 7, bias=False), (4, 5)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 11)),
    (nn.Conv2d(4, 8, (3, 5), stride=(1, 2), padding=(0, 2), groups=2, bias=False), (2, 4, 9, 10)),
    (nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6), (1, 6, 7, 7)),
    (nn.LayerNorm(5), (2, 3, 5)),
    (nn.LayerNorm((3, 5), bias=False), (2, 3, 5)),
    (nn.LayerNorm(5, elementwise_affine=False), (2, 3, 5)),
    (nn.BatchNorm2d(3), (2, 3, 4, 5)),
    (nn.BatchNorm1d(3, affine=False), (4, 3)),
    (nn.GELU(), (3, 4)),
    (nn.GELU(approximate="tanh"), (3, 4)),
    (nn.ReLU(), (3, 4)),
    (nn.ReLU(inplace=True), (3, 4)),
    (nn.Softmax(dim=0), (3, 4)),
    (nn.Dropout(0.5), (3, 4)),
    (nn.Identity(), (3, 4)),
    (nn.Embedding(11, 6), (2, 5)),
]


@pytest.mark.parametrize(("module", "shape"), LEAVES, ids=lambda x: str(x).split("(")[0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_leaf_formulas(module: nn.Module, shape: tuple[int, ...], device: str) -> None:
    dtype = torch.int64 if isinstance(module, nn.Embedding) else torch.float32
    module = module.eval()
    state = {name: x.to(device) for name, x in module.state_dict(keep_vars=True).items()}
    x = torch.zeros(shape, dtype=dtype, device=device)
    counted = executed(lambda: torch.func.functional_call(module, state, (x,)))
    assert counted == (leaf_formula(module, shape), ())


def test_an_unknown_leaf_has_no_formula() -> None:
    assert leaf_formula(nn.LSTM(2, 2), (1, 2, 2)) is None
