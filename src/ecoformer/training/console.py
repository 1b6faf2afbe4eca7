"""What users see of a run and how they stop it: progress, TensorBoard, signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from typing_extensions import Self

SAME_SIGNAL = 1.0
"""Seconds within which a second signal repeats the first: a terminal and torchrun both send it."""


class Display:
    """Progress on stderr: a bar on a terminal, one line for each evaluation; `board` is for TensorBoard."""

    def __init__(self, *, show: bool = True, board: Path | None = None) -> None:
        self.show, self.console, self._folder = show, Console(stderr=True), board
        self._describe: Callable[[str], None] = lambda text: None
        self._board: Any = None
        self._loss = ""

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Show a bar; call the function that is given once a step.

        TensorBoard drops what an interrupted run logged after step `done`.
        """
        hidden = not (self.show and self.console.is_terminal)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with ExitStack() as stack:
            if self._folder is not None:
                from torch.utils.tensorboard import SummaryWriter

                writer: Any = SummaryWriter(str(self._folder), purge_step=done + 1)
                self._board = stack.enter_context(closing(writer))
            bar = Progress(*columns, console=self.console, transient=True, disable=hidden)
            task = stack.enter_context(bar).add_task("training", total=total, completed=done)
            if self.show and not self.console.is_terminal:
                self.console.print(f"training: {total - done} steps")
            self._describe = lambda text: bar.update(task, description=text)
            yield lambda: bar.advance(task)

    def record(self, record: dict[str, Any]) -> None:
        """Show one record of the metrics."""
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{record['split']}/{name}", value, record["step"])
        if record["split"] == "train":
            self._loss = f"{record['loss']:.4f}"
            self._describe(f"training, loss {self._loss}")
        elif self.show:
            text = "epoch {epoch:g}: accuracy {accuracy:.2%}, test loss {loss:.4f}".format(**record)
            self.console.print(text + (f", training loss {self._loss}" if self._loss else ""))


class Interrupts:
    """Context in which the first Ctrl-C or SIGTERM sets `asked`, and the second ends the process."""

    def __init__(self, *, show: bool = False) -> None:
        self.asked, self.show = False, show
        self._since, self._process = 0.0, os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = True, now
            if self.show and os.getpid() == self._process:  # DataLoader workers inherit the handler
                os.write(2, b"\necoformer: stopping after this step and saving; once more ends at once\n")
        elif now - self._since >= SAME_SIGNAL:
            self.__exit__()
            os.kill(os.getpid(), number)
