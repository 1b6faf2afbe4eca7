"""Mechanisms of which the paper prints totals and no formula: our readings, by hand and against the print."""

from typing import Any

import pytest
import torch
from torch import nn

import ecoformer
from ecoformer.accounting import Counts, Ledger, cost
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")

N, D, H = 20, 24, 3
C = D // H
# Settings, and per token and head (multiplications, additions) between the projections.
BY_HAND: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("lsh_eco", {"bits": 5}, (5 * C + 5 + 1 + C, 5 * C + 2 * 5 + 2 * 5 * C + C)),
    ("bi_eco", {"bits": 9}, (9 * C + 9 + 1 + C, 9 * C + 2 * 9 + 2 * 9 * C + C)),
    ("bi_eco", {"features": "channels"}, (C + 1 + C, 2 * C + 2 * C * C + C)),
    ("performer", {"features": 7}, (28 * C + 35 + 5 * C, 28 * C + 42 + 4 * C)),
    ("fp_eco", {"features": 7}, (28 * C + 35 + 5 * C, 28 * C + 42 + 4 * C)),
    ("linformer", {"seq_len": 30, "k": 6}, (24 * C + 6, 24 * C + 6)),
    # 20 tokens are five pairs of chunks of two, so ten buckets and five rotations; or two pairs of five.
    ("reformer", {"bucket_size": 2, "rounds": 3}, (3 * (5 * C + 8 * C + 2 * C),) * 2),
    ("reformer", {"bucket_size": 5, "rounds": 1}, (2 * C + 20 * C + 2 * C,) * 2),
    ("combiner", {"block": 4}, (2 * (4 + 5) * C + 3 * C,) * 2),
    ("combiner", {}, (2 * (5 + 4) * C + 3 * C,) * 2),
]


def core(name: str, options: dict[str, Any], tokens: int = N, batch: int = 1) -> Counts:
    layer = ecoformer.create_attention(name, D, H, **options)
    ledger = cost(nn.Sequential(layer), (batch, tokens, D))
    assert ledger.uncounted == ()
    (own,) = (row.counts for row in ledger.rows if row.kind == name)
    return own


@pytest.mark.parametrize(("name", "options", "each"), BY_HAND, ids=str)
def test_by_hand(name: str, options: dict[str, Any], each: tuple[int, int]) -> None:
    assert core(name, options) == Counts(mul=each[0], add=each[1]) * (N * H)
    assert core(name, options, batch=3) == core(name, options) * 3


def test_padding_to_whole_chunks_and_blocks_counts() -> None:
    assert core("reformer", {"bucket_size": 4}, 17) == core("reformer", {"bucket_size": 4}, 24)
    assert core("combiner", {"block": 6}, 13) == core("combiner", {"block": 6}, 18)


def test_every_mechanism_has_a_rule() -> None:
    for name in ecoformer.list_attentions():
        core(name, {"seq_len": N} if name == "linformer" else {})


def test_more_tokens_than_linformer_was_built_for() -> None:
    with pytest.raises(ValueError, match=r"cannot take an input of .* built for seq_len=19, got N=20"):
        core("linformer", {"seq_len": 19})


def printed(ledger: Ledger) -> tuple[float, float, float]:
    return tuple(round(x / 1e9, 2) for x in (ledger.total.mul, ledger.total.add, ledger.energy_pj))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("performer", {"features": 256}, (0.83, 0.84, 3.83)),
        ("linformer", {"k": 256}, (0.81, 0.81, 3.74)),
        ("reformer", {"bucket_size": 64, "rounds": 2}, (0.54, 0.54, 2.49)),
    ],
)
def test_fits_the_long_range_arena(
    name: str, options: dict[str, Any], expected: tuple[float, float, float]
) -> None:
    encoder = TextEncoder(attention=name, attention_config=options, classes=0)
    assert printed(cost(encoder, torch.zeros(1, 4096, dtype=torch.long))) == expected


def test_fits_pvt() -> None:
    with torch.device("meta"):
        models = {n: timm.create_model("ecoformer_pvt_v2_b0", attention=n) for n in ("performer", "bi_eco")}
    ledgers = {name: cost(model, (1, 3, 224, 224)) for name, model in models.items()}
    assert printed(ledgers["performer"]) == (0.94, 0.94, 4.33)
    assert [round(x / 1e9, 3) for x in (ledgers["bi_eco"].total.mul, ledgers["bi_eco"].total.add)] == [
        0.626,
        0.815,
    ]


@pytest.mark.parametrize(("local", "taps"), [(7, 7), ((3, 5), 15)])
def test_a_local_branch_counts(local: Any, taps: int) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = ecoformer.create_attention("eco", D, H, local=local)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attn(x, grid=(4, 5))
            return out

    ledger = cost(Layer(), (2, N, D))
    (branch,) = (row for row in ledger.rows if row.kind == "LocalBranch")
    assert branch.counts == Counts(mul=2 * N * D * taps, add=2 * N * D * taps)
    assert branch.part == "attention"
    assert ledger.uncounted == ()
