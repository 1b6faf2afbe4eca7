"""From stored samples to a loss: what each kind of data gives the model, and how its answers are judged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention.splitting import stretch
from ecoformer.data.augment import augment, plain
from ecoformer.data.masking import mask_bytes
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.training.recipe import Recipe


class Task:
    """How a recipe's data become inputs and targets, and outputs a loss.

    With a `group` that splits tokens, inputs are still whole: the model takes what is its rank's. Targets of
    single tokens are this rank's alone; a class of the whole text is every rank's, and counted by the first.
    """

    def __init__(self, recipe: Recipe, splits: Splits, group: dist.ProcessGroup | None = None) -> None:
        self.recipe, self.kind, self.masked = recipe, splits.kind, splits.masked
        self.mixup = _mixup(recipe, splits.classes) if splits.kind == "images" else None
        self.per_token = splits.kind == "tokens"
        self.group = group
        self.counts = group is None or self.per_token or dist.get_rank(group) == 0

    def training_batch(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Any, Tensor]:
        """What the model takes and should answer, augmented or masked; draws come from `generator`."""
        if self.kind == "images":
            if not inputs.is_floating_point():
                inputs = augment(inputs, generator, **self._pixels(), **self._changes())
            if self.mixup is not None:
                mixed: tuple[Tensor, Tensor] = self.mixup(inputs, targets)
                return mixed
            return inputs, targets
        if self.masked:
            inputs, targets = mask_bytes(inputs, generator, rate=self.recipe.mask_rate)
        return inputs.long(), self.mine(targets).long()

    def test_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        """The same, unchanged."""
        if self.kind != "images":
            return inputs.long(), self.mine(targets).long()
        return (inputs if inputs.is_floating_point() else plain(inputs, **self._pixels())), targets

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's logits."""
        logits: Tensor = model(*inputs.unbind(1)) if self.kind == "pairs" else model(inputs)
        return logits

    def mine(self, of_tokens: Tensor) -> Tensor:
        """This rank's part of what belongs to tokens (B, N, ...); where a text has one target, all of it."""
        if self.group is None or not self.per_token:
            return of_tokens
        return of_tokens[:, stretch(of_tokens.shape[1], self.group)]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, with label smoothing; targets are classes or shares of them."""
        if targets.is_floating_point():  # mixup has smoothed them already
            return F.cross_entropy(logits.float(), targets)
        logits, targets = _flat(logits, targets)
        options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": self.recipe.smoothing}
        total = F.cross_entropy(logits.float(), targets, reduction="sum", **options)
        return total / (targets != IGNORED).sum().clamp(min=1)  # a part of a batch may ask for nothing

    def judge(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Right answers, loss and number of questions of a test batch, (3,): sums, which add up."""
        logits, targets = _flat(logits, targets)
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        right = (logits.argmax(-1) == targets) & (targets != IGNORED)
        sums = torch.stack([right.sum().double(), loss.double(), (targets != IGNORED).sum().double()])
        return sums if self.counts else torch.zeros_like(sums)

    def _pixels(self) -> dict[str, Any]:
        a = self.recipe.augment
        return {"size": a.size, "mean": a.mean, "std": a.std}

    def _changes(self) -> dict[str, Any]:
        a = self.recipe.augment
        return {"pad": a.pad, "flip": a.flip, "erase": a.erase}


def check_targets(splits: Splits, data: str) -> None:
    """Refuse targets that are no classes, and test data that ask for nothing, before anything is trained."""
    for name, part in (("training", splits.train), ("test", splits.test)):
        targets = part.targets if isinstance(part, Arrays) else part.labels
        asked = targets[targets != IGNORED]
        if name == "test" and not len(asked):
            raise ValueError(f"the test data of {data} ask for nothing: give some to measure with")
        if len(asked) and not 0 <= int(asked.min()) <= int(asked.max()) < splits.classes:
            raise ValueError(
                f"the {name} data of {data} have targets from {int(asked.min())} to {int(asked.max())}, but "
                f"classes={splits.classes} go from 0 to {splits.classes - 1}: mend one of them"
            )


def distillation_loss(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean Kullback-Leibler divergence from the teacher's softened answers, over what is asked."""
    if logits.ndim == 3:
        asked = targets != IGNORED
        logits, taught = logits[asked], taught[asked]
    student = F.log_softmax(logits.float() / temperature, dim=-1)
    teacher = F.log_softmax(taught.float() / temperature, dim=-1)
    total = F.kl_div(student, teacher, reduction="sum", log_target=True)
    return total / max(student.shape[:-1].numel(), 1) * temperature**2


def _flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (logits.flatten(0, 1), targets.flatten()) if logits.ndim == 3 else (logits, targets)


def _mixup(recipe: Recipe, classes: int) -> Any:
    changes = recipe.augment
    if not (changes.mixup or changes.cutmix):
        return None
    from timm.data import Mixup

    cls: Any = Mixup
    alphas = {"mixup_alpha": changes.mixup, "cutmix_alpha": changes.cutmix}
    return cls(**alphas, label_smoothing=recipe.smoothing, num_classes=classes)
