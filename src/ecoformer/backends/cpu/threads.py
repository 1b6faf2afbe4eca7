"""A team of threads, as many as PyTorch uses, and their scratch memory.

PyTorch's own threads are borrowed where they are OpenMP's: after an operator they wait for more work and keep
their cores busy, so that others would have to share them. Elsewhere, and in a forked process, where OpenMP's
are lost, plain Python threads do the same; they hold no lock while a kernel runs. numba's thread pools are
not used: the one that is always there breaks when two Python threads call it at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

Work = Callable[[int], Any]
_SHARES = 4
"""Into how many shares a thread's part is cut, so that nobody waits long for one that was held up."""


class _Helper:
    """One thread's part of a call, and what became of it."""

    __slots__ = ("_data", "_done", "_error", "_work")

    def __init__(self, work: Work, data: int) -> None:
        self._work, self._data = work, data
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        try:
            self._work(self._data)
        except BaseException as error:
            self._error = error
        self._done.release()

    def wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


_queue: SimpleQueue[_Helper] = SimpleQueue()
_workers = 0
_growing = threading.Lock()
_forked = False
_own = threading.local()


def _serve(queue: SimpleQueue[_Helper]) -> None:
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
    global _queue, _workers, _growing, _forked
    _queue, _workers, _growing, _forked = SimpleQueue(), 0, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@cache
def _openmp() -> Any:
    """The function of PyTorch's OpenMP that runs a C function on its threads; None where there is none."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def run_parts(
    address: int, job: int, parts: int, threads: int, size: int, addresses: tuple[int, int, int]
) -> None:
    """Call the C function at `address` with a `Team` that shares `parts`, on up to that many threads.

    Args:
        address: of the function.
        job: of the team.
        parts: what there is to do.
        threads: how many PyTorch would use.
        size: bytes of a thread's scratch memory.
        addresses: of the problem, of the layout, and of gradients.
    """
    members = min(threads, parts)
    shares = min(parts, _SHARES * members if members > 1 else 1)
    team = array("q", (0, 0, 0, job, parts, shares, scratch(members * size), size, *addresses))
    run_team(address, team.buffer_info()[0], members)


def run_team(address: int, data: int, threads: int) -> None:
    """Call the C function at `address` with `data` on that many threads, the caller's among them."""
    start = None if threads == 1 or _forked else _openmp()
    if start is None:
        spread(_function(address), data, threads)
    else:
        start(address, data, threads, 0)


@cache
def _function(address: int) -> Work:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def spread(work: Work, data: int, threads: int) -> None:
    """work(data) on that many Python threads, the caller's among them."""
    if _workers < threads - 1:
        _grow(threads - 1)
    helpers = [_Helper(work, data) for _ in range(threads - 1)]
    for helper in helpers:
        _queue.put(helper)
    try:
        work(data)
    finally:
        for helper in helpers:
            helper.wait()


def scratch(size: int) -> int:
    """The address of at least `size` bytes that are this thread's until its next call."""
    held: Any = getattr(_own, "memory", None)
    if held is None or held.numel() < size:
        held = _own.memory = torch.empty(size, dtype=torch.uint8)
    return int(held.data_ptr())
