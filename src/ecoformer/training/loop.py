"""The training loop, on Accelerate: one process or many, interrupted or not, with the same outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecoformer.checkpoints import save
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.files import replacing
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.storage import load_into
from ecoformer.training.building import build_model, check_export, load_teacher, make_average
from ecoformer.training.devices import is_sharded, make_accelerator
from ecoformer.training.display import Display
from ecoformer.training.division import Division, check_model
from ecoformer.training.interrupts import Interrupts
from ecoformer.training.loading import Loader, measured_batches, seed_everything, seed_of
from ecoformer.training.measuring import costs, figures, is_finite, judge, mixed_precision
from ecoformer.training.optimisation import LearningRate, build_optimiser
from ecoformer.training.recipe import Recipe
from ecoformer.training.saving import Progress, read_checkpoint, write_checkpoint
from ecoformer.training.state import RunFolder
from ecoformer.training.tasks import Task, check_targets, distillation_loss


class Interrupted(RuntimeError):
    """The run was asked to stop and has saved itself."""


class Trainer:
    """One run of a recipe in a folder.

    Args:
        recipe: what to train.
        splits: its data.
        folder: where the run keeps its state.
        resume: go on with the run that the folder holds.
        device: "cpu" keeps off the GPU; None takes what there is.
        display: what people see.
    """

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        folder: RunFolder,
        *,
        resume: bool = False,
        device: str | None = None,
        display: Display | None = None,
    ) -> None:
        self.recipe, self.splits, self.folder = recipe, splits, folder
        changes = folder.check(recipe, resume=resume)
        check_targets(splits, recipe.data.name)
        self.accelerator = make_accelerator(recipe, device)
        self.first = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.display = display or Display(show=False)
        where = (self.accelerator.process_index, self.accelerator.num_processes)
        self.division = Division(recipe, splits, self.accelerator)
        self.task = Task(recipe, splits, self.division.group)
        self.loader = Loader(splits.train, recipe, self.device, *where)
        self.test = splits.test.to(self.device) if isinstance(splits.test, Arrays) else splits.test
        self.total = recipe.schedule.steps or self.loader.steps * (recipe.schedule.epochs or 1)
        bare = build_model(recipe, splits)
        check_model(bare, recipe, splits)
        check_export(bare, recipe)
        self.parameters = sum(p.numel() for p in bare.parameters())
        self.cost = costs(bare, recipe, splits)
        self.teacher = load_teacher(recipe, splits, self.task, self.device)
        self.average = make_average(bare, recipe, self.device)
        optimiser = build_optimiser(bare, recipe)
        self.model, self.optimiser = self.accelerator.prepare(bare, optimiser)
        self.rate = LearningRate(self.optimiser, recipe, self.total, self.loader.steps)
        self.generator = torch.Generator(self.device)
        self.progress = Progress(samples=len(splits.train))
        self.losses: list[Tensor] = []
        if resume:
            read_checkpoint(self)
        if self.first:
            folder.begin(recipe, [f"from step {self.progress.step} on: {change}" for change in changes])
        self._saved = self.progress.step
        self._clock = time.perf_counter()

    @property
    def bare(self) -> nn.Module:
        """The model without what Accelerate wraps around it."""
        bare: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return bare

    @property
    def uncompiled(self) -> nn.Module:
        """The model for all but training: other sizes of batches would have it compiled again and again."""
        uncompiled: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return uncompiled

    @property
    def tested(self) -> nn.Module:
        """The model that is measured and kept: the averaged one, if weights are averaged."""
        tested: nn.Module = self.uncompiled if self.average is None else self.average.module
        return tested

    def run(self) -> dict[str, float]:
        """Train to the end; returns the last evaluation."""
        with (
            Interrupts(show=self.display.show) as interrupts,
            self.display.training(self.total, self.progress.step) as advance,
        ):
            self._clock = time.perf_counter()
            while self.progress.step < self.total:
                epoch, start = divmod(self.progress.step, self.loader.steps)
                if start == 0:
                    self._fit(epoch)
                with closing(self.loader.epoch(epoch, start)) as batches:
                    for parts in batches:
                        self._step(parts)
                        advance()
                        self._evaluate_and_save(interrupts)
                        if self.progress.step == self.total:
                            break
        return self.progress.measured or self.evaluate()

    def _evaluate_and_save(self, interrupts: Interrupts) -> None:
        """What is due after a step."""
        step, recipe = self.progress.step, self.recipe
        if step % recipe.log_every == 0:
            self._log_training()
        evaluation = step == self.total or step % (recipe.evaluate_every * self.loader.steps) == 0
        if evaluation:
            self.evaluate()
        asked = self._asked_to_stop(interrupts)
        if evaluation or asked or step % recipe.save_every == 0:
            self._save()
        if asked and step < self.total:
            raise Interrupted(f"stopped at step {step} of {self.total}")

    def _step(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        recipe, step = self.recipe, self.progress.step
        rank = self.accelerator.process_index
        self.model.train(recipe.mode == "train")
        self.rate.set(step)
        seed_everything(recipe.seed, rank, step)
        self.generator.manual_seed(seed_of(recipe.seed, self.division.rank, step, 1))
        batches = [self.task.training_batch(*part, self.generator) for part in parts]
        shares = self._shares([targets for _, targets in batches])
        for (inputs, targets), share in zip(batches, shares, strict=True):
            with self.accelerator.accumulate(self.model), self.division.splitting(self.model):
                loss = self._loss(inputs, targets) * share
                self.accelerator.backward(loss)
                if recipe.optimiser.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimiser.clip)
                self.optimiser.step()
                self.optimiser.zero_grad()
            self.losses.append(loss.detach())
        self.progress.step += 1
        if self.average is not None:
            self.average.update(self.bare, step=self.progress.step)

    def _shares(self, targets: list[Tensor]) -> list[Any]:
        """Weights of the parts of a step, so that every token asked for counts alike in the sum of all."""
        parts = len(targets) * self.accelerator.num_processes
        if not self.task.per_token or parts == 1:
            return [1.0] * len(targets)
        asked = torch.stack([(part != IGNORED).sum() for part in targets]).float()
        total = self.accelerator.reduce(asked.sum(), reduction="sum")
        return list(asked * parts / total.clamp(min=1))

    def _loss(self, inputs: Any, targets: Tensor) -> Tensor:
        logits = self.task.answer(self.model, inputs)
        loss = self.task.loss(logits, targets)
        taught = self.recipe.teacher
        if self.teacher is None or taught is None:
            return loss
        with torch.no_grad(), mixed_precision(self.recipe.precision, self.device):
            answers = self.task.mine(self.task.answer(self.teacher, inputs))
        distilled = distillation_loss(logits, answers, targets, taught.temperature)
        return (1 - taught.weight) * loss + taught.weight * distilled

    def _log_training(self) -> None:
        """Log the mean of the losses since the last time; stop if one is not a number."""
        if not self.losses:
            return
        mean = self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean")
        loss, step = float(mean), self.progress.step
        self._count_time(training=True)
        self._check_finite("the loss", loss)
        self.losses.clear()
        self._record({"step": step, "split": "train", "loss": loss, "lr": self.rate.now})
        self.display.loss(loss)

    def _check_finite(self, what: str, value: float) -> None:
        if not torch.isfinite(torch.tensor(value)):
            raise FloatingPointError(
                f"{what} became {value} by step {self.progress.step}: it will again, unless you add --set "
                f"optimiser.lr={self.recipe.optimiser.lr / 10:g}, optimiser.clip=1 or precision=fp32"
            )

    def evaluate(self) -> dict[str, float]:
        """Accuracy and loss on the test data."""
        self._log_training()
        self._count_time(training=True)
        with self.division.splitting(self.tested):
            sums = judge(self.tested, self.task, self._test_batches(), self.device)
        measured = figures(self.accelerator.reduce(sums, reduction="sum"))
        self._check_finite("the test loss", measured["loss"])
        self.progress.measured = measured
        self.progress.best = max(self.progress.best, measured["accuracy"])
        epoch = self.progress.step / self.loader.steps
        self._record({"step": self.progress.step, "split": "test", "epoch": epoch, **measured})
        self.display.evaluation(epoch, measured)
        self._count_time(training=False)
        return measured

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return measured_batches(self.test, self.recipe, self.device, self.division.rank, self.division.ranks)

    def _fit(self, epoch: int) -> None:
        """Learn the hash functions: before the first step, and again every tau epochs."""
        hashers, every = hashers_of(self.bare), self.recipe.hashing.refit_every
        unfitted = any(not bool(hasher.fitted) for hasher in hashers.values())
        if not hashers or not (unfitted or (every and epoch % every == 0)):
            return
        self._count_time(training=True)
        inputs, _ = self.task.test_batch(*self.loader.samples(self.recipe.hashing.samples, epoch))
        fit_hashers(
            self.uncompiled,
            [inputs],
            samples=len(inputs),
            seed=seed_of(self.recipe.seed, epoch) % 2**31,
            group=dist.group.WORLD if self.accelerator.num_processes > 1 else "alone",
            forward=self.task.answer,
            progress=self.display.show,
        )
        self._count_time(training=False)

    def _asked_to_stop(self, interrupts: Interrupts) -> bool:
        if self.accelerator.num_processes == 1:
            return interrupts.asked
        # All processes must agree on the step; asking at every one would cost.
        if self.progress.step % self.recipe.log_every:
            return False
        asked = torch.tensor(float(interrupts.asked), device=self.device)
        return bool(self.accelerator.reduce(asked, reduction="sum") > 0)

    def _save(self) -> None:
        """Write a checkpoint, of a state that is known to be finite."""
        if self._saved == self.progress.step:
            return
        self._count_time(training=True)
        sound = is_finite(self.bare) and all(bool(torch.isfinite(loss)) for loss in self.losses)
        unsound = torch.tensor(0.0 if sound else torch.nan, device=self.device)
        self._check_finite("a loss or weight", float(self.accelerator.reduce(unsound, reduction="sum")))
        write_checkpoint(self)
        self._saved = self.progress.step
        self._count_time(training=False)

    def _count_time(self, *, training: bool) -> None:
        """Add the time since the last call, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        spent, self._clock = now - self._clock, now
        self.progress.seconds += spent
        if training:
            self.progress.training_seconds += spent

    def _record(self, record: dict[str, Any]) -> None:
        if self.first:
            self.folder.log(record)
            self.display.board(record)

    def export(self) -> Path:
        """Write the trained model as one file for `ecoformer.load`."""
        model = self.bare if self.average is None else self.average.module
        if is_sharded(self.accelerator):
            whole = self.accelerator.get_state_dict(self.model)
            if self.first:
                model = build_model(self.recipe, self.splits)
                load_into(model, whole, source="the trained weights")
        if self.first:
            with replacing(self.folder.model_file) as file:  # `save` follows links
                save(model, file)
        self.accelerator.wait_for_everyone()
        return self.folder.model_file
