"""Operations and energy: the paper's accounting, everything that is computed, int8, and BitFusion.

    python benchmarks/cost.py [accounting] [gains] [integer_energy] [bitfusion]

writes results/NAME.json for each of these names, or for all. Nothing but `gains --time` depends on the
machine: it measures the CPU time of one thread again. Without --time, the seconds stay those of the file,
with the commit and the machine that measured them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import RESULTS, write_result
from torch import Tensor, nn

import ecoformer
from ecoformer.accounting import Counts, energy_table
from ecoformer.accounting.ledger import by_width
from ecoformer.bitfusion import printed_table, simulate_model
from ecoformer.report.tables import list_tables, paper_table, printed_rows

SIDES = (224, 512, 1024)
MEMORIES = ("45nm", "45nm-sram", "45nm-dram", "7nm", "7nm-sram", "7nm-hbm", "7nm-dram")
MECHANISMS = ("native", "softmax", "eco", "sharp_eco")
ROUNDS = 7
"""Of timing."""
Example = dict[str, Tensor]


def pvt(mechanism: str, side: int = 224, device: str = "meta") -> nn.Module:
    """PVTv2-B0 as timm ships it or converted; counting does not depend on its weights."""
    import timm

    with torch.device(device):
        model: nn.Module = timm.create_model("pvt_v2_b0").eval()
        if mechanism != "native":
            ecoformer.convert(model, mechanism, example=torch.zeros(1, 3, side, side))
    return model


def energies(counts: Counts) -> dict[str, float]:
    """Picojoules with every memory."""
    return {name: energy_table(name).energy_pj(counts) for name in MEMORIES}


def accounting() -> dict[str, Any]:
    """How the paper's cells come out; what hashed attention saves of softmax's energy; and of native's."""
    rows: list[dict[str, Any]] = []
    parts: dict[str, dict[str, tuple[Counts, Counts]]] = {"paper": {}, "exact": {}}
    for side in SIDES:
        for mechanism in MECHANISMS:
            model, size = pvt(mechanism, side), (1, 3, side, side)
            paper, exact = (ecoformer.cost(model, size, accounting=how) for how in ("paper", "exact"))
            if side == SIDES[0]:
                for ledger in (paper, exact):
                    parts[ledger.accounting][mechanism] = ledger.of("attention"), ledger.total
            own = (mechanism, "KernelHasher", "SignHasher", "KeyWeights")
            names = [row for row in exact.rows if row.kind in own or ".key_weights" in row.name]
            hashed = sum((row.counts for row in names), Counts())
            rows.append(
                {
                    "resolution": side,
                    "mechanism": mechanism,
                    "paper": paper.energy_pj,
                    "exact": exact.energy_pj,
                    "attention": exact.energy.energy_pj(exact.of("attention")),
                    "hashed": exact.energy.energy_pj(hashed) if "eco" in mechanism else None,
                    "total": exact.total.to_dict(),
                    "energy_pj": energies(exact.total),
                }
            )
    statuses = Counter(cell.status for name in list_tables() for cell in paper_table(name).cells)
    return {
        "tables": dict(statuses),
        "savings_of_attention": {how: saved(found, 0)["45nm"] for how, found in parts.items()},
        "savings": {how: saved(found, 1) for how, found in parts.items()},
        "native": rows,
    }


def saved(found: dict[str, tuple[Counts, Counts]], part: int) -> dict[str, float]:
    """The share of softmax's energy that eco saves, with each memory at 45 nm."""
    eco, softmax = (energies(found[mechanism][part]) for mechanism in ("eco", "softmax"))
    return {name: 1 - eco[name] / softmax[name] for name in MEMORIES[:3]}


def integer_energy() -> list[dict[str, Any]]:
    """PVTv2-B0 after `ecoformer.quantize`, all layers that int8 can take."""
    rows = []
    for mechanism in MECHANISMS:
        model = pvt(mechanism, device="cpu")
        ecoformer.quantize(model, [torch.randn(1, 3, 64, 64)], max_error=math.inf, progress=False)
        for side in SIDES:
            total = ecoformer.cost(model, (1, 3, side, side), accounting="exact").total
            about = {"resolution": side, "mechanism": mechanism, "numbers": "int8"}
            rows.append(
                about | {"widths": by_width(total), "bytes": total.bytes, "energy_pj": energies(total)}
            )
    return sorted(rows, key=lambda row: row["resolution"])


