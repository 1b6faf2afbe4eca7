"""Hashed attention by the kernels of this machine against SDPA and plain PyTorch, on random tokens.

    python benchmarks/attention.py                          # on a CPU
    python benchmarks/attention.py forward causal --device cuda

    forward   the operator: four groups of four bits, key weights, separate queries and keys
    backward  forward, and the gradients of all its inputs
    causal    forward in causal order
    eco       hash functions and the paper's affinity, from tokens to output
    integer   from the int32 sums of a projection and int8 values to int8 outputs
    lengths   forward over the number of tokens

Writes results/operator.json, or operator_cuda.json. A time is the median of `torch.utils.benchmark`: elapsed
(`ms`), and processor time of all threads (`cpu_ms`); on a GPU that of a CUDA graph by `triton.testing`.
Outputs and gradients are compared with those of eager PyTorch in fp32 first; integers bit for bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from record import write_result
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from ecoformer import KernelHasher, affinity, hash_attention, use_kernels
from ecoformer.ops.integer import integer_attention, integer_levels, integer_multiplier, pack_signs

SHAPES = {
    "cpu": ["1,1,3136,32", "16,1,3136,32", "1,5,196,32", "1,8,49,32", "1,8,16384,64"],
    "cuda": ["256,1,3136,32", "32,1,3136,32", "256,5,196,64", "1,8,65536,64"],
}
ERROR_OF_HASHING = 1e-2
"""Rounding flips the bits of a few tokens, which lie next to a hyperplane."""
KINDS = ("forward", "backward", "causal", "eco", "integer", "lengths")
LENGTHS = [(1, 8, 64 << k, 64) for k in range(7)]
BITS = 16
ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest relative error; rounding may flip a few codes of `eco`."""
Shape = tuple[int, ...]
Call = Callable[[], list[Tensor]]


