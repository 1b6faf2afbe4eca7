"""The training loop on Accelerate: the same outcome on one process or many, interrupted or not."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints import save
from ecoformer.conversion import transfer
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.files import replacing
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.storage import CheckpointError, load_into, read, write
from ecoformer.training import batches as data
from ecoformer.training import model as models
from ecoformer.training.batches import Batch, seed_everything, seed_of
from ecoformer.training.console import Display, Interrupts
from ecoformer.training.folder import PROGRESS, RunFolder
from ecoformer.training.processes import is_sharded, make_accelerator
from ecoformer.training.recipe import Recipe


class Interrupted(RuntimeError):
    """The run was asked to stop and has saved itself."""


@dataclass
class Progress:
    """Where a run stands; with the recipe it determines everything that follows."""

    step: int = 0
    samples: int = 0
    """Size of the training data, on which the order of samples depends."""
    best: float = 0.0
    measured: dict[str, float] | None = None
    """The last evaluation."""
    training_seconds: float = 0.0
    seconds: float = 0.0
    """Including evaluation and checkpoints, without steps that were lost and repeated."""


class Trainer:
    """One run of a recipe on its data, in a folder; `train` describes the other arguments."""

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
        data.check_targets(splits, recipe.data.name)
        self.accelerator = make_accelerator(recipe, device)
        self.first, self.device = self.accelerator.is_main_process, self.accelerator.device
        self.display = display or Display(show=False)
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.task = data.Task(recipe, splits)
        self.loader = data.Loader(splits.train, recipe, self.device, self.rank, self.ranks)
        self.test = splits.test.to(self.device) if isinstance(splits.test, Arrays) else splits.test
        self.total = recipe.schedule.steps or self.loader.steps * (recipe.schedule.epochs or 1)
        bare = models.build_model(recipe, splits)
        models.check_model(bare, recipe)
        self.parameters = sum(p.numel() for p in bare.parameters())
        self.cost = models.costs(bare, recipe, splits)
        self.teacher = models.load_teacher(recipe, splits, self.task, self.device)
        self.average = models.make_average(bare, recipe, self.device)
        self.model, self.optimizer = self.accelerator.prepare(bare, models.build_optimizer(bare, recipe))
        self.generator = torch.Generator(self.device)
        self.progress = Progress(samples=len(splits.train))
        self.losses: list[Tensor] = []
        self._set_rate()
        if resume:
            self._load()
        if self.first:
            folder.begin(recipe, [f"from step {self.progress.step} on: {change}" for change in changes])
        self._saved = self.progress.step
        self._clock = time.perf_counter()

    @property
    def bare(self) -> nn.Module:
        """The model without Accelerate's wrappers."""
        bare: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return bare

    @property
    def uncompiled(self) -> nn.Module:
        """The model for all but training steps, whose batch sizes would have it compiled again."""
        uncompiled: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return uncompiled

    @property
    def tested(self) -> nn.Module:
        """The model that is measured: the averaged one, if weights are averaged."""
        tested: nn.Module = self.uncompiled if self.average is None else self.average.module
        return tested

    def run(self) -> dict[str, float]:
        """Train to the end; return the last evaluation."""
        with (
            Interrupts(show=self.display.show) as interrupts,
            self.display.training(self.total, self.progress.step) as advance,
        ):
            self._clock = time.perf_counter()
            while self.progress.step < self.total:
                epoch, start = divmod(self.progress.step, self.loader.steps)
                if start == 0:
                    self._fit(epoch)
                if self.progress.step == 0:
                    self._transfer()
                with closing(self.loader.epoch(epoch, start)) as batches:
                    for parts in batches:
                        self._step(parts)
                        advance()
                        self._evaluate_and_save(interrupts)
                        if self.progress.step == self.total:
                            break
        return self.progress.measured or self.evaluate()

    def _evaluate_and_save(self, interrupts: Interrupts) -> None:
        """Do what is due after a step."""
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

    def _set_rate(self) -> None:
        self.rate = models.learning_rate(self.recipe, self.progress.step, self.total, self.loader.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    def _step(self, parts: list[Batch]) -> None:
        recipe, step = self.recipe, self.progress.step
        self.model.train(recipe.mode == "train")
        self._set_rate()
        seed_everything(recipe.seed, self.rank, step)
        self.generator.manual_seed(seed_of(recipe.seed, self.rank, step, 1))
        batches = [self.task.training_batch(*part, self.generator) for part in parts]
        shares = self._shares([targets for _, targets in batches])
        for (inputs, targets), share in zip(batches, shares, strict=True):
            with self.accelerator.accumulate(self.model):
                loss = self._loss(inputs, targets) * share
                self.accelerator.backward(loss)
                if recipe.optimiser.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimiser.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        self.progress.step += 1
        if self.average is not None:
            self.average.update(self.bare, step=self.progress.step)

    def _shares(self, targets: list[Tensor]) -> list[Any]:
        """Weights of the parts of a step that make all tokens with a target count the same."""
        parts = len(targets) * self.ranks
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
        with torch.no_grad(), models.mixed_precision(self.recipe.precision, self.device):
            answers = self.task.answer(self.teacher, inputs)
        distilled = data.distillation_loss(logits, answers, targets, taught.temperature)
        return (1 - taught.weight) * loss + taught.weight * distilled

    def _log_training(self) -> None:
        """Log the mean of the losses since the last call."""
        if not self.losses:
            return
        loss = float(self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean"))
        self._count_time(training=True)
        self._check_finite("the loss", loss)
        self.losses.clear()
        self._record({"step": self.progress.step, "split": "train", "loss": loss, "lr": self.rate})

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{what} became {value} by step {self.progress.step}: it will again, unless you add --set "
                f"optimiser.lr={self.recipe.optimiser.lr / 10:g}, optimiser.clip=1 or precision=fp32"
            )

    def evaluate(self) -> dict[str, float]:
        """Accuracy and loss on the test data."""
        self._log_training()
        self._count_time(training=True)
        batches = data.measured_batches(self.test, self.recipe, self.device, self.rank, self.ranks)
        sums = models.judge(self.tested, self.task, batches, self.device)
        measured = models.figures(self.accelerator.reduce(sums, reduction="sum"))
        self._check_finite("the test loss", measured["loss"])
        self.progress.measured = measured
        self.progress.best = max(self.progress.best, measured["accuracy"])
        epoch = self.progress.step / self.loader.steps
        self._record({"step": self.progress.step, "split": "test", "epoch": epoch, **measured})
        self._count_time(training=False)
        return measured

    def _fit(self, epoch: int) -> None:
        """Fit the hash functions before the first step, and again every `refit_every` epochs."""
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
            group=dist.group.WORLD if self.ranks > 1 else "alone",
            forward=self.task.answer,
            progress=self.display.show,
        )
        self._count_time(training=False)

    def _transfer(self) -> None:
        """Let each converted layer learn from the teacher's, if the recipe asks for it."""
        taught = self.recipe.teacher
        if taught is None or self.teacher is None or not taught.transfer:
            return
        if is_sharded(self.accelerator):
            raise ValueError("teacher.transfer needs complete weights on every process: train without FSDP")
        if models.same_attention(self.bare, self.teacher):
            return
        self._count_time(training=True)
        with models.mixed_precision(self.recipe.precision, self.device):
            transfer(
                self.bare,
                self.teacher,
                self._training_inputs(),
                steps=taught.transfer,
                forward=self.task.answer,
                progress=self.display.show,
            )
        if self.average is not None:
            self.average.set(self.bare)
        self._count_time(training=False)

    def _training_inputs(self) -> Iterator[Tensor]:
        """Augmented inputs without end, the same on every run."""
        seed_everything(self.recipe.seed, self.rank, 2)
        self.generator.manual_seed(seed_of(self.recipe.seed, self.rank, 2))
        for epoch in itertools.count():
            with closing(self.loader.epoch(epoch)) as batches:
                for part in itertools.chain.from_iterable(batches):
                    yield self.task.training_batch(*part, self.generator)[0]

    def _asked_to_stop(self, interrupts: Interrupts) -> bool:
        if self.ranks == 1:
            return interrupts.asked
        # All processes must agree on the step; asking at every one would cost time.
        if self.progress.step % self.recipe.log_every:
            return False
        asked = torch.tensor(float(interrupts.asked), device=self.device)
        return bool(self.accelerator.reduce(asked, reduction="sum") > 0)

    def _count_time(self, *, training: bool) -> None:
        """Add the time since the last call, after the device has finished its work."""
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
            self.display.record(record)

    def export(self) -> None:
        """Write the trained model as one file for `ecoformer.load`."""
        model = self.bare if self.average is None else self.average.module
        if is_sharded(self.accelerator):
            weights = self.accelerator.get_state_dict(self.model)
            if self.first:
                model = models.build_model(self.recipe, self.splits)
                load_into(model, weights, source="the trained weights")
        if self.first:
            with replacing(self.folder.model_file) as file:  # `save` follows links
                save(model, file)
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        """Write a checkpoint, unless a loss or weight is not finite."""
        step = self.progress.step
        if self._saved == step:
            return
        self._count_time(training=True)
        shares = [p.to_local() if hasattr(p, "to_local") else p for p in self.bare.parameters()]
        finite = all(bool(torch.isfinite(x).all()) for x in (*shares, *self.losses))
        unsound = torch.tensor(0.0 if finite else torch.nan, device=self.device)
        self._check_finite("a loss or weight", float(self.accelerator.reduce(unsound, reduction="sum")))
        path = self.folder.new_checkpoint(step)
        try:
            self._write_checkpoint(path)
        except Exception as error:  # a full disk is an OSError, a RuntimeError or an error of safetensors
            shutil.rmtree(path, ignore_errors=True)
            reason = one_line(error)
            remedy = ": free some space" if "No space left" in reason else ""
            raise OSError(f"the checkpoint of step {step} was not completed ({reason}){remedy}") from error
        self.accelerator.wait_for_everyone()
        self._saved = step
        self._count_time(training=False)

    def _write_checkpoint(self, path: Path) -> None:
        accelerator = self.accelerator
        losses = torch.stack(self.losses).float() if self.losses else torch.empty(0, device=self.device)
        tensors = {"losses": accelerator.gather(losses.unsqueeze(0))}
        if self.average is not None:
            tensors |= {f"average.{name}": x for name, x in self.average.module.state_dict().items()}
        if self.first:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(path), safe_serialization=True)
        if self.first:
            write(path / PROGRESS, tensors, asdict(self.progress))
        accelerator.wait_for_everyone()
        if self.first:
            self.folder.complete(self.progress.step, self.recipe.keep)

    def _load(self) -> None:
        """Continue from the newest good checkpoint, if there is one."""
        step = self._agreed_step()
        if step:
            self._read_checkpoint(self.folder.checkpoint(step))
        if self.first:
            self.folder.go_back(step)
            if step:
                self.folder.tidy(self.recipe.keep)
        self.accelerator.wait_for_everyone()

    def _agreed_step(self) -> int:
        """The first process looks for a good checkpoint for all of them; 0 for none."""
        from accelerate.utils import broadcast_object_list

        found: list[Any] = [None]
        if self.first:
            try:
                found = [self.folder.newest_good() or 0]
            except (CheckpointError, OSError) as error:
                found = [error]
        if self.ranks > 1:
            broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        return int(found[0])

    def _read_checkpoint(self, path: Path) -> None:
        tensors, values = read(path / PROGRESS)
        progress, losses = Progress(**values), tensors.pop("losses")
        if progress.samples != self.progress.samples:
            raise ValueError(
                f"{self.folder.path} was trained on {progress.samples} samples, but the data now have "
                f"{self.progress.samples}: resume with the data it began with"
            )
        self.accelerator.load_state(str(path))
        self.progress = progress
        mine = losses[self.rank] if len(losses) == self.ranks else losses.mean(dim=0)
        self.losses = list(mine.to(self.device))
        if self.average is not None:
            averaged = {name.removeprefix("average."): tensor for name, tensor in tensors.items()}
            load_into(self.average.module, averaged, source=str(path))
