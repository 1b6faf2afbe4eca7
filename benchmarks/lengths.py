"""Time and memory against the number of tokens, and the length from which hashed attention overtakes SDPA.

    python benchmarks/lengths.py [--graphs] [--device cpu|cuda]

writes results/lengths_cpu.json or lengths_gpu.json, and a picture of times and memory under docs/figures.
The crossover is looked for at several batches, heads and channels; with `--graphs` by CUDA graphs as well as
by plain calls, whose launches it hangs on. The result file is written anew after each.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from record import RESULTS, write_result

from ecoformer.benchmarking.attention import MECHANISMS, bench_attention
from ecoformer.benchmarking.crossover import find_crossover
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.plot import plot_lengths
from ecoformer.benchmarking.results import Run

FIGURES = RESULTS.parent / "docs" / "figures"
DRAWN = (1, 8, 64)
"""Batch, heads and channels of the picture."""
LENGTHS = {"cpu": [64 << k for k in range(8)], "cuda": [256 << k for k in range(8)]}
CROSSED = {
    "cpu": [(1, 1, 32), (16, 1, 32), (1, 8, 64)],
    "cuda": [(256, 1, 32), (32, 1, 32), (256, 5, 64), (1, 8, 64)],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of all, besides plain calls")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each contestant at each length")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = f"lengths_{'gpu' if device.type == 'cuda' else device.type}"
    run = timed(device, options.graphs, options.seconds)
    FIGURES.mkdir(exist_ok=True)
    plot_lengths(run, FIGURES / f"{name}.svg")
    figures: dict[str, Any] = {"lengths": [row.to_dict() for row in run.rows], "crossover": []}
    write_result(name, figures)
    ways = [False, True] if options.graphs else [False]
    for graphs, backward, shape in itertools.product(ways, (False, True), CROSSED[device.type]):
        figures["crossover"].append(crossed(device, shape, backward, graphs))
        write_result(name, figures)


def setting(
    device: torch.device, shape: tuple[int, int, int], tokens: int, *, backward: bool, graphs: bool
) -> Setting:
    batch, heads, dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Setting((batch, heads, tokens, dim), dtype, device, backward=backward, graphs=graphs)


def timed(device: torch.device, graphs: bool, seconds: float) -> Run:
    settings = [setting(device, DRAWN, n, backward=False, graphs=graphs) for n in LENGTHS[device.type]]
    return bench_attention(settings, MECHANISMS, seconds=seconds, progress=print)


def crossed(
    device: torch.device, shape: tuple[int, int, int], backward: bool, graphs: bool
) -> dict[str, Any]:
    found = find_crossover(setting(device, shape, 16, backward=backward, graphs=graphs))
    print(shape, "backward" if backward else "forward", "graphs" if graphs else "calls", found, flush=True)
    batch, heads, dim = shape
    how = {"batch": batch, "heads": heads, "channels": dim, "backward": backward, "graphs": graphs}
    return how | found.to_dict()


if __name__ == "__main__":
    main()
