"""Attention transfer: each converted layer learns to reproduce the teacher's attention layer, by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ecoformer.arguments import shape
from ecoformer.conversion.convert import unwrapped
from ecoformer.conversion.layers import mechanism_in, weights_of
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
from ecoformer.conversion.rules import Adapter, ImageGrid
from ecoformer.hashing.fitting import Forward, Group, check_group, run
from ecoformer.ops.eager import full_precision
from ecoformer.running import eval_mode, without_fast_path

WINDOW = 0.7
"""In `transfer`, gradients reach projections of up to this times their root mean square.

The usual 1 is better for models that learn from scratch, which start slowly with less.
"""


@dataclass(frozen=True)
class Transfer:
    """The losses of an attention transfer: for each layer, one per step."""

    layers: dict[str, tuple[float, ...]]

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(next(iter(self.layers.values())))

    @property
    def final(self) -> dict[str, float]:
        """Each layer's mean loss over the last tenth of the steps: 0 is the teacher, 1 knows nothing."""
        tail = max(1, self.steps // 10)
        return {name: sum(losses[-tail:]) / tail for name, losses in self.layers.items()}

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        lines = [f"  {name:<{width}}  {course(losses)}" for name, losses in self.layers.items()]
        return "\n".join([f"{self.steps} steps, error of each layer, first and last tenth:", *lines])


def transfer(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 600,
    lr: float = 2e-1,
    projection_lr: float = 3e-3,
    group: Group = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Transfer:
    """Train each converted layer of `student`, in place, to do what the teacher's layer does.

    The teacher runs once per batch. Each of the student's layers gets the input of the teacher's layer and
    learns to give its output; the loss is the squared error over the output's mean square. So errors of
    earlier layers do not reach later ones, and only one layer's activations are in memory at a time. Call
    `distill` afterwards, which trains all layers together. The hyperplanes of `sharp_eco` learn in the space
    of the teacher's queries and keys, which moves with `projection_lr`.

    AdamW without weight decay; the rates rise over the first tenth of the steps and fall like a cosine. Both
    models run in eval mode, without dropout; modes are restored. An error in the first step leaves the
    student as it was, a later one at the last weights that gave finite losses.

    Args:
        student: a converted model.
        teacher: the original: `teacher = copy.deepcopy(model)` before `convert(model, ...)`.
        batches: tensors, (inputs, ...) tuples or keyword mappings, such as a data loader yields; read again
            from the start until all steps are made.
        steps: how many batches to learn from.
        lr: highest learning rate of hash functions; that of `sharp_eco`'s hyperplanes is relative to the size
            of their weights; affinities and local branches have a tenth of it.
        projection_lr: highest learning rate of all other weights of the layers.
        group: with several ranks, the process group whose gradients are averaged (default: all ranks);
            "alone" if only this rank learns.
        forward: how to run a batch, `forward(model, batch)`; default: `model(inputs)` or `model(**mapping)`.
        progress: show a progress bar on a terminal.
    """
    check_steps(batches, steps, lr=lr, projection_lr=projection_lr)
    check_models(student, teacher)
    ranks = check_group(group, default_all=True)
    student, teacher = unwrapped(student, parallel=True), unwrapped(teacher, parallel=True)
    pairs = layer_pairs(student, teacher)
    grids = _grids(student, teacher)
    if ranks is not None:  # before rates are set by the size of weights
        for tensor in (*student.parameters(), *student.buffers()):
            dist.broadcast(tensor.detach(), group=ranks, group_src=0)
    losses: dict[str, list[float]] = {name: [] for name in pairs}

    def backward(batch: Any, step: int) -> tuple[Tensor, str]:
        found = _layer_losses(pairs, grids, teacher, forward or run, batch)
        if ranks is not None:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _average(parameter.grad, ranks)
        values = torch.stack([found[name] for name in pairs])
        if ranks is not None:
            _average(values, ranks)
        for name, loss in zip(pairs, values.tolist(), strict=True):
            losses[name].append(loss)
        worst = max(pairs, key=lambda name: losses[name][-1])
        total = values.mean()
        return total, f"transfer, loss {float(total):.3g}, largest {losses[worst][-1]:.3g} in {worst}"

    layers = [layer for layer, _ in pairs.values()]
    with eval_mode(student, teacher), without_fast_path(), _planes_on_projections(pairs, ranks):
        groups = parameter_groups(layers, map(mechanism_in, layers), lr, projection_lr)
        parameters = [parameter for each in groups for parameter in each["params"]]
        if not parameters:
            raise ValueError(f"every parameter of the student's layers ({type(student).__name__}) is frozen")
        optimiser = torch.optim.AdamW(groups, weight_decay=0)
        learn(optimiser, batches, steps, backward, progress=progress)
    return Transfer({name: tuple(values) for name, values in losses.items()})


class _PlanesOnProjections(nn.Module):
    """A parametrisation: the weight of hyperplanes learns in the space of a model's queries and keys.

    It starts as it is. Its steps are those of `planes @ projections`, head by head: directions that queries
    and keys ignore are not worth learning, and those are most directions of a free weight. The bias is free.
    """

    def __init__(self, weight: Tensor, projections: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.projections = nn.Parameter(projections.detach().to(weight.device, dtype, copy=True))
        rows = weight.detach().to(dtype).view(*projections.shape[:-2], -1, projections.shape[-1])
        with full_precision(weight.device):
            planes = rows @ torch.linalg.pinv(self.projections.detach(), rtol=1e-2)
        norm = self.projections.detach().square().mean() * projections.shape[-2]
        self.size = float((rows.square().mean() / norm.clamp_min(1e-30)).sqrt()) or 1.0
        self.planes = nn.Parameter(planes / self.size)
        self.start = self.product().detach()

    def product(self) -> Tensor:
        """The planes' own part of the weight."""
        with full_precision(self.planes.device):
            return self.size * (self.planes @ self.projections).flatten(0, -2)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that codes are made with."""
        return weight + (self.product() - self.start).to(weight.dtype)


@contextmanager
def _planes_on_projections(pairs: LayerPairs, ranks: dist.ProcessGroup | None) -> Iterator[None]:
    """In the block, the hyperplanes of `sharp_eco` learn in the space of the originals' queries and keys.

    All ranks take those of the first.
    """
    with ExitStack() as after:
        for layer, original in pairs.values():
            attention: Any = mechanism_in(layer)
            source = weights_of(original)
            if source is None or not getattr(attention, "projects_to_codes", False):
                continue
            qk, heads = attention.qk, attention.num_heads
            fits = source.num_heads == heads and source.dim == qk.in_features and qk.weight.requires_grad
            if fits and not parametrize.is_parametrized(qk):
                parts = [source.q, source.k][: 2 if attention.separate else 1]
                projections = torch.stack(parts).view(len(parts), heads, -1, source.dim).detach()
                if ranks is not None:
                    dist.broadcast(projections, group=ranks, group_src=0)
                parametrize.register_parametrization(
                    qk, "weight", _PlanesOnProjections(qk.weight, projections)
                )
                after.callback(_plain_again, qk)
                weight = qk.parametrizations.weight.original
                after.callback(weight.requires_grad_(False).requires_grad_, True)
                after.callback(setattr, attention.hasher, "reach", attention.hasher.reach)
                attention.hasher.reach = WINDOW
        yield


def _plain_again(qk: nn.Module) -> None:
    """The linear layer without its parametrisation, its parameters in the usual order and memory."""
    weight: Any = qk.weight
    parametrize.remove_parametrizations(qk, "weight", leave_parametrized=False)
    with torch.no_grad():
        qk.get_parameter("weight").copy_(weight)
    qk.register_parameter("bias", qk._parameters.pop("bias"))


def _average(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The mean over the ranks, in place; not every library behind torch.distributed averages by itself."""
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def _grids(student: nn.Module, teacher: nn.Module) -> list[tuple[nn.Module, ImageGrid]]:
    """Grids that layers read from the student's patch convolution, with the teacher's, which runs."""
    names = {module: name for name, module in student.named_modules()}
    images = {m.image for m in student.modules() if isinstance(m, Adapter) and m.image is not None}
    return [(teacher.get_submodule(names[i.patches]), i) for i in images if i.patches is not None]


def _layer_losses(
    pairs: LayerPairs,
    grids: list[tuple[nn.Module, ImageGrid]],
    teacher: nn.Module,
    forward: Forward,
    batch: Any,
) -> dict[str, Tensor]:
    """The loss of every layer; gradients are added to the layers' parameters as the teacher reaches them."""
    found: dict[str, list[Tensor]] = {}

    def make_hook(name: str, layer: nn.Module) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            target = _first(out)
            with torch.enable_grad():
                answer = _first(layer(*args, **kwargs))
                if answer.shape != target.shape:
                    raise ValueError(
                        f"{name}: the student's layer returns {shape(answer)}, the teacher's "
                        f"{shape(target)}: pass the model as it was before convert"
                    )
                padding = padding_in(module, kwargs)
                loss = relative_mse(*(without_padding(x, batch, padding) for x in (answer, target)))
                if loss.requires_grad:
                    torch.autograd.backward(loss)
            found.setdefault(name, []).append(loss.detach())

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for patches, image in grids:
            hooks.callback(patches.register_forward_hook(image).remove)
        for name, (layer, original) in pairs.items():
            handle = original.register_forward_hook(make_hook(name, layer), with_kwargs=True)
            hooks.callback(handle.remove)
        forward(teacher, batch)
    check_reached(pairs, found)
    return {name: torch.stack(losses).mean() for name, losses in found.items()}


def _first(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first