def bitfusion() -> dict[str, Any]:
    """The paper's table beside ours, and PVTv2-B0 by mechanism; eco also by the bits of a code's bit."""
    printed = {row["method"]: row for row in printed_rows("bitfusion")}
    table = []
    for row in printed_table():
        theirs = printed[row["method"]]
        more = {"printed_latency_ms": float(theirs["latency_ms"]), "printed_energy": float(theirs["energy"])}
        table.append(row | more)

    def model(mechanism: str, code_bits: int | None = None) -> dict[str, Any]:
        result = simulate_model(pvt(mechanism), (1, 3, 224, 224), code_bits=code_bits)
        total = result.total
        return {
            "macs": result.macs,
            "cycles": total.cycles,
            "ms": total.latency_s * 1e3,
            "mj": total.energy_nj / 1e6,
            "attention": result.of("attention").energy_nj / total.energy_nj,
        }

    names = ("softmax", "performer", "linformer", "reformer", "eco")
    return {
        "table": table,
        "models": {name: model(name) for name in names},
        "eco_by_code_bits": {str(bits): model("eco", bits) for bits in (1, 2, 8)},
    }


def picture_model(name: str) -> Callable[[int], tuple[nn.Module, Example]]:
    def build(side: int) -> tuple[nn.Module, Example]:
        import timm

        size: dict[str, Any] = {} if name.startswith("pvt") else {"img_size": side}
        return timm.create_model(name, **size), {"x": torch.randn(1, 3, side, side)}

    return build


def text_model(tokens: int) -> tuple[nn.Module, Example]:
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = BertConfig(**sizes, intermediate_size=1536, max_position_embeddings=max(512, tokens))
    model: nn.Module = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    return model, {"input_ids": torch.randint(1000, (1, tokens))}


CASES: list[tuple[str, str, Callable[[int], tuple[nn.Module, Example]], tuple[int, ...]]] = [
    ("PVTv2-B0", "pixels", picture_model("pvt_v2_b0"), SIDES),
    ("ViT-S/16", "pixels", picture_model("vit_small_patch16_224"), SIDES),
    ("BERT, 6 layers of 384", "tokens", text_model, (128, 512, 4096)),
]


def gains(timed: bool) -> list[dict[str, Any]]:
    """Energy and CPU time against the model as it is: pictures and texts of three sizes each."""
    file = RESULTS / "gains.json"
    before = json.loads(file.read_text()) if file.exists() and not timed else {"figures": []}
    measured = {(row["model"], row["size"]): row for row in before["figures"]}
    rows = []
    for name, unit, build, sizes in CASES:
        for size in sizes:
            native, example = build(size)
            models = {mechanism: copy.deepcopy(native).eval() for mechanism in MECHANISMS}
            for mechanism in MECHANISMS[1:]:
                ecoformer.convert(models[mechanism], mechanism)
            energy = {m: ecoformer.cost(x, example, accounting="exact").energy_pj for m, x in models.items()}
            row = {"model": name, "size": size, "unit": unit, "energy_pj": energy}
            if timed:
                row["cpu_seconds"] = seconds_of(models, example)
            else:
                old = measured[name, size]
                at = {key: before[key] for key in ("commit", "hardware")}
                row |= {"cpu_seconds": old["cpu_seconds"], "timed_at": old.get("timed_at", at)}
            rows.append(row)
            ratios = (f"{m} {energy[m] / energy['native']:.2f}" for m in MECHANISMS)
            print(name, size, *ratios, flush=True)
    return rows


def seconds_of(models: dict[str, nn.Module], example: Example) -> dict[str, float]:
    """Median CPU seconds of a forward pass on one thread, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for turn in range(ROUNDS + 1):
            for name, model in models.items():
                start = time.process_time()
                model(**example)
                if turn:  # the first one warms up
                    seconds[name].append(time.process_time() - start)
    return {name: median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="accounting, gains, integer_energy, bitfusion; default: all")
    parser.add_argument("--time", action="store_true", help="measure CPU time, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*hash functions.*")
    makers: dict[str, Callable[[], Any]] = {
        "accounting": accounting,
        "gains": lambda: gains(options.time),
        "integer_energy": integer_energy,
        "bitfusion": bitfusion,
    }
    for name in options.names or makers:
        print(f"wrote {write_result(name, makers[name]())}")


if __name__ == "__main__":
    main()
