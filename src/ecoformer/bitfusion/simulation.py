"""The search for the fastest schedule, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .array import BitFusion
from .checks import whole
from .energy import Accesses, EnergyParts, charge, cheapest_reads
from .ops import Convolution, FullyConnected, Op
from .tiling import LOOPS, Problem, Schedule, check_room, least_cycles, lower, schedules, tiles

__all__ = ["PAPER_ARRAY", "DramBits", "Result", "Tiling", "Total", "simulate", "simulate_all"]

PAPER_ARRAY = BitFusion()
"""The configuration of the paper's hardware table."""


@dataclass(frozen=True)
class DramBits:
    """Bits over the DRAM interface, by stream."""

    weights: int
    activations: int
    output_reads: int
    output_writes: int

    @property
    def total(self) -> int:
        """All streams."""
        return self.weights + self.activations + self.output_reads + self.output_writes

    def to_dict(self) -> dict[str, int]:
        """The streams by name."""
        return vars(self).copy()


@dataclass(frozen=True)
class Tiling:
    """The chosen schedule."""

    rows: int
    inputs: int
    outputs: int
    trips: tuple[int, int, int]
    """How often the loops over rows, inputs and outputs run."""
    order: tuple[str, ...]
    """The loops, outermost first."""
    stationary: str
    """The stream that stays in the array while a tile is computed."""
    weight_bits: int
    """Bits of one tile in its buffer, as are the next two."""
    activation_bits: int
    output_bits: int
    repeats: int = 1
    """How often all of it is repeated: groups of a convolution that do not run together."""

    def to_dict(self) -> dict[str, Any]:
        """The schedule as JSON can hold it."""
        return vars(self) | {"trips": list(self.trips), "order": list(self.order)}


@dataclass(frozen=True)
class Total:
    """What several operations cost one after another."""

    array: BitFusion
    compute_cycles: int
    stall_cycles: int
    energy: EnergyParts
    dram_bits: DramBits

    @property
    def cycles(self) -> int:
        """Computing and stalling."""
        return self.compute_cycles + self.stall_cycles

    @property
    def energy_nj(self) -> float:
        """All parts of the energy."""
        return self.energy.total

    @property
    def latency_s(self) -> float:
        """Seconds at the array's clock."""
        return self.cycles / self.array.frequency_hz

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "cycles": self.cycles,
            "compute_cycles": self.compute_cycles,
            "stall_cycles": self.stall_cycles,
            "latency_s": self.latency_s,
            "energy_nj": self.energy_nj,
            "energy_parts_nj": self.energy.to_dict(),
            "dram_bits": self.dram_bits.to_dict(),
            "array": self.array.to_dict(),
        }


