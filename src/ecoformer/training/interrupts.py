"""Being asked to stop: the first signal lets the run save itself, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from typing_extensions import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context in which Ctrl-C and SIGTERM set `asked` instead of ending the program."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
