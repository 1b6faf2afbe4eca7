"""Time, memory and energy of contestants that were found to be right."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ecoformer.arguments import one_line
from ecoformer.backends.choice import use_backend
from ecoformer.benchmarking.contestants import relative_error
from ecoformer.benchmarking.energy import EnergyMeter
from ecoformer.benchmarking.results import Check, Row, Run, Timing, device_name, set_ratios

Key = TypeVar("Key")
Call = Callable[[], object]
Progress = Callable[[str], None]

_WARM_UP = 3
_FEWEST, _MOST = 5, 1000
_CACHE = 256 << 20
"""Bytes written between two GPU calls: more than the L2 cache of any GPU."""
_BUSY, _FEW = 120.0, 10
"""Interruptions per second above which a machine is busy, unless there were only a few: another busy thread
causes 250 on two processors, a quiet system about 40."""
_REPLAY_BOUND = 1e-2
"""Relative error of a replayed graph against a call: the same kernels, sums perhaps in another order."""


@dataclass(frozen=True)
class Work:
    """A call to measure, and the backend of hashed attention to choose for it, outside the timed part."""

    call: Callable[[], Any]
    backend: str | None = None

    def __call__(self) -> Any:
        """Run it once, untimed."""
        with use_backend(self.backend):
            return self.call()


def no_progress(text: str) -> None:
    """Show no progress."""


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_contestants(
    contestants: Mapping[Key, Work], device: torch.device, *, seconds: float = 2.0
) -> dict[Key, Timing]:
    """Time every contestant once per round, round after round, so that drift affects all alike.

    Args:
        contestants: by name. They have run before: compilation and tuning are done.
        device: where they run. On a GPU, events time each call after the L2 cache was overwritten.
        seconds: budget for all contestants together; it determines the number of rounds.
    """
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_ms

    def one_round() -> list[float]:
        times = []
        for work in contestants.values():
            with use_backend(work.backend):
                times.append(clock(work.call))
        return times

    per_round = _seconds(one_round)
    if per_round < seconds / 10:
        for _ in range(_WARM_UP - 1):
            per_round = _seconds(one_round)
    rounds = [one_round() for _ in range(int(min(max(seconds / per_round, _FEWEST), _MOST)))]
    return {name: Timing.of([times[i] for times in rounds]) for i, name in enumerate(contestants)}


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return max(time.perf_counter() - start, 1e-7)


def _cpu_ms(call: Call) -> float:
    call()  # fills the caches, which another contestant used before
    return _seconds(call) * 1e3


def _gpu_clock(device: torch.device) -> Callable[[Call], float]:
    flush: Tensor = torch.empty(_CACHE, dtype=torch.int8, device=device)

    def clock(call: Call) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))

    return clock


def interruptions() -> int:
    """How often other programs took a processor from this one so far; 0 where this is not counted."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def peak_memory_mb(work: Call, device: torch.device) -> float:
    """Peak memory of one call in MB (10⁶ bytes), output included, beyond what was allocated before.

    On a GPU this is the figure of PyTorch's allocator. On a CPU the profiler reports every tensor that is
    allocated and freed; memory that a library allocates by itself is not seen.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = work()
    del held
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    allocated = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak / 1e6


def capture(work: Work, stream: torch.cuda.Stream, pool: Any) -> tuple[Work, object]:
    """The GPU work of a call as a CUDA graph, to be timed without its launches, and the graph's output.

    Graphs of one pool share memory: replay one at a time. What the call reads must stay where it is.
    """
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), warnings.catch_warnings():
            work()
            warnings.simplefilter("ignore")  # PyTorch warns that this mode does not notice everything
            torch.cuda.set_sync_debug_mode("error")
            try:
                work()  # raises if the host waits for the GPU: a capture that fails is hard to clean up
            finally:
                torch.cuda.set_sync_debug_mode("default")
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The outer block restores the current stream where a failed capture does not.
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool, stream=stream):
            out = work()
    return Work(graph.replay), out


def capture_place(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """A stream and memory for captures; take new ones after a failed capture."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]


@dataclass
class Bench:
    """How to measure; rows and notes are collected in `run`.

    Attributes:
        device: where the contestants run.
        seconds: approximate time for each contestant.
        graphs: measure replays of CUDA graphs instead of calls.
        memory: measure peak memory.
        energy: measure energy, which takes a few more seconds for each contestant.
        progress: called with a line about each step.
    """

    device: torch.device
    seconds: float = 1.0
    graphs: bool = False
    memory: bool = True
    energy: bool = False
    progress: Progress = no_progress
    run: Run = field(init=False)

    def __post_init__(self) -> None:
        if self.graphs and self.device.type != "cuda":
            raise ValueError(f"--graphs needs a CUDA device, got {self.device}: leave it out")
        self.run = Run(device_name(self.device))
        self._meter = EnergyMeter(self.device) if self.energy else None
        if self._meter is not None:
            self.run.notes.append(self._meter.note)

    def measure(self, rows: Sequence[Row], works: Sequence[Work | None], items: int = 1) -> None:
        """Fill in the rows that have not failed by measuring their works, and add all rows to the run.

        `items` is the number of samples per call, for the energy of one.
        """
        calls = {i: work for i, work in enumerate(works) if work is not None and rows[i].failure is None}
        timed = self._captured(rows, calls) if self.graphs else dict(calls)
        self.progress(f"timing {len(timed)} contestants")
        for index, timing in self._time(timed).items():
            rows[index].timing = timing
            if self._meter is not None:
                self.progress(f"energy of {rows[index].label}")
                with use_backend(timed[index].backend):
                    rows[index].energy = self._meter.measure(timed[index].call, items)
        measured = list(timed) if self.memory else []
        timed.clear()  # graphs hold memory
        for index in measured:
            rows[index].peak_mb = peak_memory_mb(calls[index], self.device)
        set_ratios(rows)
        self.run.rows += rows

    def _time(self, works: Mapping[int, Work]) -> dict[int, Timing]:
        before, start = interruptions(), time.perf_counter()
        timings = time_contestants(works, self.device, seconds=self.seconds * len(works)) if works else {}
        count, taken = interruptions() - before, time.perf_counter() - start
        if self.device.type == "cpu" and count > max(_FEW, _BUSY * taken) and self.run.quiet:
            self.run.quiet = False
            self.run.notes.append(
                f"the machine is busy: other programs, or more threads than processors, interrupted this one "
                f"{count / taken:.0f} times per second; do not trust these times or ratios"
            )
        return timings

    def _captured(self, rows: Sequence[Row], works: Mapping[int, Work]) -> dict[int, Work]:
        """CUDA graphs of the calls, each compared with its call; rows that have none say why."""
        graphs: dict[int, Work] = {}
        place = capture_place(self.device)
        for index, work in works.items():
            self.progress(f"capturing {rows[index].label}")
            try:
                graph, out = capture(work, *place)
            except Exception as error:
                rows[index].failure = f"cannot be captured as a CUDA graph: {one_line(error, 200)}"
                place = capture_place(self.device)
                continue
            rows[index].check(partial(self._compare_replay, graph, out, work))
            if rows[index].failure is None:
                graphs[index] = graph
        return graphs

    def _compare_replay(self, graph: Work, out: object, work: Work) -> Check:
        called = _tensors(work())
        graph()
        synchronize(self.device)
        return Check(relative_error(_tensors(out), called), _REPLAY_BOUND, "the call")


def _tensors(result: object) -> list[Tensor]:
    """The tensors of a result; what overflows in half precision does so in a call and in its replay."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part.detach().nan_to_num() for part in parts if isinstance(part, Tensor)]
