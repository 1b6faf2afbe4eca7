"""What people see of a run: a bar with rate and time left on a terminal, a line an evaluation elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        """The present rate, once there is one."""
        return Text(f"{task.speed:.1f} steps/s" if task.speed else "")


class Display:
    """Prints the course of a run.

    Args:
        show: whether to print at all; only the first process does.
        board: folder of TensorBoard's files, or None.
    """

    def __init__(self, *, show: bool = True, board: Path | None = None) -> None:
        self.show, self.console, self._last_loss = show, Console(stderr=True), ""
        self._bar: tuple[Progress, Any] | None = None
        self._folder = board
        self._board: Any = None

    @contextlib.contextmanager
    def training(self, total: int, done: int) -> Iterator[Callable[[], None]]:
        """While the context is open a bar is shown; the function it gives is called once a step.

        TensorBoard forgets what an interrupted run logged after step `done`.
        """
        self._board = None if self._folder is None else _writer(self._folder, done + 1)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        hidden = not (self.show and self.console.is_terminal)
        with Progress(
            *columns, Rate(), TimeRemainingColumn(), console=self.console, transient=True, disable=hidden
        ) as bar:
            task = bar.add_task("training", total=total, completed=done)
            self._bar = (bar, task)
            try:
                yield lambda: bar.advance(task)
            finally:
                self._bar = None
                if self._board is not None:
                    self._board.close()

    def loss(self, loss: float) -> None:
        """The training loss of late."""
        self._last_loss = f"{loss:.4f}"
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, description=f"training, loss {loss:.4f}")

    def evaluation(self, epoch: float, measured: dict[str, float]) -> None:
        """One line."""
        if self.show:
            text = f"epoch {epoch:g}: accuracy {measured['accuracy']:.2%}, test loss {measured['loss']:.4f}"
            self.console.print(text + (f", training loss {self._last_loss}" if self._last_loss else ""))

    def board(self, record: dict[str, Any]) -> None:
        """One record into TensorBoard."""
        if self._board is None:
            return
        for name, value in record.items():
            if isinstance(value, float):
                self._board.add_scalar(f"{record['split']}/{name}", value, record["step"])


def _writer(folder: Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard=true needs another package: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=first)
