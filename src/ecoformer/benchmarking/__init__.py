"""Times, memory and energy of attention, of whole models and of fitting: right results only."""

from ecoformer.benchmarking.results import Row, Run
from ecoformer.benchmarking.timing import Timing, time_contestants

__all__ = ["Row", "Run", "Timing", "time_contestants"]
