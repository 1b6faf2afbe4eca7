"""What the affinity of groups of bits costs against the paper's, in one run.

    python benchmarks/affinity.py [--device cpu|cuda] [--seconds 1]

times `eco_attention` from tokens to output with 16 bits, hashing included, by the fused backend of the
device: on a CPU the forward pass, on a GPU forward and backward, full and causal, as CUDA graphs. Outputs are
compared with the reference first; what the backend leaves to eager has no time. Writes
results/affinity_cpu.json or affinity_gpu.json.
"""

from __future__ import annotations

import argparse
import itertools
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
SHAPES = {
    "cpu": [(1, 1, 3136, 32), (16, 1, 3136, 32), (1, 5, 196, 32), (1, 8, 49, 32), (1, 8, 16384, 64)],
    "cuda": [(256, 1, 3136, 32), (32, 1, 3136, 32), (256, 5, 196, 64), (1, 8, 65536, 64)],
}
COMPARED = 512
"""Tokens that the dense reference computes."""


def compare(name: str, backend: str, hasher: Hasher, inputs: list[Tensor], setting: Setting) -> Check:
    q, v = (x[:2, :, :COMPARED] for x in (inputs[0], inputs[2]))
    affinity, causal = AFFINITIES[name], setting.is_causal
    with torch.set_grad_enabled(setting.backward), warnings.catch_warnings():
        warnings.simplefilter("error")  # that the backend leaves the call to eager
        tokens = q.detach().requires_grad_(setting.backward)
        out = eco_attention(tokens, v, hasher, is_causal=causal, affinity=affinity, backend=backend)
    with torch.no_grad():
        codes = hasher(q.float()).double()
        groups = (affinity.groups, affinity.beta, affinity.weight)
        truth = reference.grouped_attention(codes, codes, v.double(), *groups, None, causal)
    return Check(relative_error([out], [truth]), bound_of(setting.dtype, False), "the reference in fp64")


def work_of(name: str, hasher: Hasher, inputs: list[Tensor], setting: Setting, backend: str) -> Work:
    q, v = (inputs[i].detach().requires_grad_(setting.backward) for i in (0, 2))
    attend = partial(eco_attention, q, v, hasher, is_causal=setting.is_causal, affinity=AFFINITIES[name])
    if setting.backward:
        return Work(lambda: torch.autograd.grad(attend(), (q, v), inputs[3]), backend)
    return Work(torch.no_grad()(attend), backend)


def measure(setting: Setting, seconds: float) -> dict[str, Any]:
    layer: Any = build_layer("eco", setting)
    hasher = layer.hasher
    inputs = draw_inputs(setting, [hasher])
    if setting.device.type == "cuda":  # as the heads of a projection lie in memory
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    backend = hashed_backends([hasher], setting.device, setting.backward, setting.dtype)[0]
    rows = [Row(name, backend, {}) for name in AFFINITIES]
    for row in rows:
        row.checked = row.check(partial(compare, row.mechanism, backend, hasher, inputs, setting))
    bench = Bench(setting.device, seconds, graphs=setting.device.type == "cuda", memory=False)
    bench.measure(rows, [work_of(row.mechanism, hasher, inputs, setting, backend) for row in rows])
    ms = {row.mechanism: row.timing.median_ms for row in rows if row.timing}
    return {
        "shape": setting.shape,
        "causal": setting.is_causal,
        "backward": setting.backward,
        "backend": backend,
        "quiet": bench.run.quiet,
        "ms": ms,
        "times the paper": {name: round(taken / ms["paper"], 3) for name, taken in ms.items()},
        "error": {row.mechanism: row.checked.error for row in rows if row.checked},
        "failure": {row.mechanism: row.failure for row in rows if row.failure},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each affinity at each shape")
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    ways = itertools.product((False, True), (False, True)) if gpu else [(False, False)]
    figures = []
    for causal, backward in ways:
        for shape in SHAPES[device.type]:
            figures.append(measure(Setting(shape, dtype, device, causal, backward), options.seconds))
            print(figures[-1], flush=True)
            write_result("affinity_gpu" if gpu else "affinity_cpu", figures)


if __name__ == "__main__":
    main()
