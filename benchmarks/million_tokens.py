"""Time and memory of one head over a million tokens, forward and backward.

    python benchmarks/million_tokens.py

runs each order in a process of its own on two threads and writes results/million_tokens.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from record import peak_memory_mb, write_result

from ecoformer import hash_attention

TOKENS, DIM, BITS = 1_000_000, 32, 16


def run(is_causal: bool) -> None:
    """Print seconds and peak memory in MB, which includes the inputs and their gradients."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (2, 1, 1, TOKENS, BITS), generator=generator, dtype=torch.int8)
    codes_q, codes_k = ((2 * part - 1).float().requires_grad_() for part in codes)
    v = torch.randn(1, 1, TOKENS, DIM, generator=generator).requires_grad_()
    start = time.perf_counter()
    hash_attention(codes_q, codes_k, v, is_causal=is_causal).square().mean().backward()  # type: ignore[no-untyped-call]
    print(time.perf_counter() - start, peak_memory_mb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", choices=("full", "causal"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run == "causal")
        return
    figures = {"tokens": TOKENS, "head_dim": DIM, "bits": BITS, "dtype": "float32", "threads": 2}
    for order in ("full", "causal"):
        command = [sys.executable, __file__, "--run", order]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, megabytes = map(float, output.split())
        print(f"{order:7s} {seconds:5.1f} s, {megabytes:5.0f} MB at the peak")
        figures[order] = {"seconds": seconds, "peak_rss_mb": megabytes}
    print(write_result("million_tokens", figures))


if __name__ == "__main__":
    main()
