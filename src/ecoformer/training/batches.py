"""From samples to losses: which samples a step sees, what the model gets, and how its outputs are judged.

Which samples a step sees depends on seed, epoch and step only, for any number of processes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ecoformer.arguments import shape
from ecoformer.data.augment import augment, plain
from ecoformer.data.masking import mask_bytes
from ecoformer.data.splits import IGNORED, Arrays, Pictures, Splits, targets_of
from ecoformer.training.recipe import Augment, Recipe

if TYPE_CHECKING:
    from PIL import Image

Batch = tuple[Tensor, Tensor]


def seed_of(*parts: int) -> int:
    """A well-mixed seed that depends on all parts."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(*parts: int) -> None:
    """Seed Python, NumPy and PyTorch."""
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  timm draws from the old generator
    torch.manual_seed(seed)


def _order(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed_of(seed, epoch)))


class Loader:
    """Training batches of an epoch for one of several processes.

    Every process takes its slice of the same batch. Samples that do not fill a batch are left out.
    """

    def __init__(
        self, part: Arrays | Pictures, recipe: Recipe, device: torch.device, rank: int = 0, ranks: int = 1
    ) -> None:
        self.recipe, self.device, self.rank, self.ranks = recipe, device, rank, ranks
        if recipe.batch % (ranks * recipe.accumulate):
            among = f"{ranks} processes x accumulate={recipe.accumulate}"
            raise ValueError(f"batch={recipe.batch} must divide into {among}")
        if len(part) < recipe.batch:
            raise ValueError(f"batch={recipe.batch} is larger than the training data, {len(part)} samples")
        self.part = part.to(device) if isinstance(part, Arrays) else part
        self.steps = len(part) // recipe.batch

    def epoch(self, epoch: int, start: int = 0) -> Generator[list[Batch], None, None]:
        """Batches from step `start` on, each in `accumulate` parts."""
        seed, count = self.recipe.seed, self.recipe.accumulate
        used = _order(len(self.part), seed, epoch)[: self.steps * self.recipe.batch]
        mine = used.view(self.steps, self.ranks, count, -1)[start:, self.rank]
        if isinstance(self.part, Arrays):
            for step in mine.to(self.device):
                yield [self.part.batch(index) for index in step]
            return
        parts = iter(_decoded(self.part, self.recipe, mine.flatten(0, 1), self.device, epoch, training=True))
        try:
            for _ in range(len(mine)):
                yield [_moved(next(parts), self.device) for _ in range(count)]
        except (ConnectionError, EOFError) as error:  # the worker died while it passed a batch on
            raise RuntimeError(f"a DataLoader worker was lost ({error})") from error
        finally:
            if self.recipe.data.workers:
                # PyTorch signals a lost worker again and again until the others have ended.
                parts._shutdown_workers()

    def samples(self, count: int, epoch: int) -> Batch:
        """This process's share of `count` samples to fit hashers on, without augmentation."""
        index = _order(len(self.part), self.recipe.seed + 1, epoch)[:count][self.rank :: self.ranks]
        if isinstance(self.part, Arrays):
            return self.part.batch(index)
        rows = index.unsqueeze(0)
        batches = _decoded(self.part, self.recipe, rows, self.device, epoch, training=False, workers=0)
        return _moved(next(iter(batches)), self.device)


