"""Batches: which samples a step sees follows from seed, epoch and step alone, on however many processes."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ecoformer.data.splits import IGNORED, Arrays, Images
from ecoformer.training.recipe import Recipe

Batch = tuple[Tensor, Tensor]


def seed_of(*parts: int) -> int:
    """A seed that hangs on all parts, well mixed."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(*parts: int) -> None:
    """Seed Python, NumPy and PyTorch; what a step draws then follows from where it stands."""
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  timm draws from the old generator
    torch.manual_seed(seed)


def order_of(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed_of(seed, epoch)))


class Loader:
    """Training batches of an epoch for one of several processes.

    Every process takes its slice of the same batch, so that several learn what one would; processes that
    split tokens take the same slice. A remainder that fills no batch is left out of the epoch.
    """

    def __init__(
        self, part: Arrays | Images, recipe: Recipe, device: torch.device, rank: int = 0, ranks: int = 1
    ) -> None:
        self.recipe, self.device, self.rank, self.ranks = recipe, device, rank, ranks
        self.slices, self.slice = ranks // recipe.split_tokens, rank // recipe.split_tokens
        share = self.slices * recipe.accumulate
        if recipe.batch % share:
            among = f"{ranks} processes"
            if recipe.split_tokens > 1:
                among += f" / split_tokens={recipe.split_tokens}"
            raise ValueError(
                f"batch={recipe.batch} must divide into {among} x accumulate={recipe.accumulate}"
            )
        if len(part) < recipe.batch:
            raise ValueError(f"batch={recipe.batch} is larger than the training data, {len(part)} samples")
        pictures = isinstance(part, Images) or part.inputs.ndim == 4
        if pictures and (recipe.augment.mixup or recipe.augment.cutmix) and recipe.batch // share % 2:
            raise ValueError(
                f"mixup and cutmix mix pairs, but batch={recipe.batch} over {ranks} processes x "
                f"accumulate={recipe.accumulate} leaves {recipe.batch // share} pictures each: make it even"
            )
        if min(recipe.hashing.samples, len(part)) < ranks:
            raise ValueError(
                f"hashing.samples={recipe.hashing.samples} leaves nothing for some of {ranks} processes"
            )
        self.part = part.to(device) if isinstance(part, Arrays) else part
        self.steps = len(part) // recipe.batch

    def epoch(self, epoch: int, start: int = 0) -> Generator[list[Batch], None, None]:
        """Batches from step `start` on, each in as many parts as gradients are accumulated over."""
        order = order_of(len(self.part), self.recipe.seed, epoch)
        rows = order[: self.steps * self.recipe.batch].view(
            self.steps, self.slices, self.recipe.accumulate, -1
        )
        mine = rows[start:, self.slice]
        if isinstance(self.part, Arrays):
            mine = mine.to(self.device)
            for step in mine:
                yield [self.part.batch(index) for index in step]
            return
        parts = iter(self._decoded(self.part, mine.flatten(0, 1), epoch))
        try:
            for _ in range(len(mine)):
                yield [self._move(next(parts)) for _ in range(self.recipe.accumulate)]
        except (ConnectionError, EOFError) as error:
            # It died while it handed a batch over.
            raise RuntimeError(f"a DataLoader worker was lost ({error})") from error
        finally:
            if self.recipe.data.workers:
                # A worker that was lost is told of by a signal, again and again until the others have ended.
                parts._shutdown_workers()

    def samples(self, count: int, epoch: int) -> Batch:
        """Samples to fit hashers on, not augmented: this process's share of `count`, drawn for the epoch."""
        chosen = order_of(len(self.part), self.recipe.seed + 1, epoch)[:count]
        index = chosen[self.rank :: self.ranks]
        if isinstance(self.part, Arrays):
            return self.part.batch(index)
        pictures = Pictures(self.part, _transform(self.recipe, training=False), self.recipe.seed, epoch)
        chosen_pictures = [pictures[int(i)] for i in index]
        inputs = torch.stack([picture for picture, _ in chosen_pictures])
        return inputs.to(self.device), torch.tensor(
            [label for _, label in chosen_pictures], device=self.device
        )

    def _decoded(self, part: Images, rows: Tensor, epoch: int) -> Any:
        pictures = Pictures(part, _transform(self.recipe, training=True), self.recipe.seed, epoch)
        return _data_loader(pictures, rows.tolist(), self.recipe.data.workers, self.device)

    def _move(self, batch: Any) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def measured_batches(
    part: Arrays | Images, recipe: Recipe, device: torch.device, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """All test samples once, split over the processes.

    Every process gets as many, because they meet in every batch; what fills up has `IGNORED` targets.
    """
    size = recipe.eval_batch or recipe.batch
    mine = torch.arange(rank, rank + len(part) + (-len(part)) % ranks, ranks)
    rows = torch.split(mine.clamp(max=len(part) - 1), size)
    counted = torch.split(mine < len(part), size)
    if isinstance(part, Arrays):
        batches: Any = map(part.batch, rows)
    else:
        pictures = Pictures(part, _transform(recipe, training=False), recipe.seed, 0)
        batches = _data_loader(pictures, [row.tolist() for row in rows], recipe.data.workers, device)
    for (inputs, targets), real in zip(batches, counted, strict=True):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if not real.all():
            targets[~real.to(device)] = IGNORED
        yield inputs, targets


class Pictures(Dataset[tuple[Tensor, int]]):
    """Decoded pictures, changed at random; a picture's draws hang on seed, epoch and its number alone."""

    def __init__(self, part: Images, transform: Any, seed: int, epoch: int) -> None:
        self.part, self.transform, self.seed, self.epoch = part, transform, seed, epoch

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        picture, label = self.part[i]
        seed_everything(self.seed, self.epoch, i)
        return self.transform(picture), label


def _data_loader(pictures: Pictures, rows: list[list[int]], workers: int, device: torch.device) -> Any:
    return DataLoader(
        pictures,
        batch_sampler=rows,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
    )


def _transform(recipe: Recipe, *, training: bool) -> Any:
    from timm.data import create_transform

    a = recipe.augment
    same: dict[str, Any] = {"input_size": a.size, "is_training": training, "mean": a.mean, "std": a.std}
    if not training:
        return create_transform(**same, crop_pct=a.crop_share)
    changes: dict[str, Any] = {
        "auto_augment": a.auto or None,
        "color_jitter": a.jitter or None,
        "re_prob": a.erase,
    }
    return create_transform(**same, **changes, re_mode="pixel", hflip=0.5 if a.flip else 0.0)
