"""What `transfer` and `distill` share: pairs of layers, the training loop, and losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention import Attention
from ecoformer.conversion.convert import unwrapped
from ecoformer.conversion.foreign import hidden_keys
from ecoformer.conversion.rules import Adapter
from ecoformer.hashing.fitting import check_batches, move, progress_bar

LayerPairs = dict[str, tuple[nn.Module, nn.Module]]

SMALL_RATE = 0.1
"""The rate of affinities and local branches, as a share of that of hyperplanes."""


def check_models(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a student that cannot learn, and a teacher that would change with it."""
    if any(buffer.dtype == torch.int8 for buffer in student.buffers()):
        raise ValueError(
            f"student ({type(student).__name__}) is quantised, and int8 cannot learn: teach the original, "
            "then quantise it"
        )
    memory = [
        {p.untyped_storage().data_ptr() for p in m.parameters() if p.numel()} for m in (student, teacher)
    ]
    if student is teacher or memory[0] & memory[1]:
        raise ValueError(
            "student and teacher share weights, because convert works in place: keep "
            "teacher = copy.deepcopy(model) before converting"
        )


def layer_pairs(student: nn.Module, teacher: nn.Module) -> LayerPairs:
    """The converted layers of the student and the teacher's layers of the same names."""
    student, teacher = unwrapped(student, parallel=True), unwrapped(teacher, parallel=True)
    converted = [name for name, module in student.named_modules() if isinstance(module, (Adapter, Attention))]
    outermost = [n for n in converted if not any(n.startswith(f"{other}.") for other in converted)]
    modules = dict(teacher.named_modules())
    if not outermost:
        raise ValueError(f"student ({type(student).__name__}) has no converted layer: convert it first")
    if missing := [name for name in outermost if name not in modules]:
        raise ValueError(
            f"teacher ({type(teacher).__name__}) has no layer {missing[0]!r}: pass the model as it was "
            "before convert"
        )
    return {name: (student.get_submodule(name), modules[name]) for name in outermost}


def check_reached(names: Iterable[str], reached: Container[str]) -> None:
    """Refuse layers that a forward pass does not call."""
    missed = [name for name in names if name not in reached]
    if missed:
        raise ValueError(f"the forward pass never reached {', '.join(missed)}: convert other layers only")


def parameter_groups(
    layers: list[nn.Module], attentions: Iterable[Any], code_lr: float, lr: float
) -> list[dict[str, Any]]:
    """The parameters of layers, for an optimiser; `code_lr` is for hash functions in `attentions`.

    Affinities and local branches have a share of it. The rate of hyperplanes is relative to the size of
    their weights in each layer.
    """
    groups: list[dict[str, Any]] = []
    taken: set[Tensor] = set()

    def add(parameters: Iterable[Tensor], rate: float) -> None:
        new = [p for p in dict.fromkeys(parameters) if p.requires_grad and p not in taken]
        taken.update(new)
        if new:
            groups.append({"params": new, "lr": rate})

    for attention in attentions:
        if getattr(attention, "projects_to_codes", False):
            for name, parameter in attention.qk.named_parameters():
                if not name.endswith("projections"):
                    sized = parameter if parameter.ndim > 1 else attention.qk.weight
                    add([parameter], code_lr * float(sized.detach().float().square().mean().sqrt()))
        rates = {"hasher": code_lr, "affinity": SMALL_RATE * code_lr, "local": SMALL_RATE * code_lr}
        for part, rate in rates.items():
            if (module := getattr(attention, part, None)) is not None:
                add(module.parameters(), rate)
    add((p for layer in layers for p in layer.parameters()), lr)
    return groups


def learn(
    optimiser: torch.optim.Optimizer,
    batches: Iterable[Any],
    steps: int,
    backward: Callable[[Any, int], tuple[Tensor, str]],
    *,
    progress: bool,
) -> None:
    """Make `steps` steps, each on one batch; rates rise over the first tenth and fall like a cosine.

    `backward(batch, step)` computes gradients; it returns the loss and what the progress bar shows. Gradients
    are clipped to norm 1. A loss, gradient or weight that is not finite stops the training and restores the
    last weights that gave finite ones.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, steps))
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    last_good = [parameter.detach().clone() for parameter in parameters]
    with ExitStack() as after, progress_bar(steps, progress) as advance:
        after.callback(optimiser.zero_grad)
        for step, batch in enumerate(_repeat(batches, steps)):
            optimiser.zero_grad()
            torch.clear_autocast_cache()  # it would keep the weights of the last step
            loss, shown = backward(move(batch, parameters[0].device), step)
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            with torch.no_grad():
                if not bool(loss.isfinite() & norm.isfinite()):
                    torch._foreach_copy_(parameters, last_good)
                    raise FloatingPointError(
                        f"loss {float(loss)} with a gradient of norm {float(norm)} at step {step}; the last "
                        "good weights are restored: check the inputs, lower lr, or train in float32"
                    )
                torch._foreach_copy_(last_good, parameters)
            optimiser.step()
            schedule.step()
            advance(shown)
    with torch.no_grad():
        if not all(bool(parameter.isfinite().all()) for parameter in parameters):
            torch._foreach_copy_(parameters, last_good)
            raise FloatingPointError(
                "the last step gave weights that are not finite; those before it are restored: lower lr, or "
                "train in float32"
            )


def check_steps(batches: Iterable[Any], steps: int, **rates: float) -> None:
    """Refuse what there is nothing to learn from, and rates or weights that are not numbers from 0 on."""
    check_batches(batches)
    if not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    for name, value in rates.items():
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def _rate(step: int, steps: int) -> float:
    rising = 0.1 * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))


def _repeat(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """`steps` batches, from the start again as often as needed."""
    done = 0
    while done < steps:
        before = done
        for batch in batches:
            if done == steps:
                return
            done += 1
            yield batch
        if done == before:
            if not done:
                raise ValueError("batches is empty: there is nothing to learn from")
            warnings.warn(
                f"batches can be read only once and ended after {done} of {steps} steps: pass a list or a "
                "data loader",
                stacklevel=3,
            )
            return


def relative_mse(x: Tensor, target: Tensor) -> Tensor:
    """Mean square error as a share of the target's mean square."""
    return F.mse_loss(x, target) / target.square().mean().clamp_min(1e-12)


def without_padding(x: Tensor, batch: Any, padding: Tensor | None = None) -> Tensor:
    """The tokens of `x` that neither `padding` nor, without it, the batch's attention mask hides."""
    seen = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if padding is not None:
        seen = ~padding
    if not isinstance(seen, Tensor) or seen.ndim != 2 or x.ndim != 3 or x.shape[:2] != seen.shape:
        return x
    return x[seen.bool()]


def padding_in(layer: nn.Module, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The key padding mask that `layer` is called with, true at padding, laid out as its output is."""
    mask = kwargs.get("key_padding_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    if mask.dtype != torch.bool:  # nn.TransformerEncoder makes it one that is added to the scores
        mask = hidden_keys(mask)
    settings = layer.bound if isinstance(layer, Adapter) else vars(layer)
    return mask if settings.get("batch_first", True) else mask.T


def course(losses: tuple[float, ...]) -> str:
    """The mean of the first and of the last tenth."""
    tail = max(1, len(losses) // 10)
    return f"{sum(losses[:tail]) / tail:.4g} -> {sum(losses[-tail:]) / tail:.4g}"
