"""Hashed attention from tokens to output against SDPA, eager PyTorch and other mechanisms, on random tokens.

    python benchmarks/attention.py kernels backward integer lengths        # on a CPU
    python benchmarks/attention.py kernels affinity energy --device cuda

    kernels   forward; on a GPU also backward and causal, as CUDA graphs and as calls
    backward  forward and backward of eco and sharp_eco, CPU time of one thread
    integer   sharp_eco on int8 values and packed codes, against its fp32 kernel
    lengths   time over tokens, and from how many tokens on eco is faster than SDPA
    affinity  groups of bits, and codes from projections, against the paper's affinity
    energy    joules of a call, by Zeus

Every part writes one file under results/, such as cpu_kernels.json or gpu_affinity.json. Times are medians of
`torch.utils.benchmark` on a CPU and of `triton.testing` on a GPU. Before a hashed call is timed, its output
and gradients are compared with those of eager PyTorch in fp32; integer kernels are compared bit for bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from record import write_result
from torch import Tensor
from torch.utils.benchmark import Timer

from ecoformer import create_attention, eco_attention
from ecoformer.attention import HashedAttention
from ecoformer.backends import integer
from ecoformer.backends.choice import available, use_backend

SHAPES = {
    "cpu": ["1,1,3136,32", "16,1,3136,32", "1,5,196,32", "1,8,49,32", "1,8,16384,64"],
    "cuda": ["256,1,3136,32", "32,1,3136,32", "256,5,196,64", "1,8,262144,64"],
}
CROSSED = [(1, 1, 32), (16, 1, 32), (1, 8, 64)]
ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest relative error; rounding may flip a few codes."""
Shape = tuple[int, ...]
Call = Callable[[], list[Tensor]]


class Setting:
    """Random q, k, v and a gradient, and calls on them."""

    def __init__(self, shape: Shape, device: str, is_causal: bool = False, backward: bool = False) -> None:
        self.shape, self.device, self.is_causal, self.backward = shape, device, is_causal, backward
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randn(shape, generator=generator).to(device, self.dtype) for _ in range(4)]

    def call(self, mechanism: str, backend: str, **options: Any) -> Call:
        """Attention by one mechanism, which has been checked; `backend` may be "compiled"."""
        _, heads, tokens, dim = self.shape
        if mechanism == "linformer":
            options["seq_len"] = tokens
        if mechanism == "explicit":
            return self._work(explicit, self.tokens)
        layer: Any = create_attention(mechanism, heads * dim, heads, **options)
        layer = layer.to(self.device).eval().requires_grad_(False)
        if not isinstance(layer, HashedAttention):
            return self._work(layer.to(self.dtype).attend, self.tokens)
        layer.hasher.fitted.fill_(True)  # no warning: random hash functions take the same time
        q, k, v, grad = self.tokens
        attend, given = layer.attend, [q, q, v, grad]
        if mechanism == "sharp_eco":  # takes projections of b channels, and weights of keys
            attend = partial(attend, key_weight=torch.ones(v.shape[:-1], device=self.device))
            given[:2] = [x[..., : layer.hasher.head_dim] for x in (q, k)]
        run = torch.compile(attend, dynamic=False) if backend == "compiled" else attend
        found = self._work(run, given, "eager" if backend == "compiled" else backend)
        wide = [x.float() for x in given]
        wide[1] = wide[0] if given[1] is q else wide[1]
        pairs = zip(found(), self._work(attend, wide, "eager")(), strict=True)
        error = max(float((x - y).detach().norm() / y.detach().norm()) for x, y in pairs)
        if not error <= ERROR[self.dtype]:
            raise RuntimeError(f"{mechanism} by {backend} at {self.shape}: error {error:.1e}")
        return found

    def _work(self, attend: Callable[..., Tensor], given: list[Tensor], backend: str | None = None) -> Call:
        q, k, v = (x.detach().requires_grad_(self.backward) for x in given[:3])
        k = q if given[0] is given[1] else k
        leaves = [q, v] if k is q else [q, k, v]

        def work() -> list[Tensor]:
            with use_backend(backend), torch.set_grad_enabled(self.backward):
                out = attend(q, k, v, None, self.is_causal)
                return [out, *torch.autograd.grad(out, leaves, given[3])] if self.backward else [out]

        return work


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool) -> Tensor:
    """Softmax attention with its N x N matrix in memory."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out: Tensor = scores.softmax(-1) @ v
    return out


def median_ms(call: Callable[[], object], device: str, seconds: float, graph: bool = False) -> float:
    """Milliseconds of a call, on a GPU with `graph` of its CUDA graph."""
    if device == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph  # type: ignore[import-untyped]

        if graph:
            return float(do_bench_cudagraph(call, rep=int(1e3 * seconds), return_mode="median"))
        return float(do_bench(call, rep=int(1e3 * seconds), return_mode="median"))
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3


def thread_ms(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of CPU time of one thread, which depend less on what else the machine does."""
    timer = Timer("call()", globals={"call": call}, num_threads=1, timer=time.thread_time)
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3


