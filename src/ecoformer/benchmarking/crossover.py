"""The length from which hashed attention is faster than softmax by SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ecoformer.benchmarking.attention import bench_attention
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.results import Row

SHORTEST, LONGEST = 16, 1 << 16
_CLOSE = 1.1
"""Lengths this close to each other are as close as noise lets one come."""
_CLEARLY = 2.0
"""How many times as fast eco must be before no longer length is tried: it may win, lose again and win."""


@dataclass(frozen=True)
class Crossover:
    """Where hashed attention overtakes SDPA.

    Attributes:
        tokens: the length from which on it was seen to be faster; None if it was not at the longest.
        slower_at: the longest length at which it was not; None if it was faster from the start.
        backend: the backend that was faster.
        ratios: speed against SDPA at every length that was tried.
        quiet: whether nobody else was seen to take the CPU meanwhile.
    """

    tokens: int | None
    slower_at: int | None
    backend: str | None
    ratios: dict[int, float]
    quiet: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        return self._words() if self.quiet else f"not to be trusted, on a busy machine: {self._words()}"

    def _words(self) -> str:
        if self.tokens is None:
            return f"eco does not overtake SDPA up to N = {max(self.ratios):,}"
        if self.slower_at is None:
            return (
                f"eco ({self.backend}) is faster than SDPA at every length tried, "
                f"N = {self.tokens:,} to {max(self.ratios):,}"
            )
        return (
            f"eco ({self.backend}) overtakes SDPA between N = {self.slower_at:,} and {self.tokens:,} "
            f"({self.ratios[self.slower_at]:.2f} and {self.ratios[self.tokens]:.2f} times as fast)"
        )


def find_crossover(
    setting: Setting,
    *,
    longest: int = LONGEST,
    seconds: float = 0.2,
    progress: Callable[[str], None] = lambda text: None,
) -> Crossover:
    """Double the length until eco is clearly faster, then halve the gap below which it was not.

    Each length is a run of its own.

    Args:
        setting: batch, heads, channels and the rest; its number of tokens plays no part.
        longest: where to give up.
        seconds: how long each contestant is timed at each length.
        progress: told what is being done.
    """
    ratios: dict[int, float] = {}
    backend: str | None = None
    quiet = True

    def faster(tokens: int) -> bool:
        nonlocal backend, quiet
        best, alone = _best(_at(setting, tokens), seconds, progress)
        quiet = quiet and alone
        ratios[tokens] = best.ratio_to_sdpa or 0.0
        if ratios[tokens] > 1:
            backend = best.backend
        return ratios[tokens] > 1

    low, high, tokens = None, None, min(SHORTEST, longest)
    while True:
        if not faster(tokens):
            low, high = tokens, None
        elif high is None:
            high = tokens
        if tokens >= longest or ratios[tokens] >= _CLEARLY:
            break
        tokens = min(2 * tokens, longest)
    if high is None:
        return Crossover(None, low, None, dict(sorted(ratios.items())), quiet)
    while low is not None and high - low > 1 and high / low > _CLOSE:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return Crossover(high, low, backend, dict(sorted(ratios.items())), quiet)


def _at(setting: Setting, tokens: int) -> Setting:
    batch, heads, _, dim = setting.shape
    return replace(setting, shape=(batch, heads, tokens, dim))


def _best(setting: Setting, seconds: float, progress: Callable[[str], None]) -> tuple[Row, bool]:
    """The fastest backend of hashed attention at this length, and whether the machine was quiet."""
    run = bench_attention([setting], ("softmax", "eco"), seconds=seconds, memory=False, progress=progress)
    if run.wrong:
        raise RuntimeError(f"{run.wrong[0].label} at {setting.shape}: {run.wrong[0].failure}")
    rows = [row for row in run.rows if row.mechanism == "eco" and row.ratio_to_sdpa]
    if not rows:
        why = "; ".join(f"{row.label}: {row.failure}" for row in run.rows if row.failure)
        raise RuntimeError(f"at {setting.shape} there is no time to compare: {why}")
    return max(rows, key=lambda row: row.ratio_to_sdpa or 0.0), run.quiet
