"""Optimiser and learning rate, both timm's."""

from __future__ import annotations

from typing import Any

from torch import nn

from ecoformer.training.recipe import Recipe


def build_optimiser(model: nn.Module, recipe: Recipe) -> Any:
    """timm's optimiser of that name; biases and norms do not decay."""
    from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers

    o = recipe.optimiser
    if o.name not in list_optimizers():
        raise ValueError(
            f"optimiser.name: timm has no optimiser {o.name!r}; adamw, lamb, lion, sgd are usual"
        )
    arguments: dict[str, Any] = {"lr": o.lr, "weight_decay": o.weight_decay, "eps": o.eps}
    known = get_optimizer_info(o.name)
    if known.has_betas and known.num_betas == len(o.betas):
        arguments["betas"] = o.betas
    elif o.betas != type(o).model_fields["betas"].default:
        raise ValueError(f"optimiser.betas: timm gives {o.name} no two betas: leave them out")
    try:
        return create_optimizer_v2(model, opt=o.name, **arguments)
    except TypeError as error:
        raise ValueError(f"optimiser.name: {o.name} does not take these settings: {error}") from error


class LearningRate:
    """The learning rate at each step; it hangs on the step alone, so there is nothing to save."""

    def __init__(self, optimiser: Any, recipe: Recipe, total: int, steps_per_epoch: int) -> None:
        from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler

        s = recipe.schedule
        warmup = round(s.warmup * steps_per_epoch) if s.epochs is not None else int(s.warmup)
        if warmup >= total:
            raise ValueError(f"schedule.warmup={s.warmup} is as long as the training, {total} steps")
        common: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": s.warmup_lr, "t_in_epochs": False}
        length = total - warmup
        self.scheduler: Any
        if s.name == "cosine":
            self.scheduler = CosineLRScheduler(
                optimiser, t_initial=length, lr_min=s.floor, warmup_prefix=True, **common
            )
        elif s.name == "linear":
            self.scheduler = PolyLRScheduler(
                optimiser, t_initial=length, power=1.0, lr_min=s.floor, warmup_prefix=True, **common
            )
        else:
            self.scheduler = StepLRScheduler(optimiser, decay_t=total + 1, decay_rate=1.0, **common)
        self.optimiser, self.warmup = optimiser, warmup

    def set(self, step: int) -> None:
        """Set the rate for a step: from above the warm-up's start to above the floor, so that all count."""
        self.scheduler.step_update(step + 1 if step < self.warmup else step)

    @property
    def now(self) -> float:
        """The present rate."""
        return float(self.optimiser.param_groups[0]["lr"])
