"""Images a second, and joules an image, of models with each kind of attention.

    python benchmarks/models.py throughput --device cuda
    python benchmarks/models.py gpu_models_sharp --models pvt_v2_b0 --device cuda --compile --amp \\
        --mechanisms native softmax eco sharp_eco --cases 224,256 512,64 1024,16
    python benchmarks/models.py gpu_models_compiled --models pvt_v2_b0 --device cuda --compile --amp \\
        --energy --mechanisms softmax explicit performer eco --cases 224,256 224,32 512,32

The defaults are the paper's table: softmax on all tokens (its MSA), Performer and eco at batch 32, in fp32.
"native" is the model as timm has it, "explicit" forms the N x N matrix. Hashed attention runs in plain
PyTorch and by the device's kernels. Weights are random; speed does not depend on them.

Times are medians of `torch.utils.benchmark` on a CPU and of `triton.testing` on a GPU. A model is timed after
its first output was compared with a plain run of the same model, by eager PyTorch in fp32. Writes
results/NAME.json.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from attention import kernels_of, median_ms
from record import write_result
from torch import Tensor, nn

from ecoformer import convert, use_kernels
from ecoformer.attention import SoftmaxAttention
from ecoformer.hashing import hashers_of
from ecoformer.third_party import import_timm

PAPER = ["pvt_v2_b0", "pvt_v2_b1", "pvt_v2_b2", "twins_svt_small"]
ERROR = {False: 1e-2, True: 1e-1}
"""Largest relative error of an output, in fp32 and under autocast, including codes that rounding flips."""


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool) -> Tensor:
    """Softmax attention with its N x N matrix in memory."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out: Tensor = scores.softmax(-1) @ v
    return out


def contestants(model: nn.Module, name: str, device: str, size: int) -> Iterator[tuple[str, nn.Module]]:
    """The converted model, with hashed attention once in eager PyTorch and once by kernels."""
    made = copy.deepcopy(model)
    if name != "native":
        mechanism = "softmax" if name == "explicit" else name
        convert(made, mechanism, example=torch.randn(1, 3, size, size))
    if name == "explicit":
        for layer in made.modules():
            if isinstance(layer, SoftmaxAttention):
                layer.attend = explicit  # type: ignore[method-assign, assignment]
    made = made.to(device)
    hashers = hashers_of(made)
    for hasher in hashers.values():
        hasher.fitted.fill_(True)  # no warning: random hash functions take the same time
    usual = {"softmax": "sdpa", "explicit": "N x N matrix"}.get(name, "eager")
    for backend in ("eager", kernels_of(device)) if hashers else (usual,):
        yield backend, made


def step(model: Callable[[Tensor], Tensor], images: Tensor, options: argparse.Namespace) -> Tensor:
    """One inference, or one forward and backward."""
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=options.amp)
    with half, torch.set_grad_enabled(options.train):
        out = model(images)
    if options.train:
        out.float().square().mean().backward()  # type: ignore[no-untyped-call]
    return out


def measure(
    model: nn.Module, name: str, *, size: int, batch: int, meter: Any, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each backend: images a second, or why there are none."""
    images = torch.randn(batch, 3, size, size, device=options.device)
    if options.channels_last:
        images = images.to(memory_format=torch.channels_last)
    for backend, made in contestants(model, name, options.device, size):
        made = made.train(options.train)
        row: dict[str, Any] = {"mechanism": name, "backend": backend + ", compiled" * options.compile}
        row |= {"resolution": size, "batch": batch, "train": options.train, "autocast": options.amp}
        hashed = bool(hashers_of(made))
        try:
            torch.compiler.reset()
            call = partial(step, torch.compile(made) if options.compile else made, images, options)
            with use_kernels(backend) if hashed else nullcontext():
                if not options.train:
                    with torch.no_grad(), use_kernels("eager"):
                        truth = made(images[:1])
                    error = float((call()[:1].float() - truth).norm() / truth.norm())
                    if not error <= ERROR[options.amp]:
                        raise RuntimeError(f"{name} by {backend}: error {error:.1e}")
                    row["error"] = error
                graph = options.device == "cuda" and not options.train
                ms = median_ms(call, options.device, options.seconds, graph)
                row |= {"median_ms": ms, "images_per_s": 1e3 * batch / ms}
                if meter is not None:
                    row["energy"] = meter.measure(call, batch)
        except torch.OutOfMemoryError:
            row["failure"] = "out of memory"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", help="of the result file")
    parser.add_argument("--models", nargs="+", default=PAPER, help="of timm")
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "performer", "eco"])
    parser.add_argument("--cases", nargs="+", default=["224,32"], help="pixels,batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each model")
    parser.add_argument("--threads", type=int, default=2)
    for flag, about in (
        ("--train", "forward and backward instead of inference, not compared first"),
        ("--compile", "by torch.compile"),
        ("--amp", "under autocast to bf16"),
        ("--channels-last", "images channels last"),
        ("--energy", "also joules, by Zeus"),
    ):
        parser.add_argument(flag, action="store_true", help=about)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    meter = None
    if options.energy:
        from ecoformer.accounting.measured import EnergyMeter

        meter = EnergyMeter(torch.device(options.device))
    figures: dict[str, Any] = {}
    for model_name in options.models:
        for size, batch in (map(int, case.split(",")) for case in options.cases):
            torch.manual_seed(0)
            sized = {} if model_name.startswith("pvt") else {"img_size": size}
            model = import_timm().create_model(model_name, **sized).eval()
            part = f"{size}, batch {batch}" + ", training" * options.train
            if len(options.models) > 1:
                part = f"{model_name}, {part}"
            one = partial(measure, model, size=size, batch=batch, meter=meter, options=options)
            rows = [row for name in options.mechanisms for row in one(name)]
            base = next((row.get("median_ms") for row in rows if row["mechanism"] == "softmax"), None)
            for row in rows:
                row["ratio_to_sdpa"] = base / row["median_ms"] if base and "median_ms" in row else None
                print(model_name, row, flush=True)
            figures[part] = {"rows": rows}
            write_result(options.name, figures)


if __name__ == "__main__":
    main()
