"""The training loop, on Accelerate: one process or many, interrupted or not, with the same outcome."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ecoformer.checkpoints import load, save
from ecoformer.data.splits import Arrays, Splits
from ecoformer.hashing import fit_hashers, hashers_of
from ecoformer.running import eval_mode
from ecoformer.storage import load_into
from ecoformer.training import state
from ecoformer.training.building import build_model
from ecoformer.training.display import Display
from ecoformer.training.interrupts import Interrupts
from ecoformer.training.loading import Loader, measured_batches, seed_everything, seed_of
from ecoformer.training.optimisation import LearningRate, build_optimiser
from ecoformer.training.recipe import Recipe
from ecoformer.training.state import RunFolder
from ecoformer.training.tasks import Judgement, Task, distillation_loss


class Interrupted(RuntimeError):
    """The run was asked to stop and has saved itself."""


@dataclass
class Progress:
    """Where a run stands; with the recipe it determines all that is to come."""

    step: int = 0
    best: float = 0.0
    seconds: float = 0.0
    """Spent on training steps, evaluation and checkpoints left out."""


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
        folder.check(recipe, resume=resume)
        self.accelerator = _accelerator(recipe, device)
        self.first = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.display = display or Display(show=False)
        where = (self.accelerator.process_index, self.accelerator.num_processes)
        self.task = Task(recipe, splits)
        self.loader = Loader(splits.train, recipe, self.device, *where)
        self.test = splits.test.to(self.device) if isinstance(splits.test, Arrays) else splits.test
        self.total = recipe.schedule.steps or self.loader.steps * (recipe.schedule.epochs or 1)
        bare = build_model(recipe, splits)
        self.teacher = _teacher(recipe, self.device)
        self.ema = _ema(bare, recipe, self.device)
        optimiser = build_optimiser(bare, recipe)
        self.model, self.optimiser = self.accelerator.prepare(bare, optimiser)
        self.rate = LearningRate(self.optimiser, recipe, self.total, self.loader.steps)
        self.generator = torch.Generator(self.device)
        self.progress = Progress()
        self.losses: list[Tensor] = []
        if resume:
            self._resume()

    @property
    def bare(self) -> nn.Module:
        """The model without what Accelerate wraps around it."""
        bare: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return bare

    @property
    def tested(self) -> nn.Module:
        """The model that is measured and kept: the averaged one, if weights are averaged."""
        tested: nn.Module = self.model if self.ema is None else self.ema.module
        return tested

    def run(self) -> dict[str, float]:
        """Train to the end; returns the last evaluation."""
        measured: dict[str, float] = {}
        if self.first:
            self.folder.begin(self.recipe)
        with Interrupts() as interrupts, self.display.training(self.total, self.progress.step) as advance:
            while self.progress.step < self.total:
                epoch, start = divmod(self.progress.step, self.loader.steps)
                if start == 0:
                    self._fit(epoch)
                for parts in self.loader.epoch(epoch, start):
                    self._step(parts)
                    advance(self.rate.now)
                    if self._evaluation_due():
                        measured = self.evaluate()
                        self._save()
                    elif self.progress.step % self.recipe.save_every == 0:
                        self._save()
                    if self._asked_to_stop(interrupts):
                        self._save()
                        raise Interrupted(f"stopped at step {self.progress.step} of {self.total}")
                    if self.progress.step == self.total:
                        break
        return measured or self.evaluate()

    def _step(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        began = time.perf_counter()
        recipe, step = self.recipe, self.progress.step
        rank = self.accelerator.process_index
        self.model.train(recipe.mode == "train")
        self.rate.set(step)
        seed_everything(recipe.seed, rank, step)
        self.generator.manual_seed(seed_of(recipe.seed, rank, step, 1))
        for inputs, targets in parts:
            with self.accelerator.accumulate(self.model):
                x, y = self.task.training_batch(inputs, targets, self.generator)
                loss = self._loss(x, y)
                self.accelerator.backward(loss)
                if recipe.optimiser.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimiser.clip)
                self.optimiser.step()
                self.optimiser.zero_grad()
            self.losses.append(loss.detach())
        self.progress.step += 1
        if self.ema is not None:
            self.ema.update(self.bare, step=self.progress.step)
        if self.progress.step % recipe.log_every == 0:
            self._log_training()
        self.progress.seconds += time.perf_counter() - began

    def _loss(self, inputs: Any, targets: Tensor) -> Tensor:
        logits = self.task.answer(self.model, inputs)
        loss = self.task.loss(logits, targets)
        if self.teacher is None or self.recipe.teacher is None:
            return loss
        with torch.no_grad(), self.accelerator.autocast():
            taught = self.task.answer(self.teacher, inputs)
        weight = self.recipe.teacher.weight
        return (1 - weight) * loss + weight * distillation_loss(
            logits, taught, self.recipe.teacher.temperature
        )

    def _log_training(self) -> None:
        """Read the losses since the last time, which waits for the device; stop if one is not a number."""
        if not self.losses:
            return
        mean = self.accelerator.reduce(torch.stack(self.losses).mean(), reduction="mean")
        self.losses.clear()
        loss, step = float(mean), self.progress.step
        if not torch.isfinite(mean):
            raise FloatingPointError(
                f"the loss became {loss} by step {step}: lower optimiser.lr={self.recipe.optimiser.lr:g}, or "
                "set optimiser.clip=1 or precision=fp32"
            )
        self._record({"step": step, "split": "train", "loss": loss, "lr": self.rate.now})
        self.display.loss(loss)

    def _evaluation_due(self) -> bool:
        step = self.progress.step
        return step == self.total or step % (self.recipe.evaluate_every * self.loader.steps) == 0

    def evaluate(self) -> dict[str, float]:
        """Accuracy and loss on the test data."""
        self._log_training()
        sums = judge(self.tested, self.task, self._test_batches(), self.accelerator)
        measured = figures(sums)
        self.progress.best = max(self.progress.best, measured["accuracy"])
        epoch = self.progress.step / self.loader.steps
        self._record({"step": self.progress.step, "split": "test", "epoch": epoch, **measured})
        self.display.evaluation(epoch, measured)
        return measured

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        where = (self.accelerator.process_index, self.accelerator.num_processes)
        return measured_batches(self.test, self.recipe, self.device, *where)

    def _fit(self, epoch: int) -> None:
        """Learn the hash functions: before the first step, and again every tau epochs."""
        hashers, every = hashers_of(self.bare), self.recipe.hashing.refit_every
        unfitted = any(not bool(hasher.fitted) for hasher in hashers.values())
        if not hashers or not (unfitted or (every and epoch % every == 0)):
            return
        inputs, _ = self.task.test_batch(*self.loader.samples(self.recipe.hashing.samples, epoch))
        fit_hashers(
            self.model,
            [inputs],
            samples=len(inputs),
            seed=seed_of(self.recipe.seed, epoch) % 2**31,
            group=dist.group.WORLD if self.accelerator.num_processes > 1 else "alone",
            forward=self.task.answer,
            progress=self.display.show,
        )
        if self.ema is not None:
            _copy_buffers(self.bare, self.ema.module)

    def _asked_to_stop(self, interrupts: Interrupts) -> bool:
        if self.accelerator.num_processes == 1:
            return interrupts.asked
        # All processes must agree on the step; asking at every one would cost.
        if self.progress.step % self.recipe.log_every:
            return False
        asked = torch.tensor(float(interrupts.asked), device=self.device)
        return bool(self.accelerator.reduce(asked, reduction="sum") > 0)

    def _save(self) -> None:
        """Write a checkpoint of a state whose losses are all known to be finite."""
        self._log_training()
        step = self.progress.step
        try:
            if self.first:
                state.prepare(self.folder, step)
            self.accelerator.wait_for_everyone()
            path = self.folder.unfinished(step)
            self.accelerator.save_state(str(path), safe_serialization=True)
            if self.first:
                averaged = {} if self.ema is None else self.ema.module.state_dict()
                state.write_progress(path, asdict(self.progress), averaged)
            self.accelerator.wait_for_everyone()
            if self.first:
                state.complete(self.folder, step, self.recipe.keep)
        except OSError as error:
            shutil.rmtree(self.folder.unfinished(step), ignore_errors=True)
            raise OSError(f"the checkpoint of step {step} could not be written: {error}") from error
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        path = self.folder.newest_good()
        if path is None:
            return
        progress, averaged = state.read_progress(path)
        self.progress = Progress(**progress)
        self.accelerator.load_state(str(path))
        if self.ema is not None:
            load_into(self.ema.module, averaged, source=str(path))
        if self.first:
            self.folder.cut_metrics(self.progress.step)
        self.accelerator.wait_for_everyone()

    def _record(self, record: dict[str, Any]) -> None:
        if self.first:
            self.folder.log(record)
            self.display.board(record)

    def export(self) -> Path:
        """Write the trained model as one file for `ecoformer.load`."""
        whole = self.accelerator.get_state_dict(self.model) if self.ema is None else None
        if self.first:
            model = self.ema.module if self.ema is not None else self.bare
            if whole is not None and self.accelerator.distributed_type.value == "FSDP":
                model = build_model(self.recipe, self.splits)
                load_into(model, whole, source="the trained weights")
            save(model, self.folder.model_file)
        self.accelerator.wait_for_everyone()
        return self.folder.model_file


@torch.no_grad()
def judge(
    model: nn.Module, task: Task, batches: Iterator[tuple[Tensor, Tensor]], accelerator: Any = None
) -> Tensor:
    """Right answers, loss and number of questions over all batches and processes, (3,)."""
    total = torch.zeros(3, dtype=torch.float64)
    mixed = accelerator.autocast() if accelerator is not None else contextlib.nullcontext()
    with eval_mode(model), mixed:
        for inputs, targets in batches:
            x, y = task.test_batch(inputs, targets)
            judged: Judgement = task.judge(task.answer(model, x), y)
            total = total.to(x.device) + judged.stacked()
    if accelerator is None:
        return total
    summed: Tensor = accelerator.reduce(total.to(accelerator.device), reduction="sum")
    return summed


def figures(sums: Tensor) -> dict[str, float]:
    """Sums as an accuracy (0 to 1) and a mean loss."""
    right, loss, asked = sums.tolist()
    return {"accuracy": right / max(asked, 1.0), "loss": loss / max(asked, 1.0)}


def _accelerator(recipe: Recipe, device: str | None) -> Any:
    from accelerate import Accelerator

    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here")
    return Accelerator(
        cpu=device == "cpu",
        mixed_precision="no" if recipe.precision == "fp32" else recipe.precision,
        gradient_accumulation_steps=recipe.accumulate,
        dynamo_backend="inductor" if recipe.compile else "no",
        step_scheduler_with_optimizer=False,
    )


def _teacher(recipe: Recipe, device: torch.device) -> nn.Module | None:
    if recipe.teacher is None:
        return None
    if not Path(recipe.teacher.checkpoint).exists():
        raise FileNotFoundError(f"teacher.checkpoint: there is no file {recipe.teacher.checkpoint}")
    return load(recipe.teacher.checkpoint).to(device).eval().requires_grad_(False)


def _ema(model: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    if not recipe.ema:
        return None
    from timm.utils import ModelEmaV3

    # Hash functions are copied: a mean of two of them is neither.
    return ModelEmaV3(model.to(device), decay=recipe.ema, use_warmup=True, exclude_buffers=True)


@torch.no_grad()
def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for ours, theirs in zip(target.buffers(), source.buffers(), strict=True):
        ours.copy_(theirs)
