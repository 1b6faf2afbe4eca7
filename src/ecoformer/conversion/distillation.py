"""Distillation: a converted model learns to give the outputs of the softmax original."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.arguments import shape
from ecoformer.attention import Attention
from ecoformer.conversion.learning import (
    LayerPairs,
    check_models,
    check_reached,
    check_steps,
    course,
    layer_pairs,
    learn,
    padding_in,
    parameter_groups,
    relative_mse,
    without_padding,
)
from ecoformer.hashing.fitting import Forward, run
from ecoformer.running import eval_mode, without_fast_path

LossFunction = Callable[[Tensor, Tensor], Tensor]
Loss = Literal["mse", "kl", "cosine"] | LossFunction
Output = Callable[[Any, Any], Tensor]

CODE_RATE = 100
"""The rate of `sharp_eco`'s hyperplanes, relative to the size of their weights, is so many times `lr`."""


@dataclass(frozen=True)
class Distillation:
    """The losses of a distillation, one per step: of the outputs and, if requested, of the layers."""

    outputs: tuple[float, ...]
    layers: tuple[float, ...]

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(self.outputs)

    def __str__(self) -> str:
        layers = f", layers {course(self.layers)}" if self.layers else ""
        return f"{self.steps} steps, first and last tenth: outputs {course(self.outputs)}{layers}"


def distill(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 1000,
    lr: float = 1e-4,
    loss: Loss = "mse",
    layers: float = 0.0,
    output: Output | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Distillation:
    """Train `student` in place to give the outputs of `teacher`; no labels are needed.

    AdamW without weight decay; the learning rate rises over the first tenth of the steps and falls like a
    cosine; gradients are clipped to norm 1. Both models run in eval mode, without dropout, as the paper
    fine-tunes; modes are restored. A loss or gradient that is not finite stops the training and restores the
    last weights that gave finite ones. With several ranks, wrap the student in DistributedDataParallel.

    Args:
        student: a converted model with fitted hashers.
        teacher: the original: `teacher = copy.deepcopy(model)` before `convert(model, ...)`.
        batches: tensors, (inputs, ...) tuples or keyword mappings, such as a data loader yields; read again
            from the start until all steps are made.
        steps: how many batches to learn from.
        lr: highest learning rate; that of `sharp_eco`'s hyperplanes is a hundred times as high, relative to
            the size of their weights, and that of its affinities and local branches ten times.
        loss: of the outputs: "mse" relative to the teacher's mean square, "kl" for logits, "cosine" for
            embeddings, or a function of the student's and the teacher's output.
        layers: weight of a second loss, on the attention outputs of each converted layer.
        output: `output(result, batch)` picks the tensor to compare; default: the result itself, its logits or
            its last hidden state (without padding).
        forward: how to run a batch, `forward(model, batch)`; default: `model(inputs)` or `model(**mapping)`.
        progress: show a progress bar on a terminal.
    """
    check_steps(batches, steps, lr=lr, layers=layers)
    check_models(student, teacher)
    pairs = layer_pairs(student, teacher) if layers else {}
    sharp = [m for m in student.modules() if isinstance(m, Attention) and m.projects_to_codes]
    groups = parameter_groups([student], sharp, CODE_RATE * lr, lr)
    if not groups:
        raise ValueError(f"every parameter of the student ({type(student).__name__}) is frozen")
    if isinstance(loss, str) and loss not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(_LOSSES)} or a function, got {loss!r}")
    measure = _LOSSES[loss] if isinstance(loss, str) else loss
    compare = partial(_losses, student, teacher, pairs, measure, output or _pick_output, forward or run)
    outputs: list[float] = []
    of_layers: list[float] = []

    def backward(batch: Any, step: int) -> tuple[Tensor, str]:
        main, local = compare(batch)
        total = main + layers * local
        torch.autograd.backward(total)
        outputs.append(float(main.detach()))
        if pairs:
            of_layers.append(float(local.detach()))
        return total.detach(), f"distilling, loss {outputs[-1]:.4g}"

    optimiser = torch.optim.AdamW(groups, weight_decay=0)
    with eval_mode(student, teacher), without_fast_path():  # which returns zeros at padding
        learn(optimiser, batches, steps, backward, progress=progress)
    return Distillation(tuple(outputs), tuple(of_layers))


def _losses(
    student: nn.Module,
    teacher: nn.Module,
    pairs: LayerPairs,
    loss: LossFunction,
    output: Output,
    forward: Forward,
    batch: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of the outputs, and the mean loss of the layers."""
    with torch.no_grad(), _recorded_outputs({n: pair[1] for n, pair in pairs.items()}, batch) as of_teacher:
        target = output(forward(teacher, batch), batch)
    with _recorded_outputs({n: pair[0] for n, pair in pairs.items()}, batch) as of_student:
        answer = output(forward(student, batch), batch)
    if answer.shape != target.shape:
        raise ValueError(f"student and teacher must agree: {shape(answer)} against {shape(target)}")
    for reached in (of_teacher, of_student):
        check_reached(pairs, reached)
    terms = [relative_mse(of_student[n], of_teacher[n]) for n in pairs]
    return loss(answer, target), torch.stack(terms).mean() if terms else answer.new_zeros(())


def _kl(x: Tensor, target: Tensor) -> Tensor:
    logs = (F.log_softmax(x, dim=-1), F.log_softmax(target, dim=-1))
    return F.kl_div(*logs, reduction="none", log_target=True).sum(dim=-1).mean()


def _cosine(x: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(x, target, dim=-1).mean()


_LOSSES: dict[str, LossFunction] = {"mse": relative_mse, "kl": _kl, "cosine": _cosine}


def _pick_output(result: Any, batch: Any) -> Tensor:
    """The tensor to compare in whatever a model returns."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(result.get(name), Tensor):
                return without_padding(result[name], batch)
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return result[0]
    raise TypeError(f"output= must say what to compare in a {type(result).__name__}")


@contextlib.contextmanager
def _recorded_outputs(layers: dict[str, nn.Module], batch: Any) -> Iterator[dict[str, Tensor]]:
    """What the layers return while the context is open, without padding."""
    outputs: dict[str, Tensor] = {}

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            outputs[name] = without_padding(first, batch, padding_in(module, kwargs))

        return hook

    hooks = [layer.register_forward_hook(make_hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
