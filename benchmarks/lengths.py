"""Time and memory against the number of tokens, and the length where hashed attention overtakes SDPA.

    python benchmarks/lengths.py [--graphs] [--device cpu|cuda]

writes results/lengths_cpu.json or lengths_gpu.json, and a plot of time and memory under docs/figures.
It looks for the crossover at several batches, heads and channels, with `--graphs` by CUDA graphs as well as
by calls, where it depends on kernel launches. The result file is written again after each.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from record import RESULTS, write_result

from ecoformer.benchmarking.attention import (
    MECHANISMS,
    Setting,
    bench_attention,
    crossover_sentence,
    find_crossover,
    plot_lengths,
)
from ecoformer.benchmarking.measuring import Bench

FIGURES = RESULTS.parent / "docs" / "figures"
DRAWN = (1, 8, 64)
"""Batch, heads and channels of the plot."""
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
    parser.add_argument("--graphs", action="store_true", help="also time CUDA graphs")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each contestant at each length")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = f"lengths_{'gpu' if device.type == 'cuda' else device.type}"
    settings = [setting(device, DRAWN, tokens, False) for tokens in LENGTHS[device.type]]
    run = bench_attention(
        settings, MECHANISMS, Bench(device, options.seconds, options.graphs, progress=print)
    )
    FIGURES.mkdir(exist_ok=True)
    plot_lengths(run, FIGURES / f"{name}.svg")
    figures: dict[str, Any] = {"lengths": [row.to_dict() for row in run.rows], "crossover": []}
    write_result(name, figures)
    ways = [False, True] if options.graphs else [False]
    for graphs, backward, shape in itertools.product(ways, (False, True), CROSSED[device.type]):
        figures["crossover"].append(crossed(device, shape, backward, graphs))
        write_result(name, figures)


def setting(device: torch.device, shape: tuple[int, int, int], tokens: int, backward: bool) -> Setting:
    batch, heads, dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Setting((batch, heads, tokens, dim), dtype, device, backward=backward)


def crossed(
    device: torch.device, shape: tuple[int, int, int], backward: bool, graphs: bool
) -> dict[str, Any]:
    found = find_crossover(setting(device, shape, 16, backward), Bench(device, 0.2, graphs))
    how = f"{'backward' if backward else 'forward'} {'graphs' if graphs else 'calls'}"
    print(shape, how, crossover_sentence(found), flush=True)
    batch, heads, dim = shape
    about = {"batch": batch, "heads": heads, "channels": dim, "backward": backward, "graphs": graphs}
    return about | found


if __name__ == "__main__":
    main()
