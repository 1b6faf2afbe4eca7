"""The search for the fastest schedule of an operation, and its time and energy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .array import BitFusion, EnergyTable, whole
from .ops import Convolution, FullyConnected, Op
from .tiling import LOOPS, Problem, Schedule, check_buffers, least_cycles, lower, schedules, tiles

PAPER_ARRAY = BitFusion()
"""The configuration of the paper's hardware table."""


class DramBits(NamedTuple):
    """Bits over the DRAM interface, by stream."""

    weights: int = 0
    activations: int = 0
    output_reads: int = 0
    output_writes: int = 0

    @property
    def total(self) -> int:
        """All streams."""
        return sum(self)


class EnergyParts(NamedTuple):
    """Where the energy goes, in nanojoules."""

    core: float = 0.0
    dram: float = 0.0
    weight_reads: float = 0.0
    weight_writes: float = 0.0
    activation_reads: float = 0.0
    activation_writes: float = 0.0
    output_reads: float = 0.0
    output_writes: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)

    @property
    def buffers(self) -> float:
        """The three buffers, read and written."""
        return sum(self[2:])


class Tiling(NamedTuple):
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
    """How often all of this is repeated: groups of a convolution that do not run together."""


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
        """All figures, for JSON."""
        return {
            "cycles": self.cycles,
            "compute_cycles": self.compute_cycles,
            "stall_cycles": self.stall_cycles,
            "latency_s": self.latency_s,
            "energy_nj": self.energy_nj,
            "energy_parts_nj": self.energy._asdict(),
            "dram_bits": self.dram_bits._asdict(),
            "array": self.array.to_dict(),
        }


@dataclass(frozen=True)
class Result(Total):
    """What one operation costs, and its schedule."""

    op: Op
    tiling: Tiling

    @property
    def utilisation(self) -> float:
        """Products computed, as a share of what the array could compute in that time at these precisions."""
        per_cycle = self.array.fusion(self.op.activation_bits, self.op.weight_bits)
        return self.op.macs / (self.cycles * per_cycle * self.array.inputs * self.array.outputs)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        own = {"utilisation": self.utilisation, "op": self.op.to_dict(), "tiling": self.tiling._asdict()}
        return super().to_dict() | own


def simulate(op: Op, array: BitFusion = PAPER_ARRAY) -> Result:
    """Time and energy of an operation, in the schedule of fewest cycles and, among those, least energy.

    All orders of the three loops are tried with all tiles whose rows and inputs are powers of two, and whose
    outputs are the array's width times powers of two. Results are cached.

    Narrow operands are not always cheaper. Weights are padded to the inputs that the array takes at once,
    and that number grows as operands narrow: with few inputs, 2 bits can move more than 3, and codes of 1 bit
    more than 8-bit numbers. A stream that fits its buffer is loaded before anything is computed, so an
    operation that just fits may take longer than one that just does not. And energy is only the second
    criterion.

    Args:
        op: a `FullyConnected`, or a `Convolution`, whose docstring describes the mapping.
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
    energy, bits = EnergyParts(), DramBits()
    for op, times in work:
        count, result = whole("times", times, least=0), simulate(op, array)
        compute += count * result.compute_cycles
        stall += count * result.stall_cycles
        energy = EnergyParts(*(a + count * b for a, b in zip(energy, result.energy, strict=True)))
        bits = DramBits(*(a + count * b for a, b in zip(bits, result.dram_bits, strict=True)))
    return Total(array, compute, stall, energy, bits)


@lru_cache(maxsize=8192)
def _simulate(op: Op, array: BitFusion) -> Result:
    problems = lower(op, array)
    check_buffers(problems[0], array)
    results = (_result(op, array, problem) for problem in problems)
    return min((r for r in results if r is not None), key=lambda result: (result.cycles, result.energy_nj))


def _result(op: Op, array: BitFusion, problem: Problem) -> Result | None:
    best = _best(problem, array)
    if best is None:
        return None
    schedule, energy, stationary = best
    times = problem.repeats
    compute, stall = schedule.cycles(array.dram_bits_per_cycle)
    streams = (schedule.weights, schedule.activations, schedule.sums, schedule.sums)
    tile, order = schedule.tile, tuple(LOOPS[loop] for loop in schedule.order)
    held = (tile.weights, tile.activations, tile.sums)
    return Result(
        array,
        times * compute,
        times * stall,
        EnergyParts(*(times * part for part in energy)),
        DramBits(*(times * stream.total for stream in streams)),
        op,
        Tiling(tile.rows, tile.inputs, tile.outputs, tile.trips, order, stationary, *held, times),
    )


def _best(problem: Problem, array: BitFusion) -> tuple[Schedule, EnergyParts, str] | None:
    """The fastest schedule, of those the cheapest, of those the first, which has the largest tile.

    None if no tile fits the buffers.
    """
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
    return found


def _energy(schedule: Schedule, problem: Problem, array: BitFusion) -> tuple[EnergyParts, str]:
    """The energy of a schedule, and the stream that stays in the array while a tile is computed."""
    tile, table = schedule.tile, array.energy
    bits = (problem.activation_bits, problem.weight_bits, array.output_bits)
    stationary, weights, activations, sums = _cheapest_reads(
        table, tile.rows, tile.inputs, tile.outputs, bits
    )
    # Filling a buffer writes it, draining the outputs reads them; sums are updated in place.
    updates = schedule.sums.total + tile.tiles * sums
    busy = tile.cycles * tile.tiles * array.inputs * array.outputs
    picojoules = (
        busy * table.unit_cycle,
        schedule.dram_bits * table.dram_bit,
        tile.tiles * weights * table.weight_read,
        schedule.weights.total * table.weight_write,
        tile.tiles * activations * table.activation_read,
        schedule.activations.total * table.activation_write,
        updates * table.output_read,
        updates * table.output_write,
    )
    return EnergyParts(*(part / 1e3 for part in picojoules)), stationary


def _cheapest_reads(
    table: EnergyTable, rows: int, inputs: int, outputs: int, bits: tuple[int, int, int]
) -> tuple[str, int, int, int]:
    """What a tile reads from the buffers in the cheapest of three dataflows.

    The stream that stays in the array is read once a tile; the others are read again for every element of
    the loop that does not index them. Outputs are partial sums: each update is a read and a write. `bits`
    are those of one activation, one weight and one output.

    Returns:
        The stream that stays, and the bits of weights, activations and outputs.
    """
    activations, weights, sums = rows * inputs * bits[0], inputs * outputs * bits[1], rows * outputs * bits[2]
    flows = (
        ("outputs", weights * rows, activations * outputs, sums),
        ("weights", weights, activations * outputs, sums * inputs),
        ("activations", weights * rows, activations, sums * inputs),
    )
    prices = (table.weight_read, table.activation_read, table.output_read + table.output_write)
    return min(flows, key=lambda flow: sum(n * price for n, price in zip(flow[1:], prices, strict=True)))