def kernels_cpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    rows = []
    for shape in shapes:
        setting = Setting(shape, "cpu")
        calls = {"sdpa": setting.call("softmax", "sdpa")}
        calls |= {name: setting.call("eco", name) for name in ("eager", "cpu")}
        ms = {name: median_ms(call, "cpu", seconds) for name, call in calls.items()}
        ratios = {f"{name} / cpu": ms[name] / ms["cpu"] for name in ("sdpa", "eager")}
        rows.append({"shape": shape, "in a row": {"median_ms": ms, "ratios": ratios}})
        print(rows[-1], flush=True)
    return "cpu_kernels", {"threads": torch.get_num_threads(), "dtype": "fp32", "attention": rows}


def kernels_gpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    source = torch.randn(1 << 30, device="cuda")
    copy = median_ms(partial(torch.empty_like(source).copy_, source), "cuda", seconds)
    figures: Any = {"ceilings": {"rows": [{"copy_tb_per_s": 2 * source.nbytes / copy / 1e9}]}}
    for part, is_causal in (("time", False), ("causal", True)):
        rows = figures.setdefault(part, {"rows": []})["rows"]
        for backward in (False, True):
            for shape in shapes:
                setting = Setting(shape, "cuda", is_causal, backward)
                calls = {"triton": setting.call("eco", "triton"), "eager": setting.call("eco", "eager")}
                if shape[2] < 100_000:
                    calls["sdpa"] = setting.call("softmax", "sdpa")
                    if not is_causal:
                        calls["compiled"] = setting.call("eco", "compiled")
                row = {"shape": shape, "causal": is_causal, "backward": backward}
                for key, graph in (("ms", True), ("called_ms", False)):
                    row[key] = {n: median_ms(call, "cuda", seconds, graph) for n, call in calls.items()}
                # Queries, values and output once; backward reads them and the gradient, writes two gradients.
                row["floor_bytes"] = setting.tokens[0].nbytes * (3 + 5 * backward)
                rows.append(row)
                print(row, flush=True)
    return "gpu_kernels", figures


def backward_cpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    rows = []
    torch.set_num_threads(1)
    for shape in shapes:
        setting, row = Setting(shape, "cpu", backward=True), dict[str, Any](shape=shape)
        for name in ("eco", "sharp_eco"):
            ms = {each: thread_ms(setting.call(name, each), seconds) for each in ("eager", "cpu")}
            row[name] = {"median_ms": ms, "eager / cpu": ms["eager"] / ms["cpu"]}
        rows.append(row)
        print(row, flush=True)
    return "cpu_backward", {"threads": 1, "clock": "CPU time of the thread", "attention": rows}


def integer_cpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    rows, threads = [], torch.get_num_threads()
    for shape in shapes:
        row: Any = {"shape": shape}
        torch.set_num_threads(threads)
        calls = integer_calls(shape)
        for count, clock in ((threads, "elapsed"), (1, "CPU time")):
            torch.set_num_threads(count)
            measure = thread_ms if count == 1 else lambda call, s: median_ms(call, "cpu", s)
            with torch.no_grad():
                ms = {name: measure(call, seconds) for name, call in calls.items()}
            ratios = {f"fp32 / {name}": ms["fp32"] / ms[name] for name in ms if name != "fp32"}
            what = f"{count} threads, {clock}" if count > 1 else f"1 thread, {clock}"
            row[what] = {"median": {"ms": ms, "ratios": ratios}}
        rows.append(row)
        print(row, flush=True)
    return "cpu_integer", {"attention": rows}


def integer_calls(shape: Shape) -> dict[str, Callable[[], Any]]:
    """Heads of sharp_eco in fp32, from packed codes, and with packing from the int32 sums of a product."""
    batch, heads, tokens, channels = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(batch, tokens, *sizes, generator=generator)

    layer: Any = create_attention("sharp_eco", heads * channels, heads).requires_grad_(False)
    hasher, affinity = layer.hasher, layer.affinity()
    bits = hasher.bits
    q, k = (x.transpose(1, 2) for x in drawn(2, heads, bits).unbind(2))
    v, exponent = drawn(heads, channels).transpose(1, 2), drawn(heads).round().transpose(1, 2)
    sums = (100 * drawn(2 * heads * bits)).int().flatten(0, 1)
    least = torch.zeros(2 * heads * bits, dtype=torch.int32)
    scale, ratio = affinity.levels(bits, affinity.beta)
    levels = integer.integer_levels(scale, ratio, affinity.size(bits))
    fixed = (levels, integer.integer_multiplier(torch.ones(heads)), exponent.to(torch.int8))
    values = (40 * v).round().clamp(-127, 127).to(torch.int8)

    def packed() -> list[Tensor]:
        both = integer.pack_signs(sums, least, bits).view(batch, tokens, 2, heads)
        return [codes.transpose(1, 2) for codes in both.unbind(2)]

    def attend(codes: list[Tensor]) -> Tensor:
        return integer.integer_attention(codes[0], codes[1], values, *fixed)

    codes = packed()
    out = attend(codes)
    with use_backend("eager"):
        if not (all(map(torch.equal, codes, packed())) and torch.equal(out, attend(codes))):
            raise RuntimeError(f"the integer kernels differ from eager at {shape}")
    options: Any = {"k": k, "key_weight": torch.exp2(exponent), "affinity": affinity, "backend": "cpu"}
    return {
        "fp32": lambda: eco_attention(q, v, hasher, **options),
        "integer": lambda: attend(codes),
        "integer, packing": lambda: attend(packed()),
    }


