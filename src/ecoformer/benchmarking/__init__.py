"""Time, memory and energy of attention, models and fitting; results are checked before they are timed."""

from ecoformer.benchmarking.measuring import Work, time_contestants
from ecoformer.benchmarking.results import Row, Run, Timing

__all__ = ["Row", "Run", "Timing", "Work", "time_contestants"]
