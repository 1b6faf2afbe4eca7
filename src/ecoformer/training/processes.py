"""The processes and devices of a run."""

from __future__ import annotations

import os
from typing import Any

import torch

from ecoformer.training.recipe import Recipe


def make_accelerator(recipe: Recipe, device: str | None) -> Any:
    """Set Accelerate up for a recipe, without settings of an earlier run in this process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    on_cpu = _is_cpu(device)
    if recipe.precision == "fp16" and on_cpu:
        raise ValueError("precision=fp16 needs a GPU: set precision=bf16 or fp32")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if recipe.precision == "fp32" else recipe.precision,
        gradient_accumulation_steps=recipe.accumulate,
        dynamo_backend="inductor" if recipe.compile else "no",
        step_scheduler_with_optimizer=False,
    )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not is_sharded(accelerator):
        raise ValueError("Accelerate runs FSDP on several GPUs only: launch without FSDP")
    if recipe.ema and is_sharded(accelerator):
        raise ValueError(f"ema={recipe.ema} averages complete weights, but FSDP splits them: set ema=0")
    return accelerator


def is_sharded(accelerator: Any) -> bool:
    """Whether the weights are split over the processes."""
    return str(accelerator.distributed_type.value) == "FSDP"


def is_first_process() -> bool:
    """Whether this process prints and writes; known before the processes have met."""
    return os.environ.get("RANK", "0") == "0"


def _is_cpu(device: str | None) -> bool:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here")
    return device == "cpu" or not torch.cuda.is_available()
