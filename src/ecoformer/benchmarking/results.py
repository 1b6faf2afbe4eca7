"""What a benchmark returns: rows, each with a time or the reason why it has none, and notes."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import ecoformer
from ecoformer.arguments import one_line


@dataclass(frozen=True)
class Check:
    """A comparison: the worst |result - truth| / |truth|, its bound, and the name of the truth."""

    error: float
    bound: float
    against: str

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        error = self.error if math.isfinite(self.error) else None
        return {"error": error, "bound": self.bound, "against": self.against, "passed": self.passed}


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of the milliseconds per call."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """Summarise single times."""
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, low, high, len(milliseconds))


@dataclass
class Row:
    """One contestant.

    Attributes:
        setting: what is measured: shape, batch, resolution.
        checked: the comparison made before timing.
        failure: why there is no time.
        wrong: whether the failure is a bug, rather than a lack of memory.
        ratio_to_sdpa: how many times as fast as softmax by SDPA in the same run.
        per_second: images or tokens (`counted`) per second, for models.
        energy: from `EnergyMeter.measure`.
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
    counted: str = "calls"
    peak_mb: float | None = None
    energy: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """Mechanism and backend."""
        return f"{self.mechanism} ({self.backend})"

    def check(self, compare: Callable[[], Check | None]) -> Check | None:
        """Run a comparison; if it raises or does not pass, the row has failed."""
        try:
            found = compare()
        except Exception as error:
            # Running out of memory is the machine's fault, anything else is a bug.
            out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            self.wrong = not out_of_memory and "can't allocate memory" not in str(error)
            why = f"failed: {type(error).__name__}: {one_line(error, 200)}"
            self.failure = why if self.wrong else "out of memory"
            return None
        if found is not None and not found.passed:
            self.wrong = True
            bound = f"bound {found.bound:.1e}"
            self.failure = f"wrong result: error {found.error:.1e} against {found.against}, {bound}"
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with times at the top level."""
        timing = asdict(self.timing) if self.timing else dict.fromkeys(Timing.__dataclass_fields__)
        facts = {"mechanism": self.mechanism, "backend": self.backend} | self.setting | timing
        facts |= {"ratio_to_sdpa": self.ratio_to_sdpa, "peak_mb": self.peak_mb}
        facts["checked"] = None if self.checked is None else self.checked.to_dict()
        if self.per_second is not None:
            facts[f"{self.counted}_per_s"] = self.per_second
        if self.energy is not None:
            facts["energy"] = self.energy
        if self.failure is not None:
            facts["failure"] = self.failure
        return facts


@dataclass
class Run:
    """The rows of one run, and notes for the reader; `quiet` is False if other programs used the CPU."""

    device: str
    threads: int = field(default_factory=torch.get_num_threads)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quiet: bool = True

    @property
    def wrong(self) -> list[Row]:
        """Rows that failed because of a bug."""
        return [row for row in self.rows if row.wrong]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"device": self.device, "threads": self.threads, "versions": versions(), "quiet": self.quiet}
        return facts | {"rows": [row.to_dict() for row in self.rows], "notes": self.notes}


def set_ratios(rows: Sequence[Row]) -> None:
    """Set `ratio_to_sdpa` by the softmax row among the rows."""
    base = next((row.timing for row in rows if row.mechanism == "softmax"), None)
    for row in rows:
        row.ratio_to_sdpa = base.median_ms / row.timing.median_ms if base and row.timing else None


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    own = ecoformer.__version__
    return {"python": platform.python_version(), "torch": torch.__version__, "ecoformer": own}


def device_name(device: torch.device) -> str:
    """The name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), f"{platform.machine()} CPU")


def hardware(device: torch.device) -> str:
    """The device's name and, for a CPU, the number of threads."""
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return device_name(device) + threads
