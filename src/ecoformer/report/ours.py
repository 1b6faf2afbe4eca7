"""Our figures for the paper's tables: from a printed row to figures by column."""

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

_NAMES = {"msa": "softmax", "transformer": "softmax", "twins_svt_s": "twins_svt_small"}


@cache
def vision_ledger(model: str, mechanism: str, classes: int, **settings: Any) -> Ledger:
    """The paper's accounting of a converted timm model at 224 x 224."""
    options = {"attention": mechanism, "attention_config": settings, "num_classes": classes}
    with torch.device("meta"):
        built = import_timm().create_model(f"ecoformer_{model}", **options)
    return cost(built, (1, 3, 224, 224))


def figure2() -> list[dict[str, Any]]:
    """Energy in pJ of attention, FFN and the rest of PVTv2-B0 to B4, as in the paper's figure 2."""
    rows = []
    for mechanism in ("softmax", "eco"):
        for model in (f"pvt_v2_b{i}" for i in range(5)):
            ledger = vision_ledger(model, mechanism, 1000)
            parts = {part: share * ledger.energy_pj for part, share in ledger.shares().items()}
            rows.append({"model": model, "mechanism": mechanism, **parts})
    return rows


def _vision(row: Row, *, classes: int, part: str = "total") -> Figures:
    model, method = (row.get(key, usual) for key, usual in (("model", "pvt_v2_b0"), ("method", "eco")))
    settings = {"k": 96} if method == "linformer" else {}
    if "m" in row:
        settings["support"] = int(row["m"])
    ledger = vision_ledger(_NAMES.get(model, model), _NAMES.get(method, method), classes, **settings)
    return _figures(ledger, ledger.total if part == "total" else ledger.of("attention"))


def _text(row: Row) -> Figures:
    """The Long Range Arena's encoder, without its head, at 4096 tokens."""
    from ecoformer.models.text import TextEncoder

    with torch.device("meta"):
        encoder = TextEncoder(attention=_NAMES.get(row["method"], row["method"]), classes=0)
    ledger = cost(encoder, torch.zeros(1, 4096, dtype=torch.long, device="meta"))
    return _figures(ledger, ledger.total)


def _figures(ledger: Ledger, counts: Counts) -> Figures:
    energy = ledger.energy.energy_pj(counts)
    return {"mul_b": counts.mul / 1e9, "add_b": counts.add / 1e9, "energy_bpj": energy / 1e9}


def _operation(row: Row) -> Figures:
    """Energy by our tables, which have no areas."""
    precision, kind = row["operation"].split("_")
    return {"energy_pj": energy_table(f"{precision}-45nm").pj[kind]}


def _bitfusion(row: Row) -> Figures:
    ours = next(each for each in printed_table() if each["method"] == row["method"])
    return {"latency_ms": ours["latency_ms"], "energy": ours["energy_nj"]}


_IMAGENET, _CIFAR = partial(_vision, classes=1000), partial(_vision, classes=100)
TABLES: dict[str, tuple[str, Callable[[Row], Figures]]] = {
    "operation_energy_45nm": ("Energy and area of operations at 45 nm", _operation),
    "imagenet_main": ("ImageNet-1K: main results", _IMAGENET),
    "attention_only": ("Attention layers alone", partial(_IMAGENET, part="attention")),
    "imagenet_from_scratch": ("ImageNet-1K: trained from scratch", _IMAGENET),
    "throughput": ("Throughput on a GPU", lambda _: {}),
    "long_range_arena": ("Long Range Arena", _text),
    "cifar100_attentions": ("CIFAR-100: efficient attentions in PVTv2-B0", _CIFAR),
    "cifar100_binarization": ("CIFAR-100: quantisation against hashing", _CIFAR),
    "cifar100_hash_functions": ("CIFAR-100: hash functions in PVTv2-B0", _CIFAR),
    "cifar100_support_samples": ("CIFAR-100: support samples m in PVTv2-B0", _CIFAR),
    "bitfusion": ("An attention layer on BitFusion", _bitfusion),
}
"""Title of each table, and how we compute its figures."""
