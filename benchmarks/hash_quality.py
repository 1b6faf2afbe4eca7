"""How well hashers keep attention's neighbours, on real tokens that fitting has not seen.

    python benchmarks/hash_quality.py

fits every hasher on image patches and text bytes with several seeds and writes results/hash_quality.json.
The seeds draw support samples, hyperplanes and random starts; tokens stay the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import torch
from record import write_result
from rich.console import Console
from rich.table import Table
from tokens import image_tokens, text_tokens
from torch import Tensor

from ecoformer import FitOptions, Hasher, KernelHasher, KlshHasher, LshHasher, SignHasher
from ecoformer.data.samples import sample_text

BITS = 16
METHODS: dict[str, tuple[Callable[[int], Hasher], FitOptions]] = {
    "learned": (lambda dim: KernelHasher(1, dim, BITS), FitOptions()),
    "learned, start only": (lambda dim: KernelHasher(1, dim, BITS), FitOptions(steps=0)),
    "learned, random support": (lambda dim: KernelHasher(1, dim, BITS), FitOptions(support="random")),
    "learned, cosine target": (lambda dim: KernelHasher(1, dim, BITS), FitOptions(target="cosine")),
    "released solver": (lambda dim: KernelHasher(1, dim, BITS), FitOptions.released()),
    "KLSH": (lambda dim: KlshHasher(1, dim, BITS), FitOptions()),
    "LSH": (lambda dim: LshHasher(1, dim, BITS), FitOptions()),
    "sign": (lambda dim: SignHasher(1, dim, BITS), FitOptions()),
    "sign of Fourier features": (lambda dim: SignHasher(1, dim, BITS, features="fourier"), FitOptions()),
}


def token_sets(samples: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens to fit on and tokens to judge by: other strips of the images, other files of the text."""
    text = sample_text()
    half = len(text) // 2
    return {
        "image patches": (
            image_tokens(samples, seed=0, part=0),
            image_tokens(samples, seed=1, part=1),
        ),
        "image patches, not normalised": (
            image_tokens(samples, seed=0, part=0, normalise=False),
            image_tokens(samples, seed=1, part=1, normalise=False),
        ),
        "text bytes": (
            text_tokens(text[:half], samples, seed=0),
            text_tokens(text[half:], samples, seed=1),
        ),
    }


def measure(method: str, fit_on: Tensor, judge_by: Tensor, seeds: int) -> dict[str, Any]:
    make, options = METHODS[method]
    objectives, recalls, correlations, seconds = [], [], [], []
    for seed in range(seeds):
        hasher = make(fit_on.shape[-1])
        start = time.perf_counter()
        hasher.fit(fit_on, seed=seed, options=options)
        seconds.append(time.perf_counter() - start)
        quality = hasher.quality(judge_by)
        # Relative to H = 0, codes without information, so that token sets can be compared.
        n = judge_by.shape[2]
        objectives.append(quality.objective / (2 * quality.neighbours * n * BITS**2))
        recalls.append(quality.recall)
        correlations.append(quality.correlation)
    return {
        "method": method,
        "objective": mean(objectives),
        "objective_std": stdev(objectives),
        "recall": mean(recalls),
        "recall_std": stdev(recalls),
        "correlation": mean(correlations),
        "correlation_std": stdev(correlations),
        "fit_seconds": mean(seconds),
    }


def ahead(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether "learned" leads every other method by more than the larger spread of the two."""
    ours, others = rows[0], [row for row in rows if not row["method"].startswith("learned")]
    return {
        "objective": all(
            row["objective"] - ours["objective"] > max(row["objective_std"], ours["objective_std"])
            for row in others
        ),
        "recall": all(
            ours["recall"] - row["recall"] > max(row["recall_std"], ours["recall_std"]) for row in others
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16, help="images or texts to fit on, and to judge by")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    console = Console()
    figures = []
    for name, (fit_on, judge_by) in token_sets(arguments.samples).items():
        rows = [measure(method, fit_on, judge_by, arguments.seeds) for method in METHODS]
        figures.append({"tokens": name, "shape": list(fit_on.shape), "rows": rows, "ahead": ahead(rows)})
        table = Table(title=f"{name}, {arguments.seeds} seeds, {BITS} bits")
        for column in (
            "hasher",
            "objective (lower is better)",
            "recall of top 10",
            "correlation",
            "seconds to fit",
        ):
            table.add_column(column)
        for row in rows:
            table.add_row(
                row["method"],
                f"{row['objective']:.3f} ± {row['objective_std']:.3f}",
                f"{row['recall']:.3f} ± {row['recall_std']:.3f}",
                f"{row['correlation']:.3f} ± {row['correlation_std']:.3f}",
                f"{row['fit_seconds']:.2f}",
            )
        console.print(table)
        console.print(f"learned ahead of all others by more than the spread: {ahead(rows)}")
    print(write_result("hash_quality", figures))


if __name__ == "__main__":
    main()
