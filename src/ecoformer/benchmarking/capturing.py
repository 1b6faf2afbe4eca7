"""The GPU work of a call as a CUDA graph, and what to do where it cannot be had."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

Work = Callable[[], object]

_WARM_UP = 3


class Room:
    """Where CUDA graphs are captured: those of one room share their memory and run one at a time.

    Replaying one overwrites what the others computed. Once a capture has failed, take another room.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    @cached_property
    def index(self) -> int:
        """Number of the device, the current one by default."""
        given = None if self._device is None else self._device.index
        return torch.cuda.current_device() if given is None else given

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream of all captures: memory is shared within a stream only."""
        return torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]

    @cached_property
    def pool(self) -> Any:
        """The memory."""
        return torch.cuda.graph_pool_handle()


def captured(work: Work, room: Room | None = None) -> Work:
    """The GPU work of a call as a CUDA graph: what it takes without the time to launch it.

    What `work` reads must stay where it is as long as the graph is replayed. Where it cannot be captured, its
    own error is raised, and the device is left so that others can.
    """
    room = room or Room()
    with torch.cuda.device(room.index):
        current = torch.cuda.current_stream()
        room.stream.wait_stream(current)
        with torch.cuda.stream(room.stream):
            for _ in range(_WARM_UP):
                work()
        current.wait_stream(room.stream)
        torch.cuda.synchronize()
        # What is collected during a capture may be another graph; what is cached no graph can use.
        gc.collect()
        torch.cuda.empty_cache()
        return _record(work, room).replay


def _record(work: Work, room: Room) -> torch.cuda.CUDAGraph:
    """Not `torch.cuda.graph`: where a capture ends badly, that one leaves its stream as the current one."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(room.stream):
            graph.capture_begin(room.pool)
            work()
            graph.capture_end()
    except Exception:
        _abandon(graph, room)
        raise
    return graph


_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures: PyTorch's allocator may still hold pointers to them."""


def _abandon(graph: torch.cuda.CUDAGraph, room: Room) -> None:
    """End a capture that failed, so that others can begin.

    CUDA takes the stream out of an invalid capture, but PyTorch's allocator would stay in it.
    """
    try:
        with torch.cuda.stream(room.stream):
            graph.capture_end()
    except RuntimeError:
        _abandoned.append(graph)
        with suppress(RuntimeError):
            _end_allocation(room.index, room.pool)
            torch._C._cuda_releasePool(room.index, room.pool)
        _heal_generator(Room(torch.device("cuda", room.index)))


def _end_allocation(index: int, pool: Any) -> None:
    before_2_8 = "_cuda_endAllocateCurrentStreamToPool"
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(torch._C, before_2_8)
    end(index, pool)


def _heal_generator(room: Room) -> None:
    """A generator left in a failed capture refuses to draw until another capture has ended well."""
    with suppress(RuntimeError):
        graph, nothing = torch.cuda.CUDAGraph(), torch.zeros(1, device=torch.device("cuda", room.index))
        torch.cuda.synchronize()
        with torch.cuda.stream(room.stream):
            graph.capture_begin(room.pool)
            nothing.zero_()
            graph.capture_end()


def waits(work: Work) -> bool:
    """Whether the host waits for the GPU within a call, as far as PyTorch notices."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False
