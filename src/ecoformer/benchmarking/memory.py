"""Peak memory of one call, beyond what its inputs hold already."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory_mb(work: Callable[[], object], device: torch.device) -> float:
    """MB (10⁶ bytes) that one call holds at its peak, output included, beyond what was there before.

    On a GPU this is what PyTorch's allocator says. On the CPU the profiler reports every tensor that is
    allocated and freed, within operators too; memory that a library takes by itself is not seen.
    """
    gc.collect()
    return (_gpu_peak(work, device) if device.type == "cuda" else _cpu_peak(work)) / 1e6


def _gpu_peak(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(work: Callable[[], object]) -> int:
    # The profiler announces itself on stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = work()
    del held
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return peak
