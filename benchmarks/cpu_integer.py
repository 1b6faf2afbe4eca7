"""Integer attention on the CPU against the fp32 kernel, with two threads, in one run.

    python benchmarks/cpu_integer.py [--seconds 6] [--cpu-time]

Heads of `sharp_eco`: 16 bits in 4 groups, codes of queries and of keys, weights of keys, tensors as its
projections leave them, token by token. "fp32" hashes projections and attends, "integer" attends from packed
codes, "integer, packing" makes codes of the int32 sums of an int8 product first. The integer kernels are
compared with eager PyTorch bit for bit, then all are timed in turns, several calls in a row each. Twice:
elapsed time of two threads, and the CPU time of one, which depends less on what else the machine does. The
first decile of elapsed times is close to that of an idle machine; "load" is the load average before. Elapsed
times say nothing where others use the cores, as threads wait for each other: --cpu-time leaves them out.
Writes results/cpu_integer.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from record import write_result

from ecoformer.affinity import Affinity
from ecoformer.backends import integer
from ecoformer.backends.choice import use_backend
from ecoformer.functional import eco_attention
from ecoformer.hashing import SignHasher

SHAPES = [(16, 1, 3136, 32), (1, 8, 16384, 64), (1, 1, 3136, 32), (1, 5, 196, 32)]
THREADS = 2
BITS, GROUPS = 16, 4
CALLS = 8
Clock = Callable[[], float]


def contestants(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], Any]]:
    batch, heads, tokens, channels = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(batch, tokens, *sizes, generator=generator)

    beta, weight = (torch.rand(heads, GROUPS, generator=generator) * 0.9 + 0.05 for _ in range(2))
    affinity, hasher = Affinity(GROUPS, beta, weight), SignHasher(heads, BITS, surrogate="scaled")
    q, k = (x.transpose(1, 2) for x in drawn(2, heads, BITS).unbind(2))
    v = drawn(heads, channels).transpose(1, 2)
    exponent = (2 * drawn(heads)).round().clamp(-12, 12).transpose(1, 2)
    key_weight = torch.exp2(exponent)

    sums = (100 * drawn(2 * heads * BITS)).int().flatten(0, 1)
    least = torch.zeros(2 * heads * BITS, dtype=torch.int32)
    levels = integer.integer_levels(*affinity.levels(BITS, beta), BITS // GROUPS)
    multiplier = integer.integer_multiplier(torch.ones(heads))
    values = (40 * v).round().clamp(-127, 127).to(torch.int8)
    exponents = exponent.to(torch.int8)

    def packed() -> list[torch.Tensor]:
        both = integer.pack_signs(sums, least, BITS).view(batch, tokens, 2, heads)
        return [codes.transpose(1, 2) for codes in both.unbind(2)]

    def attend(codes: list[torch.Tensor]) -> torch.Tensor:
        return integer.integer_attention(codes[0], codes[1], values, levels, multiplier, exponents)

    codes = packed()
    out = attend(codes)
    with use_backend("eager"):
        if not (all(map(torch.equal, codes, packed())) and torch.equal(out, attend(codes))):
            raise RuntimeError(f"the kernels differ from eager at {shape}")
    return {
        "fp32": lambda: eco_attention(
            q, v, hasher, k=k, key_weight=key_weight, affinity=affinity, backend="cpu"
        ),
        "integer": lambda: attend(codes),
        "integer, packing": lambda: attend(packed()),
    }


def timed(calls: dict[str, Callable[[], Any]], seconds: float, clock: Clock) -> dict[str, Any]:
    """Milliseconds and ratios, in rounds of several calls each, whose first warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()
            for _ in range(CALLS):
                start = clock()
                call()
                times[name].append((clock() - start) * 1e3)
    found: dict[str, Any] = {}
    for kind, of in (("median", median), ("first decile", lambda each: quantiles(each, n=10)[0])):
        ms = {name: round(of(each), 4) for name, each in times.items()}
        ratios = {f"fp32 / {name}": round(ms["fp32"] / ms[name], 2) for name in ms if name != "fp32"}
        found[kind] = {"ms": ms, "ratios": ratios}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each shape and clock")
    parser.add_argument("--cpu-time", action="store_true", help="time one thread only")
    options = parser.parse_args()
    figures: dict[str, Any] = {"bits": BITS, "groups": GROUPS, "attention": []}
    for shape in SHAPES:
        row: dict[str, Any] = {"shape": shape, "load": round(os.getloadavg()[0], 2)}
        torch.set_num_threads(THREADS)
        with torch.no_grad():
            calls = contestants(shape)
            if not options.cpu_time:
                row[f"{THREADS} threads, elapsed"] = timed(calls, options.seconds, time.perf_counter)
            torch.set_num_threads(1)
            row["1 thread, CPU time"] = timed(calls, options.seconds, time.thread_time)
        figures["attention"].append(row)
        print(row, flush=True)
    print(write_result("cpu_integer", figures))


if __name__ == "__main__":
    main()
