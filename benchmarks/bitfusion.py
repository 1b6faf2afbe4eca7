"""BitFusion: the paper's table, the entire layer, complete models, and where codes of 1 bit pay.

    python benchmarks/bitfusion.py

writes results/bitfusion.json. Nothing is timed, and nothing depends on the machine.
"""

from __future__ import annotations

from typing import Any

import torch
from record import write_result

import ecoformer
from ecoformer.bitfusion import (
    Total,
    printed_table,
    simulate,
    simulate_layer,
    simulate_model,
)
from ecoformer.operations import Product
from ecoformer.report.tables import printed_rows

IMAGE = (1, 3, 224, 224)
MECHANISMS = ("softmax", "performer", "linformer", "reformer", "eco")
# Hashed attention with codes of 16 bits, 3136 tokens and heads of 32 channels; and a read by few tokens.
CODES = {
    "sum over keys": (16, 3136, 32),
    "read": (3136, 16, 32),
    "denominator": (3136, 16, 1),
    "read by 16 tokens": (16, 16, 32),
}


def brief(total: Total) -> dict[str, Any]:
    """What the documents quote."""
    return {
        "cycles": total.cycles,
        "ms": total.latency_s * 1e3,
        "mj": total.energy_nj / 1e6,
        "stalls": total.stall_cycles / total.cycles,
        "dram": total.energy.dram / total.energy_nj,
        "buffers": total.energy.buffers / total.energy_nj,
        "array": total.energy.core / total.energy_nj,
    }


def table() -> list[dict[str, Any]]:
    """The paper's rows, with the printed figures."""
    printed = {row["method"]: row for row in printed_rows("bitfusion")}
    rows = []
    for row in printed_table():
        theirs = printed[row["method"]]
        more = {"printed_latency_ms": float(theirs["latency_ms"]), "printed_energy": float(theirs["energy"])}
        rows.append(row | more)
    return rows


def model(mechanism: str, code_bits: int | None = None) -> dict[str, Any]:
    """PVTv2-B0 with one mechanism."""
    import timm

    with torch.device("meta"):
        built = timm.create_model("pvt_v2_b0")
    ecoformer.convert(built, mechanism, example=torch.zeros(IMAGE, device="meta"))
    result = simulate_model(built, IMAGE, code_bits=code_bits)
    attention = result.of("attention")
    share = attention.energy_nj / result.total.energy_nj
    return brief(result.total) | {"macs": result.macs, "attention": share}


def codes() -> dict[str, Any]:
    """Products with codes, moved as 1, 2 and 8 bits."""
    found: dict[str, Any] = {}
    for name, (rows, inputs, outputs) in CODES.items():
        results = {bits: simulate(Product(rows, inputs, outputs), (bits, 8)) for bits in (1, 2, 8)}
        found[name] = {
            str(bits): {"cycles": result.cycles, "uj": result.energy_nj / 1e3}
            for bits, result in results.items()
        }
    return found


def main() -> None:
    layers = {name: brief(simulate_layer(name)) for name in ("softmax", "eco")}
    figures = {
        "table": table(),
        "layer": layers,
        "models": {name: model(name) for name in MECHANISMS},
        "eco_by_code_bits": {str(bits): model("eco", bits) for bits in (1, 2, 8)},
        "codes": codes(),
    }
    print(f"wrote {write_result('bitfusion', figures)}")


if __name__ == "__main__":
    main()