@dataclass(frozen=True)
class Result(Total):
    """What one operation costs, and the schedule in which it does."""

    op: Op
    tiling: Tiling

    @property
    def utilisation(self) -> float:
        """Products computed, as a share of what the array could compute in that time at these precisions."""
        per_cycle = self.array.fusion(self.op.activation_bits, self.op.weight_bits)
        return self.op.macs / (self.cycles * per_cycle * self.array.inputs * self.array.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        own = {"utilisation": self.utilisation, "op": self.op.to_dict(), "tiling": self.tiling.to_dict()}
        return super().to_dict() | own


def simulate(op: Op, array: BitFusion = PAPER_ARRAY) -> Result:
    """Time and energy of an operation, in the schedule of fewest cycles and, among those, least energy.

    All orders of the three loops are tried with all tiles whose rows and inputs are powers of two, and whose
    outputs are the array's width times powers of two. Results are kept: asking again costs nothing.

    Narrow operands are not always cheaper. Weights are padded to what the array takes in at once, and that
    grows as operands narrow: with few inputs, 2 bits can move more than 3, and codes of 1 bit more than
    numbers of 8. What fits a buffer as a whole is loaded before anything is computed, so that an operation
    that just fits may take longer than one that just does not. And energy is only the second criterion.

    Args:
        op: a `FullyConnected` or a `Convolution`, whose docstring says how it is mapped.
        array: the accelerator.

    Returns:
        Cycles and energy with their parts, DRAM traffic, and the schedule.
    """
    if not isinstance(op, FullyConnected | Convolution):
        raise TypeError(f"op must be a FullyConnected or a Convolution, got {type(op).__name__}")
    if not isinstance(array, BitFusion):
        raise TypeError(f"array must be a BitFusion, got {type(array).__name__}")
    array.check_bits("activation_bits", op.activation_bits)
    array.check_bits("weight_bits", op.weight_bits)
    return _simulate(op, array)


def simulate_all(work: Iterable[tuple[Op, int]], array: BitFusion = PAPER_ARRAY) -> Total:
    """The sum over operations, each with the number of times it runs."""
    compute = stall = 0
    energy, bits = EnergyParts(*[0.0] * 8), DramBits(0, 0, 0, 0)
    for op, times in work:
        count, result = whole("times", times, least=0), simulate(op, array)
        compute += count * result.compute_cycles
        stall += count * result.stall_cycles
        energy = energy.plus(result.energy.times(count))
        pairs = zip(vars(bits).values(), vars(result.dram_bits).values(), strict=True)
        bits = DramBits(*(total + count * part for total, part in pairs))
    return Total(array, compute, stall, energy, bits)


@lru_cache(maxsize=8192)
def _simulate(op: Op, array: BitFusion) -> Result:
    problems = lower(op, array)
    check_room(problems[0], array)
    results = [_result(op, array, problem) for problem in problems if _fits(problem, array)]
    return min(results, key=lambda result: (result.cycles, result.energy_nj))


def _fits(problem: Problem, array: BitFusion) -> bool:
    return next(tiles(problem, array), None) is not None


def _result(op: Op, array: BitFusion, problem: Problem) -> Result:
    schedule, energy, stationary = _best(problem, array)
    times = problem.repeats
    compute, stall = schedule.cycles(array.dram_bits_per_cycle)
    streams = (schedule.weights, schedule.activations, schedule.sums, schedule.sums)
    tile = schedule.tile
    return Result(
        array,
        times * compute,
        times * stall,
        energy.times(times),
        DramBits(*(times * stream.total for stream in streams)),
        op,
        Tiling(
            rows=tile.rows,
            inputs=tile.inputs,
            outputs=tile.outputs,
            trips=tile.trips,
            order=tuple(LOOPS[loop] for loop in schedule.order),
            stationary=stationary,
            weight_bits=tile.weights,
            activation_bits=tile.activations,
            output_bits=tile.sums,
            repeats=times,
        ),
    )


def _best(problem: Problem, array: BitFusion) -> tuple[Schedule, EnergyParts, str]:
    """The fastest schedule, of those the cheapest, of those the first, which has the largest tile."""
    width = array.dram_bits_per_cycle
    found: tuple[Schedule, EnergyParts, str] | None = None
    fewest, least = 0, 0.0
    for tile in tiles(problem, array):
        if found and least_cycles(tile, width) > fewest:
            continue
        for schedule in schedules(tile, array):
            cycles = sum(schedule.cycles(width))
            if found and cycles > fewest:
                continue
            energy, stationary = _energy(schedule, problem, array)
            if found is None or (cycles, energy.total) < (fewest, least):
                found, fewest, least = (schedule, energy, stationary), cycles, energy.total
    if found is None:  # `check_room` has refused such buffers
        raise ValueError("no tile of this operation fits the buffers: enlarge them")
    return found


def _energy(schedule: Schedule, problem: Problem, array: BitFusion) -> tuple[EnergyParts, str]:
    tile = schedule.tile
    bits = (problem.activation_bits, problem.weight_bits, array.output_bits)
    stationary, weights, activations, sums = cheapest_reads(
        array.energy, tile.rows, tile.inputs, tile.outputs, bits
    )
    # Filling a buffer writes it, draining the outputs reads them; sums are updated in place.
    updates = schedule.sums.total + tile.tiles * sums
    moved = Accesses(
        dram=schedule.dram_bits,
        weight_reads=tile.tiles * weights,
        weight_writes=schedule.weights.total,
        activation_reads=tile.tiles * activations,
        activation_writes=schedule.activations.total,
        output_reads=updates,
        output_writes=updates,
    )
    units = array.inputs * array.outputs
    return charge(array.energy, units, tile.cycles * tile.tiles, moved), stationary
