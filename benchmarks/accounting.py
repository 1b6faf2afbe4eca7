"""The paper's accounting beside what is executed, for PVTv2-B0 at 224 x 224.

    python benchmarks/accounting.py

writes results/accounting.json: counts and energy of softmax and hashed attention, by both accountings and
with three prices of memory. Nothing is timed, and nothing depends on the machine.
"""

from __future__ import annotations

from typing import Any

import torch
from record import write_result

import ecoformer
from ecoformer.accounting import energy_table

IMAGE = (1, 3, 224, 224)
TABLES = ("fp32-45nm", "fp32-45nm-sram", "fp32-45nm-dram")


def figures_of(mechanism: str) -> dict[str, Any]:
    """Both accountings of one mechanism."""
    import timm  # after ecoformer, which mends a torchvision that lacks its operators

    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention=mechanism)
    found: dict[str, Any] = {}
    for accounting in ("paper", "exact"):
        ledger = ecoformer.cost(model, IMAGE, accounting=accounting)
        energies = {name: energy_table(name).energy_pj(ledger.total) for name in TABLES}
        parts = {part: ledger.of(part).to_dict() for part in ("attention", "ffn", "other")}
        found[accounting] = {"total": ledger.total.to_dict(), "parts": parts, "energy_pj": energies}
    return found


def main() -> None:
    figures: dict[str, Any] = {mechanism: figures_of(mechanism) for mechanism in ("softmax", "eco")}
    savings = {
        accounting: {
            name: 1
            - figures["eco"][accounting]["energy_pj"][name]
            / figures["softmax"][accounting]["energy_pj"][name]
            for name in TABLES
        }
        for accounting in ("paper", "exact")
    }
    for accounting, row in savings.items():
        print(accounting, {name: f"{saving:.1%}" for name, saving in row.items()})
    print(f"wrote {write_result('accounting', figures | {'savings': savings})}")


if __name__ == "__main__":
    main()
