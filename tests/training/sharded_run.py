"""A run whose weights FSDP splits over processes on CPUs, which Accelerate itself would do on GPUs only."""

from __future__ import annotations

import sys

import torch
from accelerate.state import DistributedType, PartialState

from ecoformer.third_party import repair_torchvision
from ecoformer.training import load_recipe, train
from ecoformer.training.loop import Trainer


def main(file: str, out: str, *options: str) -> None:
    repair_torchvision()
    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)
    begin, step = Trainer.run, Trainer._step
    last = next((int(option.partition("=")[2]) for option in options if "--stop-at" in option), None)

    def checked(self):
        local = sum(p.to_local().numel() for p in self.model.parameters())
        if not 0 < local < self.parameters:
            raise RuntimeError(f"{local} of {self.parameters} weights here: they are not split")
        return begin(self)

    def stopping(self, parts):
        if self.progress.step == last:
            raise RuntimeError("power cut")
        step(self, parts)

    Trainer.run, Trainer._step = checked, stopping
    torch.set_num_threads(1)
    changes = ["ema=0.9"] if "--ema" in options else []
    train(load_recipe(file, changes), out, resume="--resume" in options, show=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
