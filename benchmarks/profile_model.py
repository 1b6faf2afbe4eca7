"""Where a compiled model spends its time on a CUDA device, kernel by kernel.

    python benchmarks/profile_model.py eco --resolution 512 --batch 32

converts a PVTv2-B0 with random weights, compiles it (bf16 autocast, channels last) and adds up the time of
its kernels over a few forwards. Writes results/gpu_profile.json.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from record import write_result
from torch import nn

import ecoformer

FORWARDS = 5
SHOWN = 28
"""How many of the longest kernels are listed."""


def build(attention: str, images: torch.Tensor) -> nn.Module:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("pvt_v2_b0").to(images.device)
    if attention != "softmax":
        ecoformer.convert(model, attention)
        ecoformer.fit_hashers(model, [images[:4]])
    return model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def kernels(model: nn.Module, images: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    """Microseconds per forward, and calls, by kernel name."""
    compiled = torch.compile(model)
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            compiled(images)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(FORWARDS):
                compiled(images)
            torch.cuda.synchronize()
    for event in found.events() or []:
        if event.device_type.name == "CUDA":
            microseconds[event.name] += event.device_time / FORWARDS
            calls[event.name] += 1
    return microseconds, calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attention", choices=ecoformer.list_attentions())
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_model.py needs a CUDA device")
    shape = (options.batch, 3, options.resolution, options.resolution)
    images = torch.randn(shape, device="cuda").to(memory_format=torch.channels_last)
    microseconds, calls = kernels(build(options.attention, images), images)
    rows: list[dict[str, Any]] = [
        {"us": round(us, 1), "calls": calls[name] // FORWARDS, "kernel": name[:120]}
        for name, us in microseconds.most_common(SHOWN)
    ]
    for row in rows:
        print(f"{row['us']:9.1f} us {row['calls']:3d} x {row['kernel']}")
    figures = {**vars(options), "total_us": round(microseconds.total()), "kernels": rows}
    print(write_result("gpu_profile", figures))


if __name__ == "__main__":
    main()
