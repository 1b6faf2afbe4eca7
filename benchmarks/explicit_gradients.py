"""Gradients of the compiled N x N matrix in bf16, next to those of plain PyTorch.

    python benchmarks/explicit_gradients.py [--device cuda] [--batches 64,200,224,256]

One layer as in PVTv2-B0's first stage (dim 32, 3136 tokens): relative errors of the output and of each
gradient against fp32, which is computed in parts of 16 samples. Writes results/gpu_explicit_gradients.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from record import write_result
from torch import Tensor

from ecoformer.benchmarking.contestants import ExplicitAttention

TOKENS, DIM = 3136, 32


def results_of(layer: Any, call: Any, x: Tensor, part: int | None, half: bool) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters."""
    layer.zero_grad(set_to_none=True)
    outputs = []
    for piece in [x] if part is None else torch.split(x, part):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = call(piece)
        (out.float().square().sum() / x.numel()).backward()
        outputs.append(out.detach().float())
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"output": torch.cat(outputs), **gradients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="64,200,224,256")
    options = parser.parse_args()
    torch.manual_seed(0)
    layer = ExplicitAttention(DIM, 1).to(options.device)
    figures: dict[str, Any] = {}
    for batch in map(int, options.batches.split(",")):
        x = torch.randn(batch, TOKENS, DIM, device=options.device)
        truth = results_of(layer, layer, x, 16, False)
        torch._dynamo.reset()
        calls = {"plain": layer, "compiled": torch.compile(layer)}
        errors = {}
        for name, call in calls.items():
            found = results_of(layer, call, x, None, True)
            errors[name] = {key: float((found[key] - y).norm() / y.norm()) for key, y in truth.items()}
        figures[str(batch)] = {"elements": batch * TOKENS**2, **errors}
        print(batch, figures[str(batch)], flush=True)
    print(write_result("gpu_explicit_gradients", {"one layer, by batch": figures}))


if __name__ == "__main__":
    main()
