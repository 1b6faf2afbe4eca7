"""Time and memory of learning hash functions, against the dense way of the released code.

    python benchmarks/fit_speed.py

learns 16 bits of one head with 100 steps a bit, batch 2, in one run: with a dense residual, summed over all
pairs of tokens or (its best form) by matrix-vector products, and with ours. Then fits N = 16,384 tokens in a
process of its own and reads its peak memory. Writes results/fit_speed.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from record import peak_memory_mb, write_result
from tokens import text_tokens
from torch import Tensor

from ecoformer import FitOptions, KernelHasher, reference
from ecoformer.data.samples import sample_text
from ecoformer.hashing.pairs import SparseLabels, find_pairs
from ecoformer.hashing.solver import learn_bits

BITS, STEPS, BATCH, DIM, LONG = 16, 100, 2, 32, 16_384
Score = Callable[[Tensor, Tensor], Tensor]


def seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def dense(tokens: Tensor, score: Score) -> Tensor:
    """Dense labels and residual, at the released settings; from tokens to weights (m, b)."""
    unit = reference.unit(tokens[:, 0])
    labels = reference.pairwise_labels(unit, 10)
    generator = torch.Generator().manual_seed(1)
    return reference.learn_bits(features_of(unit), labels, BITS, STEPS, score=score, generator=generator)


def features_of(unit: Tensor) -> Tensor:
    """Zero-mean kernel features (B, N, 25) of unit tokens (B, N, D)."""
    flat = unit.flatten(0, 1)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    distances = reference.squared_distances(unit, flat[order[:25]])
    kernel = torch.exp(-distances / (2 * distances.mean()))
    return kernel - kernel.mean(dim=(0, 1))


def check(tokens: Tensor) -> float:
    """Share of bits on which the dense and the sparse way agree, from the same start at the same settings."""
    unit = reference.unit(tokens[:, 0]).double()
    features = features_of(unit)
    ours = learn_bits(
        features.unsqueeze(0),
        SparseLabels(find_pairs(unit.unsqueeze(0), 10)),
        BITS,
        FitOptions.released(),
        torch.Generator().manual_seed(1),
    )[0]
    theirs = reference.learn_bits(
        features, reference.pairwise_labels(unit, 10), BITS, STEPS, starts=same_starts(features.shape[-1])
    )
    same = reference.sign(features @ ours) == reference.sign(features @ theirs)
    return float(same.double().mean())


def same_starts(m: int) -> Tensor:
    """The random starts (m, b) that the solver draws bit by bit from seed 1."""
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(1, m, generator=generator, dtype=torch.float64)[0] for _ in range(BITS)]
    return torch.stack(draws, dim=1)


def fit_long() -> None:
    """Run in a process of its own: fit a long sequence and print seconds and peak memory in MB."""
    tokens = text_tokens(sample_text(), 1, length=LONG, dim=DIM)
    start = time.perf_counter()
    KernelHasher(1, DIM, BITS).fit(tokens, options=FitOptions(steps=STEPS))
    print(time.perf_counter() - start, peak_memory_mb())


def compare(length: int, repeats: int, by_pairs: bool) -> dict[str, object]:
    """Seconds of all ways at one number of tokens; no time is given unless they agree."""
    tokens = text_tokens(sample_text(), BATCH, length=length, dim=DIM)
    agreement = check(tokens)
    if agreement < 0.999:
        raise SystemExit(f"the ways disagree on {1 - agreement:.2%} of the bits: no time is reported")
    hasher = KernelHasher(1, DIM, BITS)
    times = {"dense, matrix-vector": seconds(lambda: dense(tokens, reference.bit_score), repeats)}
    if by_pairs:
        times["dense, all pairs"] = seconds(lambda: dense(tokens, reference.bit_score_by_pairs), 1)
    ours = seconds(lambda: hasher.fit(tokens, options=FitOptions.released()), repeats)
    times["ours, released settings"] = ours
    times["ours, default"] = seconds(lambda: hasher.fit(tokens), repeats)
    print(f"N = {length}, batch {BATCH}; bits that agree: {agreement:.4%}")
    for name, value in times.items():
        print(f"  {name:26s} {value:7.2f} s   {value / times['ours, default']:6.2f} x ours")
    return {"tokens": length, "bits_that_agree": agreement, "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.long:
        fit_long()
        return
    rows = [compare(784, arguments.repeats, by_pairs=True), compare(3136, 1, by_pairs=False)]
    output = subprocess.run([sys.executable, __file__, "--long"], check=True, capture_output=True, text=True)
    long_seconds, long_megabytes = map(float, output.stdout.split())
    print(f"N = {LONG}, batch 1: ours {long_seconds:.1f} s, {long_megabytes:.0f} MB at the peak")
    figures = {
        "setting": {"bits": BITS, "steps_a_bit": STEPS, "batch": BATCH, "head_dim": DIM, "threads": 2},
        "rows": rows,
        "long": {"tokens": LONG, "batch": 1, "seconds": long_seconds, "peak_rss_mb": long_megabytes},
    }
    print(write_result("fit_speed", figures))


if __name__ == "__main__":
    main()
