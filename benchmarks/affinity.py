"""What the affinity of groups of bits costs on a CPU against the paper's, in one run.

    python benchmarks/affinity.py [--seconds 1]

times `eco_attention` from tokens to output with 16 bits, hashing included, by the CPU kernels: the forward
pass. Outputs are compared with the reference first; what the backend leaves to eager has no time. Writes
results/affinity_cpu.json. `gpu_affinity.py` is its counterpart on a GPU.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from typing import Any

import torch
from record import write_result
from torch import Tensor

from ecoformer import Affinity, eco_attention, reference
from ecoformer.benchmarking import Row, Work
from ecoformer.benchmarking.attention import Setting, build_layer, draw_inputs
from ecoformer.benchmarking.contestants import bound_of, hashed_backends, relative_error
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.results import Check
from ecoformer.hashing import Hasher

BITS = 16
AFFINITIES = {"paper": Affinity.paper(BITS), "4 groups of 4": Affinity(4), "2 groups of 8": Affinity(2)}
SHAPES = [(1, 1, 3136, 32), (16, 1, 3136, 32), (1, 5, 196, 32), (1, 8, 49, 32), (1, 8, 16384, 64)]
COMPARED = 512
"""Tokens that the dense reference computes."""


def compare(affinity: Affinity, backend: str, hasher: Hasher, q: Tensor, v: Tensor) -> Check:
    q, v = (x[:2, :, :COMPARED] for x in (q, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the backend leaves the call to eager
        out = eco_attention(q, v, hasher, affinity=affinity, backend=backend)
    codes = hasher(q).double()
    groups = (affinity.groups, affinity.beta, affinity.weight)
    truth = reference.grouped_attention(codes, codes, v.double(), *groups, None)
    return Check(relative_error([out], [truth]), bound_of(q.dtype, False), "the reference in fp64")


@torch.no_grad()
def measure(setting: Setting, seconds: float) -> dict[str, Any]:
    layer: Any = build_layer("eco", setting)
    hasher = layer.hasher
    q, _, v, _ = draw_inputs(setting, [hasher])
    backend = hashed_backends([hasher], setting.device, needs_grad=False)[0]
    rows = [Row(name, backend, {}) for name in AFFINITIES]
    for row, affinity in zip(rows, AFFINITIES.values(), strict=True):
        row.checked = row.check(partial(compare, affinity, backend, hasher, q, v))
    bench = Bench(setting.device, seconds, memory=False)
    attend = partial(eco_attention, q, v, hasher)
    bench.measure(rows, [Work(partial(attend, affinity=each), backend) for each in AFFINITIES.values()])
    ms = {row.mechanism: row.timing.median_ms for row in rows if row.timing}
    return {
        "shape": setting.shape,
        "backend": backend,
        "quiet": bench.run.quiet,
        "ms": ms,
        "times the paper": {name: round(taken / ms["paper"], 3) for name, taken in ms.items()},
        "error": {row.mechanism: row.checked.error for row in rows if row.checked},
        "failure": {row.mechanism: row.failure for row in rows if row.failure},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each affinity at each shape")
    options = parser.parse_args()
    figures = []
    for shape in SHAPES:
        figures.append(measure(Setting(shape, torch.float32, torch.device("cpu")), options.seconds))
        print(figures[-1], flush=True)
        write_result("affinity_cpu", figures)


if __name__ == "__main__":
    main()
