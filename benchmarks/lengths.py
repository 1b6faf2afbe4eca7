"""Time and memory against the number of tokens, and the length where hashed attention overtakes SDPA.

    python benchmarks/lengths.py [--graphs] [--device cpu|cuda]

writes results/lengths_cpu.json or lengths_gpu.json, and a plot of time and memory under docs/figures.
It looks for the crossover at several batches, heads and channels, with `--graphs` by CUDA graphs as well as
by calls, where it depends on kernel launches. The result file is written again after each.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, write_result

from ecoformer.benchmarking import Row, Run
from ecoformer.benchmarking.attention import MECHANISMS, Setting, bench_attention
from ecoformer.benchmarking.measuring import Bench

FIGURES = RESULTS.parent / "docs" / "figures"
DRAWN = (1, 8, 64)
"""Batch, heads and channels of the plot."""
LENGTHS = {"cpu": [64 << k for k in range(8)], "cuda": [256 << k for k in range(8)]}
CROSSED = {
    "cpu": [(1, 1, 32), (16, 1, 32), (1, 8, 64)],
    "cuda": [(256, 1, 32), (32, 1, 32), (256, 5, 64), (1, 8, 64)],
}
SHORTEST, LONGEST = 16, 1 << 16
CLOSE = 1.1
"""Ratio of two lengths that timing cannot tell apart."""
CLEARLY = 2.0
"""Longer lengths are tried until eco is this many times as fast: it may win, lose again and win."""


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


def find_crossover(setting: Setting, bench: Bench, longest: int = LONGEST) -> dict[str, Any]:
    """Double the length until eco is clearly faster, then bisect after the last length where it was slower.

    Args:
        setting: batch, heads, channels and the rest; its number of tokens is ignored.
        bench: how to measure at each length.
        longest: where to give up.

    Returns:
        `tokens`, the length from which eco was faster (None: not even at the longest); `slower_at`, the
        longest length where it was not (None: always faster); `backend`, the faster one; `ratios`, the speed
        relative to SDPA at each length; `quiet`, whether no other program was seen to use the CPU.
    """
    batch, heads, _, dim = setting.shape
    best: dict[int, Row] = {}
    quiet = True

    def speed(tokens: int) -> float:
        nonlocal quiet
        at_length = replace(setting, shape=(batch, heads, tokens, dim))
        run = bench_attention([at_length], ("eco",), replace(bench, memory=False, energy=False))
        best[tokens] = max(run.rows[1:], key=lambda row: row.ratio_to_sdpa or 0.0)
        quiet = quiet and run.quiet
        ratio = best[tokens].ratio_to_sdpa
        if run.wrong or ratio is None:
            why = "; ".join(f"{row.label}: {row.failure}" for row in run.rows if row.failure)
            raise RuntimeError(f"nothing to compare at {at_length.shape}: {why}")
        return ratio

    slower, faster, tokens = None, None, min(SHORTEST, longest)
    while True:
        ratio = speed(tokens)
        if ratio <= 1:
            slower, faster = tokens, None
        elif faster is None:
            faster = tokens
        if tokens >= longest or ratio >= CLEARLY:
            break
        tokens = min(2 * tokens, longest)
    while faster and slower and faster - slower > 1 and faster / slower > CLOSE:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if speed(middle) > 1 else (middle, faster)
    return {
        "tokens": faster,
        "slower_at": slower,
        "backend": None if faster is None else best[faster].backend,
        "ratios": {length: best[length].ratio_to_sdpa for length in sorted(best)},
        "quiet": quiet,
    }


def crossover_sentence(found: dict[str, Any]) -> str:
    """A crossover in words."""
    ratios, slower, faster = found["ratios"], found["slower_at"], found["tokens"]
    busy = "" if found["quiet"] else "not reliable, the machine is busy: "
    if faster is None:
        return f"{busy}eco does not overtake SDPA up to N = {max(ratios):,}"
    eco = f"{busy}eco ({found['backend']})"
    if slower is None:
        return f"{eco} is faster than SDPA at every N from {faster:,} to {max(ratios):,}"
    speeds = f"{ratios[slower]:.2f} and {ratios[faster]:.2f} times as fast"
    return f"{eco} overtakes SDPA between N = {slower:,} and {faster:,} ({speeds})"


def plot_lengths(run: Run, path: Path) -> None:
    """Plot time and peak memory of each contestant against N."""
    from matplotlib.figure import Figure

    timed = sorted((row for row in run.rows if row.timing), key=_tokens)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    for index, label in enumerate(dict.fromkeys(row.label for row in run.rows if row.timing)):
        rows = [(_tokens(row), row.timing, row.peak_mb) for row in timed if row.label == label and row.timing]
        style = {"marker": "osD^vP*X"[index % 8], "color": f"C{index % 10}", "label": label}
        lengths = [tokens for tokens, _, _ in rows]
        times.plot(lengths, [timing.median_ms for _, timing, _ in rows], **style)
        low, high = [timing.low_ms for _, timing, _ in rows], [timing.high_ms for _, timing, _ in rows]
        times.fill_between(lengths, low, high, color=style["color"], alpha=0.2, linewidth=0)
        memory.plot(lengths, [mb for _, _, mb in rows], **style)
    how = run.rows[0].setting
    batch, heads, _, dim = how["shape"]
    passes = ("forward and backward" if how["backward"] else "forward") + (
        ", causal" if how["causal"] else ""
    )
    figure.suptitle(f"B = {batch}, H = {heads}, D = {dim}, {how['dtype']}, {passes}; {run.device}")
    ticks = sorted({_tokens(row) for row in run.rows})
    for axes, title in ((times, "milliseconds per call (quartiles shaded)"), (memory, "peak memory, MB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens N", title=title)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def _tokens(row: Row) -> int:
    return int(row.setting["shape"][2])


if __name__ == "__main__":
    main()
