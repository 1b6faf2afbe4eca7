"""The processes and devices of a run, which Accelerate looks after."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from ecoformer.training.recipe import Recipe


def make_accelerator(recipe: Recipe, device: str | None) -> Any:
    """Accelerate, set up for a recipe; what an earlier run in this process had set is forgotten."""
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
        raise ValueError(
            "FSDP was asked for, but Accelerate splits weights over several GPUs only: launch without it"
        )
    if recipe.ema and is_sharded(accelerator):
        raise ValueError(f"ema={recipe.ema} averages whole weights, but FSDP splits them: set ema=0")
    return accelerator


def is_sharded(accelerator: Any) -> bool:
    """Whether the weights are split over the processes."""
    return str(accelerator.distributed_type.value) == "FSDP"


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes; known before any of them has met the others."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def one_process_first(device: str | None) -> Iterator[None]:
    """The first process of a machine runs the context before the others, which find what it has left."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    from accelerate import PartialState

    with PartialState(cpu=_is_cpu(device)).local_main_process_first():
        yield


def _is_cpu(device: str | None) -> bool:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here")
    return device == "cpu" or not torch.cuda.is_available()
