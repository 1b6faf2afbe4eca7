"""`--graphs`: contestants as CUDA graphs, so that what launches their kernels is not timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.benchmarking.capturing import Room, Work, captured, waits
from ecoformer.benchmarking.checking import relative_error
from ecoformer.benchmarking.results import Row, failed
from ecoformer.benchmarking.timing import synchronize

_BOUND = 1e-2
"""Largest relative error of a replay against a call: same kernels, sums perhaps in another order."""


class WrongReplayError(RuntimeError):
    """A graph that computes something else than the call it was captured from."""


def require_graphs(device: torch.device) -> None:
    """Refuse devices that have no CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(f"--graphs times CUDA graphs, which need a CUDA device, got {device}: leave it out")


def capture_all(
    rows: list[Row],
    works: Mapping[int, Work],
    device: torch.device,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[int, Work]:
    """Replays of the calls `works`, by the index of their rows.

    A row whose call cannot be captured is replaced in `rows` by one that says why, and has no replay. Calls
    in which the host waits for the GPU come last: few of them can be captured, and a failed capture may take
    those after it along.
    """
    replays: dict[int, Work] = {}
    room = Room(device)
    for index in sorted(works, key=lambda index: waits(works[index])):
        progress(f"capturing {rows[index].label}")
        try:
            replays[index] = _capture(works[index], room, device)
        except Exception as error:
            rows[index] = _refused(rows[index], error)
            room = Room(device)
    return {index: replays[index] for index in works if index in replays}


def _capture(work: Work, room: Room, device: torch.device) -> Work:
    """The replay of a call, found to compute what the call computes."""
    results: list[object] = []

    def keeping() -> None:
        results[:] = [work()]

    replay = captured(keeping, room)
    called = _tensors(work())
    replay()
    synchronize(device)
    replayed = _tensors(results.pop())
    error = relative_error(replayed, called) if called else 0.0
    if not error <= _BOUND:
        raise WrongReplayError(f"wrong result: the replay is {error:.1e} off, at most {_BOUND:.0e} allowed")
    return replay


def _tensors(result: object) -> list[Tensor]:
    """The tensors of a result, finite: half precision may overflow in a call and in its replay alike."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part.detach().nan_to_num() for part in parts if isinstance(part, Tensor)]


def _refused(row: Row, error: Exception) -> Row:
    if isinstance(error, WrongReplayError):
        return replace(row, failure=str(error), wrong=True)
    if isinstance(error, torch.OutOfMemoryError):
        return failed(row, error)
    return replace(row, failure=f"cannot be captured as a CUDA graph: {one_line(error, 200)}")