def measured_batches(
    part: Arrays | Pictures, recipe: Recipe, device: torch.device, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """All test samples once, divided over the processes.

    Processes meet in every batch, so each gets the same number; added samples have `IGNORED` targets.
    """
    size = recipe.eval_batch or recipe.batch
    mine = torch.arange(rank, rank + len(part) + (-len(part)) % ranks, ranks)
    rows = torch.split(mine.clamp(max=len(part) - 1), size)
    if isinstance(part, Arrays):
        batches: Any = map(part.batch, rows)
    else:
        batches = _decoded(part, recipe, rows, device, 0, training=False)
    for batch, counted in zip(batches, torch.split(mine < len(part), size), strict=True):
        inputs, targets = _moved(batch, device)
        if not counted.all():
            targets[~counted.to(device)] = IGNORED
        yield inputs, targets


def _moved(batch: Any, device: torch.device) -> Batch:
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class Decoded:
    """Decoded and transformed images; the draws for an image depend on seed, epoch and its index only."""

    def __init__(self, part: Pictures, transform: Any, seed: int, epoch: int) -> None:
        self.part, self.transform, self.seed, self.epoch = part, transform, seed, epoch

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        seed_everything(self.seed, self.epoch, i)
        image, label = self.part[i]
        return self.transform(image.convert("RGB")), label


def _decoded(
    part: Pictures,
    recipe: Recipe,
    rows: Any,
    device: torch.device,
    epoch: int,
    *,
    training: bool,
    workers: int | None = None,
) -> Any:
    """A `DataLoader` whose batches are the rows of indices."""
    workers = recipe.data.workers if workers is None else workers
    source: Any = Decoded(part, transform_of(recipe.augment, training=training), recipe.seed, epoch)
    return DataLoader(
        source,
        batch_sampler=[row.tolist() for row in rows],
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
    )


def transform_of(a: Augment, *, training: bool) -> Any:
    """timm's transform of a picture into what a model takes."""
    from timm.data import create_transform

    options: dict[str, Any] = {"input_size": a.size, "is_training": training, "mean": a.mean, "std": a.std}
    if training:
        options |= {"auto_augment": a.auto or None, "color_jitter": a.jitter or None}
        options |= {"re_prob": a.erase, "re_mode": "pixel", "hflip": 0.5 if a.flip else 0.0}
    else:
        options["crop_pct"] = a.crop_share
    transform = create_transform(**options)
    for step in transform.transforms:
        for op in (*getattr(step, "ops", ()), *itertools.chain(*getattr(step, "policy", ()))):
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the first bits of each colour. timm may ask for none, which Pillow 13 refuses: keep one."""
    from PIL import ImageOps

    return ImageOps.posterize(image, min(max(bits, 1), 8))


class Task:
    """How data become inputs and targets, and outputs a loss."""

    def __init__(self, recipe: Recipe, splits: Splits) -> None:
        self.recipe, self.kind, self.masked = recipe, splits.kind, splits.masked
        self.per_token = isinstance(splits.train, Arrays) and splits.train.targets.ndim == 2
        a = recipe.augment
        self.pixels: dict[str, Any] = {"size": a.size, "mean": a.mean, "std": a.std}
        if splits.kind == "images" and self.per_token and any((a.pad, a.flip, a.erase, a.mixup, a.cutmix)):
            raise ValueError(
                f"augment: every token of {recipe.data.name} has a target of its own: leave out pad, flip, "
                "erase, mixup and cutmix"
            )
        self.mixup: Any = None
        if splits.kind == "images" and (a.mixup or a.cutmix):
            from timm.data import Mixup

            make: Any = Mixup
            alphas = {"mixup_alpha": a.mixup, "cutmix_alpha": a.cutmix}
            self.mixup = make(**alphas, label_smoothing=recipe.smoothing, num_classes=splits.classes)
        self.erasing: Any = None
        if splits.kind == "images" and a.erase:
            from timm.data.random_erasing import RandomErasing

            self.erasing = partial(RandomErasing, a.erase)

    def training_batch(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        """Inputs and targets for training, augmented or masked with draws from `generator`."""
        if self.kind == "images":
            if not inputs.is_floating_point():
                a = self.recipe.augment
                inputs = augment(inputs, generator, **self.pixels, pad=a.pad, flip=a.flip)
                inputs = self.erasing(device=inputs.device)(inputs) if self.erasing else inputs
            mixed: Batch = self.mixup(inputs, targets) if self.mixup else (inputs, targets)
            return mixed
        if self.masked:
            inputs, targets = mask_bytes(inputs, generator, rate=self.masked)
        return inputs.long(), targets.long()

    def test_batch(self, inputs: Tensor, targets: Tensor) -> Batch:
        """Inputs and targets for testing."""
        if self.kind != "images":
            return inputs.long(), targets.long()
        return inputs if inputs.is_floating_point() else plain(inputs, **self.pixels), targets

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's logits."""
        logits: Tensor = model(*inputs.unbind(1)) if self.kind == "pairs" else model(inputs)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy with label smoothing; targets are classes, or class probabilities of mixup."""
        if targets.is_floating_point():
            return F.cross_entropy(logits.float(), targets)
        total = _cross_entropy(logits, targets, self.recipe.smoothing)
        return total / (targets != IGNORED).sum().clamp(min=1)  # a part of a batch may have no targets

    def judge(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Correct answers, summed loss and number of targets of a test batch, (3,)."""
        correct = (logits.argmax(-1) == targets) & (targets != IGNORED)
        sums = (correct.sum(), _cross_entropy(logits, targets), (targets != IGNORED).sum())
        return torch.stack([x.double() for x in sums])


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    classes = logits.shape[-1]
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"model.name: the model's answers are {shape(logits)}, but the targets {shape(targets)}: choose "
            "a model that answers as often as the data ask"
        )
    return F.cross_entropy(
        logits.reshape(-1, classes).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


def distillation_loss(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Mean Kullback-Leibler divergence from the teacher's softened outputs, over what has a target."""
    if logits.ndim == 3:
        asked = targets != IGNORED
        logits, taught = logits[asked], taught[asked]
    student = F.log_softmax(logits.float() / temperature, dim=-1)
    teacher = F.log_softmax(taught.float() / temperature, dim=-1)
    total = F.kl_div(student, teacher, reduction="sum", log_target=True)
    return total / max(student.shape[:-1].numel(), 1) * temperature**2


def check_targets(splits: Splits, data: str) -> None:
    """Raise for targets outside the classes and for test data without targets."""
    for name, part in (("training", splits.train), ("test", splits.test)):
        targets = targets_of(part)
        if targets is None:
            continue
        asked = targets[targets != IGNORED]
        if name == "test" and not len(asked):
            raise ValueError(f"the test data of {data} have no targets: there is nothing to measure")
        if len(asked) and not 0 <= int(asked.min()) <= int(asked.max()) < splits.classes:
            raise ValueError(
                f"the {name} data of {data} have targets from {int(asked.min())} to {int(asked.max())}, but "
                f"classes={splits.classes} go from 0 to {splits.classes - 1}: correct one of them"
            )