class Problem:
    """Random inputs of one shape, and the calls on them that are compared."""

    def __init__(self, kind: str, shape: Shape, device: str) -> None:
        self.kind, self.shape, self.device = kind, shape, device
        self.is_causal, self.backward = kind == "causal", kind == "backward"
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(device)

        batch, heads, tokens, channels = shape
        self.q, self.k, self.v, self.grad = (drawn(*shape).to(self.dtype) for _ in range(4))
        self.y = [drawn(batch, heads, tokens, BITS).to(self.dtype) for _ in range(2)]
        self.exponent = drawn(batch, heads, tokens).round()
        beta = torch.sigmoid(drawn(heads, BITS // 4))
        self.f = affinity.grouped(beta, torch.softmax(drawn(heads, BITS // 4), -1), BITS)
        if kind == "eco":
            self.hasher = KernelHasher(heads, channels, BITS).to(device)
            self.hasher.fitted.fill_(True)  # no warning: random hash functions take the same time
        if kind == "integer":
            self.sums = (100 * drawn(batch * tokens, 2 * heads * BITS)).int()
            self.least = torch.zeros(2 * heads * BITS, dtype=torch.int32, device=device)
            self.fixed = (integer_levels(self.f), integer_multiplier(torch.ones(heads, device=device)))
            self.values = (40 * self.v.float()).round().clamp(-127, 127).to(torch.int8)

    def sdpa(self) -> Call:
        """Softmax attention by PyTorch."""
        return self._call([self.q, self.k, self.v], self._softmax)

    def hashed(self, kernels: str, wide: bool = False) -> Call:
        """The kind's call by "eager", "cpu" or "triton"; in fp32 if `wide`."""
        attend: Callable[..., Tensor] = self._hashed
        given = [*self.y, self.v, self.f, torch.exp2(self.exponent)]
        if self.kind == "eco":
            attend, given = self._eco, [self.q, self.v]
        elif self.kind == "integer":
            attend, given = self._integer, []
        return self._call([x.float() for x in given] if wide else given, attend, kernels)

    def check(self, kernels: str) -> None:
        """Refuse to time what is wrong."""
        for x, y in zip(self.hashed(kernels)(), self.hashed("eager", wide=True)(), strict=True):
            error = float((x.detach().float() - y.detach().float()).norm() / y.detach().float().norm())
            bound = {"integer": 0.0, "eco": ERROR_OF_HASHING}.get(self.kind, ERROR[self.dtype])
            if not error <= bound:
                raise RuntimeError(f"{self.kind} by {kernels} at {self.shape}: error {error:.1e}")

    def _call(self, given: list[Tensor], attend: Callable[..., Tensor], kernels: str | None = None) -> Call:
        leaves = [x.detach().requires_grad_(self.backward) for x in given]

        def run() -> list[Tensor]:
            with torch.set_grad_enabled(self.backward):
                out = attend(*leaves)
                if not self.backward:
                    return [out]
                return [out, *torch.autograd.grad(out, leaves, self.grad.to(out.dtype))]

        def work() -> list[Tensor]:
            if kernels is None:
                return run()
            with use_kernels(kernels):
                return run()

        return work

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

    def _hashed(self, q: Tensor, k: Tensor, v: Tensor, f: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = hash_attention(q, k, v, f, key_weight=weight, is_causal=self.is_causal)
        return out

    def _eco(self, q: Tensor, v: Tensor) -> Tensor:
        codes = self.hasher(q)
        out: Tensor = hash_attention(codes, codes, v, bits=BITS)
        return out

    def _integer(self) -> Tensor:
        batch, heads, tokens, _ = self.shape
        codes = pack_signs(self.sums, self.least, BITS).view(batch, tokens, 2, heads)
        q, k = (x.transpose(1, 2) for x in codes.unbind(2))
        return integer_attention(q, k, self.values, *self.fixed, self.exponent.to(torch.int8))


def median_ms(call: Callable[[], object], device: str, seconds: float, graph: bool = False) -> float:
    """Milliseconds of a call, on a GPU with `graph` of its CUDA graph."""
    if device == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph  # type: ignore[import-untyped]

        bench = do_bench_cudagraph if graph else do_bench
        return float(bench(call, rep=int(1e3 * seconds), return_mode="median"))
    return _median_ms(call, seconds, time.perf_counter)


def _median_ms(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads(), timer=clock)
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3


def kernels_of(device: str) -> str:
    """The kernels of a device, which must run."""
    name = {"cpu": "cpu", "cuda": "triton"}[device]
    reason = import_module(f"ecoformer.ops.{name}").unavailable(torch.device(device))
    if reason is not None:
        raise SystemExit(f"{name} kernels do not run: {reason}")
    return name


def measure(kind: str, shape: Shape, device: str, seconds: float) -> dict[str, Any]:
    """Times of a call by SDPA, eager PyTorch and the kernels."""
    problem, kernels = Problem(kind, shape, device), kernels_of(device)
    problem.check(kernels)
    calls = {"sdpa": problem.sdpa(), "eager": problem.hashed("eager"), "kernels": problem.hashed(kernels)}
    row: dict[str, Any] = {"kind": kind, "shape": shape}
    row["ms"] = {name: median_ms(call, device, seconds, graph=True) for name, call in calls.items()}
    if device == "cpu":
        row["cpu_ms"] = {n: _median_ms(call, seconds, time.process_time) for n, call in calls.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="default: all; on a GPU the first four")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", help="B,H,N,D")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, given = options.device, options.shapes
    kinds = options.kinds or KINDS[: 4 if device == "cuda" else None]
    if not set(kinds) <= set(KINDS):
        raise SystemExit(f"kinds are {', '.join(KINDS)}, got {' '.join(kinds)}")
    rows: list[dict[str, Any]] = []
    figures = {"threads": torch.get_num_threads(), "rows": rows}
    for kind in kinds:
        named = [tuple(map(int, text.split(","))) for text in given or SHAPES[device]]
        for shape in LENGTHS if kind == "lengths" else named:
            rows.append(measure(kind, shape, device, options.seconds))
            print(rows[-1], flush=True)
    print("wrote", write_result("operator" if device == "cpu" else "operator_cuda", figures))


if __name__ == "__main__":
    main()
