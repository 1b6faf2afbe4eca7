"""The search for the fastest schedule of an operation, and its time and energy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from .array import BitFusion, check_positive
from .tiling import Bits, Op, Problem, Schedule, Tile, lower, schedules, tiles

Work = list[tuple[Op, Bits]]
"""Operations, and the bits of their two operands."""
PAPER_ARRAY = BitFusion()
"""The configuration of the paper's hardware table."""


class DramBits(NamedTuple):
    """Bits over the DRAM interface, by stream."""

    weights: int = 0
    activations: int = 0
    output_reads: int = 0
    output_writes: int = 0


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


@dataclass(frozen=True)
class Total:
    """What one or more operations cost one after another."""

    array: BitFusion
    compute_cycles: int
    stall_cycles: int
    energy: EnergyParts
    dram_bits: DramBits

    @classmethod
    def zero(cls, array: BitFusion) -> Total:
        """The cost of nothing."""
        return Total(array, 0, 0, EnergyParts(), DramBits())

    @property
    def cycles(self) -> int:
        """Computing and stalling."""
        return self.compute_cycles + self.stall_cycles

    @property
    def energy_nj(self) -> float:
        """All parts of the energy."""
        return sum(self.energy)

    @property
    def latency_s(self) -> float:
        """Seconds at the array's clock."""
        return self.cycles / self.array.frequency_hz

    def __add__(self, other: Total) -> Total:
        return Total(
            self.array,
            self.compute_cycles + other.compute_cycles,
            self.stall_cycles + other.stall_cycles,
            EnergyParts(*(a + b for a, b in zip(self.energy, other.energy, strict=True))),
            DramBits(*(a + b for a, b in zip(self.dram_bits, other.dram_bits, strict=True))),
        )

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
            "array": asdict(self.array),
        }


def simulate(op: Op, bits: Bits = (8, 8), array: BitFusion = PAPER_ARRAY) -> Total:
    """Time and energy of an operation, in the schedule of fewest cycles and, among those, least energy.

    All orders of the three loops are tried with all tiles whose rows and inputs are powers of two, and whose
    outputs are the array's width times powers of two. Results are cached.

    A convolution runs as the matrix product of its patches; figures are published only for fully connected
    operations, so this is assumed:

    - Patches are cut out between the buffer and the array. DRAM and buffer hold the feature map: a tile moves
      each pixel that it touches once, and neighbouring tiles each fetch the lines they share.
    - A tile is part of a line, complete lines, or complete feature maps; it has all taps of its channels.
    - Groups run one after another, or side by side in the array where they fit and that is faster.

    Args:
        op: a `Product` or `Convolution` of `ecoformer.operations`.
        bits: of activations, the left operand, and of weights.
        array: the accelerator.
    """
    for item in fields(op):
        value = getattr(op, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if item.name not in ("left", "right", "term"):
                check_positive(item.name, number)
    array.check_bits(bits)
    return _simulate(op, bits, array)


def simulate_all(work: Iterable[tuple[Op, Bits]], array: BitFusion = PAPER_ARRAY) -> Total:
    """The sum over operations."""
    return sum((simulate(op, bits, array) for op, bits in work), Total.zero(array))


@lru_cache(maxsize=8192)
def _simulate(op: Op, bits: Bits, array: BitFusion) -> Total:
    totals = []
    for problem, repeats in lower(op, bits, array):
        best = _best(problem, array)
        if best is not None:
            schedule, energy = best
            compute, stall = schedule.cycles(array.dram_bits_per_cycle)
            parts = EnergyParts(*(repeats * part for part in energy))
            streams = (schedule.weights, schedule.activations, schedule.sums, schedule.sums)
            traffic = DramBits(*(repeats * stream.total for stream in streams))
            totals.append(Total(array, repeats * compute, repeats * stall, parts, traffic))
    if not totals:
        raise ValueError(f"no tile of {op} fits the buffers of this array: make them larger")
    return min(totals, key=lambda total: (total.cycles, total.energy_nj))


@lru_cache(maxsize=8192)
def _best(problem: Problem, array: BitFusion) -> tuple[Schedule, EnergyParts] | None:
    """The fastest schedule, of those the cheapest, of those the first, which has the largest tile.

    None if no tile fits the buffers.
    """
    found: tuple[Schedule, EnergyParts] | None = None
    fewest, least = 0, 0.0
    for tile in tiles(problem, array):
        for schedule in schedules(tile, array):
            cycles = sum(schedule.cycles(array.dram_bits_per_cycle))
            if found is None or cycles <= fewest:
                energy = _energy(schedule, problem.bits, array)
                if found is None or (cycles, sum(energy)) < (fewest, least):
                    found, fewest, least = (schedule, energy), cycles, sum(energy)
    return found


def _energy(schedule: Schedule, bits: Bits, array: BitFusion) -> EnergyParts:
    tile, table = schedule.tile, array.energy
    weights, activations, sums = _cheapest_reads(tile, bits, array)
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
    return EnergyParts(*(part / 1e3 for part in picojoules))


def _cheapest_reads(tile: Tile, bits: Bits, array: BitFusion) -> tuple[int, int, int]:
    """Bits of weights, activations and outputs that a tile reads from the buffers, in the cheapest dataflow.

    One of the three streams stays in the array and is read once a tile; the others are read again for every
    element of the loop that does not index them. Outputs are partial sums: each update is a read and a write.
    """
    activations, weights = tile.rows * tile.inputs * bits[0], tile.inputs * tile.outputs * bits[1]
    sums = tile.rows * tile.outputs * array.output_bits
    flows = (
        (weights * tile.rows, activations * tile.outputs, sums),
        (weights, activations * tile.outputs, sums * tile.inputs),
        (weights * tile.rows, activations, sums * tile.inputs),
    )
    table = array.energy
    prices = (table.weight_read, table.activation_read, table.output_read + table.output_write)
    return min(flows, key=lambda flow: sum(n * price for n, price in zip(flow, prices, strict=True)))
