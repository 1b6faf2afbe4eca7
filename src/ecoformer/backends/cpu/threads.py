"""Threads that run parts of a kernel, as many as PyTorch uses, and each thread's scratch memory.

numba's own thread pools are not used: the one that is always there breaks when two Python threads call it at
once, and the one on OpenMP ends a process that forks. Kernels run without Python's lock, in plain threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

Work = Callable[[int, int], None]


class _Part:
    """One thread's part of a call, and what became of it."""

    __slots__ = ("_done", "_error", "_first", "_last", "_work")

    def __init__(self, work: Work, first: int, last: int) -> None:
        self._work, self._first, self._last = work, first, last
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        try:
            self._work(self._first, self._last)
        except BaseException as error:
            self._error = error
        self._done.release()

    def wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


_queue: SimpleQueue[_Part] = SimpleQueue()
_workers = 0
_growing = threading.Lock()
_own = threading.local()


def _serve(queue: SimpleQueue[_Part]) -> None:
    while True:
        queue.get().run()


def _grow(workers: int) -> None:
    global _workers
    with _growing:
        while _workers < workers:
            threading.Thread(target=_serve, args=(_queue,), name="ecoformer", daemon=True).start()
            _workers += 1


def _forget() -> None:
    """A forked process has none of its parent's threads."""
    global _queue, _workers, _growing
    _queue, _workers, _growing = SimpleQueue(), 0, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def spread(work: Work, count: int, threads: int) -> None:
    """work(first, last) for ranges that make up 0 to `count`, one a thread; the caller runs the first."""
    threads = min(threads, count)
    if threads <= 1:
        work(0, count)
        return
    if _workers < threads - 1:
        _grow(threads - 1)
    edges = [count * i // threads for i in range(threads + 1)]
    parts = [_Part(work, edges[i], edges[i + 1]) for i in range(1, threads)]
    for part in parts:
        _queue.put(part)
    try:
        work(0, edges[1])
    finally:
        for part in parts:
            part.wait()


def scratch(size: int) -> int:
    """The address of at least `size` bytes that are this thread's until its next call."""
    held: Any = getattr(_own, "memory", None)
    if held is None or held.numel() < size:
        held = _own.memory = torch.empty(size, dtype=torch.uint8)
    return int(held.data_ptr())
