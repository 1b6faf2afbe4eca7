"""Being asked to stop: the first signal lets the run save itself, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from typing_extensions import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 1.0
"""Seconds within which a second signal is the first one again: a terminal and torchrun both send it."""

_NOTICE = b"\necoformer: stopping after this step and saving; once more ends at once\n"


class Interrupts:
    """Context in which Ctrl-C and SIGTERM set `asked` instead of ending the program.

    Args:
        show: say on stderr that the run is going to stop.
    """

    def __init__(self, *, show: bool = False) -> None:
        self.asked, self.show = False, show
        self._since, self._process = 0.0, os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self._since < SAME:
            return
        if self.asked:
            self.__exit__()
            os.kill(os.getpid(), number)
            return
        self.asked, self._since = True, now
        if self.show and os.getpid() == self._process:  # workers that decode pictures inherit the handler
            os.write(2, _NOTICE)
