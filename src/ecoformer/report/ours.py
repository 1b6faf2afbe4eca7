"""Our figures for the paper's tables: from printed rows to figures by column."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ecoformer.accounting import Counts, Ledger, cost, energy_table
from ecoformer.bitfusion import printed_table
from ecoformer.third_party import import_timm

Row = dict[str, str]
Figures = dict[str, float]

_MECHANISMS = {"msa": "softmax", "transformer": "softmax"}
_MODELS = {"twins_svt_s": "twins_svt_small"}


@cache
def vision_ledger(model: str, mechanism: str, classes: int, **settings: Any) -> Ledger:
    """The paper's accounting of a converted timm model at 224 x 224."""
    options = {"attention": mechanism, "attention_config": settings, "num_classes": classes}
    with torch.device("meta"):
        built = import_timm().create_model(f"ecoformer_{model}", **options)
    return cost(built, (1, 3, 224, 224))


@cache
def text_ledger(mechanism: str) -> Ledger:
    """The paper's accounting of the Long Range Arena's encoder, without its head, at 4096 tokens."""
    from ecoformer.models.text import TextEncoder

    with torch.device("meta"):
        encoder = TextEncoder(attention=mechanism, classes=0)
    return cost(encoder, torch.zeros(1, 4096, dtype=torch.long, device="meta"))


def _figures(counts: Counts, ledger: Ledger) -> Figures:
    energy = ledger.energy.energy_pj(counts)
    return {"mul_b": counts.mul / 1e9, "add_b": counts.add / 1e9, "energy_bpj": energy / 1e9}


def _mechanism(row: Row) -> str:
    name = row.get("method", "eco")
    return _MECHANISMS.get(name, name)


def _vision(rows: list[Row], *, classes: int, attention_alone: bool = False) -> list[Figures]:
    found = []
    for row in rows:
        model, mechanism = row.get("model", "pvt_v2_b0"), _mechanism(row)
        settings = {"k": 96} if mechanism == "linformer" else {}
        if "m" in row:
            settings["support"] = int(row["m"])
        ledger = vision_ledger(_MODELS.get(model, model), mechanism, classes, **settings)
        found.append(_figures(ledger.of("attention") if attention_alone else ledger.total, ledger))
    return found


def _text(rows: list[Row]) -> list[Figures]:
    ledgers = [text_ledger(_mechanism(row)) for row in rows]
    return [_figures(ledger.total, ledger) for ledger in ledgers]


def _operations(rows: list[Row]) -> list[Figures]:
    """Energies of our tables, which have no areas."""
    kinds = [row["operation"].split("_") for row in rows]
    return [{"energy_pj": energy_table(f"{precision}-45nm").pj[kind]} for precision, kind in kinds]


def _bitfusion(rows: list[Row]) -> list[Figures]:
    ours = {row["method"]: row for row in printed_table()}
    found = [ours[row["method"]] for row in rows]
    return [{"latency_ms": row["latency_ms"], "energy": row["energy_nj"]} for row in found]


OURS: dict[str, Callable[[list[Row]], list[Figures]]] = {
    "operation_energy_45nm": _operations,
    "imagenet_main": partial(_vision, classes=1000),
    "attention_only": partial(_vision, classes=1000, attention_alone=True),
    "imagenet_from_scratch": partial(_vision, classes=1000),
    "long_range_arena": _text,
    "cifar100_attentions": partial(_vision, classes=100),
    "cifar100_binarization": partial(_vision, classes=100),
    "cifar100_hash_functions": partial(_vision, classes=100),
    "cifar100_support_samples": partial(_vision, classes=100),
    "bitfusion": _bitfusion,
}
"""By table; of tables that are not here we compute nothing."""
