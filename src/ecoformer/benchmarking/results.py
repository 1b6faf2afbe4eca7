"""What a benchmark hands back: rows, each with a time or with the reason why there is none, and notes."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ecoformer
from ecoformer.arguments import one_line
from ecoformer.benchmarking.energy import Energy
from ecoformer.benchmarking.timing import Timing


@dataclass(frozen=True)
class Check:
    """A result held against a better one.

    Attributes:
        error: |result - truth| / |truth|, the worst of all comparisons.
        bound: what it may be.
        against: what the truth was.
    """

    error: float
    bound: float
    against: str

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Row:
    """One contestant.

    Attributes:
        mechanism: name of the mechanism.
        backend: what computed it.
        setting: what was measured: shape, batch, resolution.
        checked: the comparison that stood before the time; None where there was nothing to compare.
        failure: why there is no time.
        wrong: whether the failure is one of the code, and not of the machine's memory.
        timing: the time.
        ratio_to_sdpa: how many times as fast as softmax by SDPA in the same run.
        per_second: samples or tokens a second, where the contestant is a model.
        peak_mb: peak memory of a call.
        energy: energy of a call.
    """

    mechanism: str
    backend: str
    setting: dict[str, Any]
    checked: Check | None = None
    failure: str | None = None
    wrong: bool = False
    timing: Timing | None = None
    ratio_to_sdpa: float | None = None
    per_second: float | None = None
    peak_mb: float | None = None
    energy: Energy | None = None
    as_timed: Check | None = None
    """A second comparison, of the very work that is timed: whole models only."""

    @property
    def label(self) -> str:
        """Mechanism and backend."""
        return f"{self.mechanism} ({self.backend})"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: times at the top, what is not finite as null."""
        timing = asdict(self.timing) if self.timing else dict.fromkeys(Timing.__dataclass_fields__)
        facts = {"mechanism": self.mechanism, "backend": self.backend} | self.setting | timing
        facts |= {
            "ratio_to_sdpa": self.ratio_to_sdpa,
            "peak_mb": self.peak_mb,
            "checked": _told(self.checked),
        }
        if self.as_timed is not None:
            facts["checked_as_timed"] = _told(self.as_timed)
        if self.per_second is not None:
            facts[self.setting["counted"] + "_per_s"] = self.per_second
        if self.energy is not None:
            facts["energy"] = self.energy.to_dict()
        if self.failure is not None:
            facts["failure"] = self.failure
        finite: dict[str, Any] = _finite(facts)
        return finite


@dataclass
class Run:
    """All rows of one run, and what a reader must know of them."""

    device: str
    threads: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    quiet: bool = True
    """Whether nobody else was seen to take the CPU while it was timed."""

    @property
    def wrong(self) -> list[Row]:
        """Rows whose code failed."""
        return [row for row in self.rows if row.wrong]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        own = ecoformer.__version__
        versions = {"python": platform.python_version(), "torch": torch.__version__, "ecoformer": own}
        facts = {"device": self.device, "threads": self.threads, "versions": versions, "quiet": self.quiet}
        return facts | self.more | {"rows": [row.to_dict() for row in self.rows], "notes": self.notes}


def with_check(row: Row, check: Check) -> Row:
    """The row, failed if the check is."""
    if check.passed:
        return row
    why = f"wrong result: error {check.error:.1e} against {check.against}, at most {check.bound:.1e} allowed"
    return replace(row, failure=why, wrong=True)


def failed(row: Row, error: Exception) -> Row:
    """The row of a contestant that raised: want of memory is the machine's, all else the code's."""
    short_of_memory = isinstance(
        error, (torch.OutOfMemoryError, MemoryError)
    ) or "can't allocate memory" in str(error)
    if short_of_memory:
        return replace(row, failure="out of memory")
    return replace(row, failure=f"failed: {type(error).__name__}: {one_line(error, 200)}", wrong=True)


def device_name(device: torch.device) -> str:
    """What ran, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() or f"{platform.machine()} CPU"


@cache
def _processor() -> str | None:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else None


def hardware(device: torch.device) -> str:
    """What ran, and on the CPU with how many threads."""
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return device_name(device) + threads


def with_ratios(rows: list[Row]) -> list[Row]:
    """The same rows with `ratio_to_sdpa`, by the softmax row among them."""
    base = next((r.timing for r in rows if r.mechanism == "softmax"), None)

    def ratio(row: Row) -> float | None:
        return base.median_ms / row.timing.median_ms if base and row.timing else None

    return [replace(row, ratio_to_sdpa=ratio(row)) for row in rows]


def _told(check: Check | None) -> dict[str, Any] | None:
    return None if check is None else asdict(check) | {"passed": check.passed}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