def lengths_cpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    """Up to the number of tokens of the longest shape."""
    longest = max(shape[2] for shape in shapes)
    rows: list[dict[str, Any]] = []
    names = [("softmax", "sdpa"), ("performer", "eager"), ("linformer", "eager")]
    names += [("eco", name) for name in available("cpu")]
    for tokens in (64 << k for k in range(8) if 64 << k <= longest):
        setting = Setting((1, 8, tokens, 64), "cpu")
        for mechanism, backend in names:
            ms = median_ms(setting.call(mechanism, backend), "cpu", seconds)
            about: Any = {"mechanism": mechanism, "backend": backend, "shape": setting.shape}
            rows.append(about | {"median_ms": ms})
    crossed = []
    for backward in (False, True):
        for batch, heads, channels in CROSSED:
            about = {"batch": batch, "heads": heads, "channels": channels, "backward": backward}
            found = crossover((batch, heads, channels), backward, seconds, longest)
            crossed.append(about | {"tokens": found})
            print(crossed[-1], flush=True)
    return "lengths_cpu", {"lengths": rows, "crossover": crossed}


def crossover(sizes: tuple[int, int, int], backward: bool, seconds: float, longest: int) -> int | None:
    """The number of tokens, to ten percent, from which eco is faster than SDPA; None if it is not."""

    def is_faster(tokens: int) -> bool:
        setting = Setting((*sizes[:2], tokens, sizes[2]), "cpu", backward=backward)
        sdpa = median_ms(setting.call("softmax", "sdpa"), "cpu", seconds)
        return sdpa > min(median_ms(setting.call("eco", n), "cpu", seconds) for n in available("cpu"))

    faster = 16
    while not is_faster(faster):
        faster *= 2
        if faster > longest:
            return None
    slower = faster // 2
    while faster > 1.1 * slower + 1:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if is_faster(middle) else (middle, faster)
    return faster


def affinity_gpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    rows = []
    for is_causal in (False, True):
        for backward in (False, True):
            for shape in shapes:
                setting = Setting(shape, "cuda", is_causal, backward)
                calls = {"paper": setting.call("eco", "triton"), "signs": setting.call("sharp_eco", "triton")}
                calls["4x4"] = setting.call("eco", "triton", groups=4)
                us = {name: 1e3 * median_ms(call, "cuda", seconds, True) for name, call in calls.items()}
                ratios = {name: us[name] / us["paper"] for name in us}
                about = {"shape": shape, "causal": is_causal, "backward": backward}
                rows.append(about | {"us": us, "ratio": ratios})
                print(rows[-1], flush=True)
    return "gpu_affinity", {"time": rows}


def energy_gpu(shapes: Sequence[Shape], seconds: float) -> tuple[str, Any]:
    from ecoformer.accounting.measured import EnergyMeter

    meter, rows = EnergyMeter(torch.device("cuda")), []
    setting = Setting(shapes[0], "cuda")
    names = [("softmax", "sdpa"), ("explicit", "N x N matrix"), ("performer", "eager")]
    for name in (*names, ("eco", "eager"), ("eco", "triton")):
        about = {"mechanism": name[0], "backend": name[1], "shape": setting.shape}
        rows.append(about | {"energy": meter.measure(setting.call(*name))})
    return "gpu_energy", {"notes": [meter.note], "rows": rows}


PARTS: dict[tuple[str, str], Callable[[Sequence[Shape], float], tuple[str, Any]]] = {
    ("kernels", "cpu"): kernels_cpu,
    ("backward", "cpu"): backward_cpu,
    ("integer", "cpu"): integer_cpu,
    ("lengths", "cpu"): lengths_cpu,
    ("kernels", "cuda"): kernels_gpu,
    ("affinity", "cuda"): affinity_gpu,
    ("energy", "cuda"): energy_gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", help="B,H,N,D")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in options.shapes or SHAPES[options.device]]
    for part in options.parts:
        torch.set_num_threads(options.threads)
        if (part, options.device) not in PARTS:
            raise SystemExit(f"no part {part!r} on {options.device}: see --help")
        name, figures = PARTS[part, options.device](shapes, options.seconds)
        print("wrote", write_result(name, figures))


if __name__ == "__main__":
    main()
