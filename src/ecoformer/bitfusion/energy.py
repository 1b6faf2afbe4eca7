"""What an accelerator's work costs: constants, how a tile's reads are charged, and where the energy goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import starmap
from operator import add

from .checks import amount

__all__ = ["EnergyParts", "EnergyTable"]


@dataclass(frozen=True)
class EnergyTable:
    """Energy constants in picojoules; the defaults are BitFusion's, 45 nm.

    The core's constant is per fusion unit, so that it scales with the array. Those of the buffers do not
    follow the buffers' sizes: for sizes far from the paper's, pass constants of your own.
    """

    unit_cycle: float = 235.104 / (16 * 32)
    """A fusion unit, per cycle in which the array computes; a stalled array costs nothing."""
    dram_bit: float = 15.0
    weight_read: float = 0.02137
    weight_write: float = 0.02892
    activation_read: float = 0.05947
    activation_write: float = 0.11370
    output_read: float = 0.03316
    # Known as 0.07308. The figures known to the picojoule hold read and write together to 0.1062375 rather
    # than 0.10624; outputs are always read and written alike, so it is free which of the two takes the rest.
    output_write: float = 0.0730775

    def __post_init__(self) -> None:
        for field in fields(self):
            value = amount(f"EnergyTable.{field.name}", getattr(self, field.name), zero=True)
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True)
class Accesses:
    """Bits that are moved: over the DRAM interface, and in and out of each buffer on either side."""

    dram: int
    weight_reads: int
    weight_writes: int
    activation_reads: int
    activation_writes: int
    output_reads: int
    output_writes: int


@dataclass(frozen=True)
class EnergyParts:
    """Where the energy goes, in nanojoules."""

    core: float
    dram: float
    weight_reads: float
    weight_writes: float
    activation_reads: float
    activation_writes: float
    output_reads: float
    output_writes: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self._values())

    @property
    def buffers(self) -> float:
        """The three buffers, read and written."""
        return sum(list(self._values())[2:])

    def times(self, count: int) -> EnergyParts:
        """The energy of `count` repetitions."""
        return EnergyParts(*(count * value for value in self._values()))

    def plus(self, other: EnergyParts) -> EnergyParts:
        """Both together."""
        return EnergyParts(*starmap(add, zip(self._values(), other._values(), strict=True)))

    def to_dict(self) -> dict[str, float]:
        """The parts by name."""
        return dict(zip((field.name for field in fields(self)), self._values(), strict=True))

    def _values(self) -> Iterator[float]:
        return (getattr(self, field.name) for field in fields(self))


def charge(table: EnergyTable, units: int, busy_cycles: int, bits: Accesses) -> EnergyParts:
    """The energy of a number of busy cycles of `units` fusion units and of the bits moved."""
    return EnergyParts(
        core=busy_cycles * units * table.unit_cycle / 1e3,
        dram=bits.dram * table.dram_bit / 1e3,
        weight_reads=bits.weight_reads * table.weight_read / 1e3,
        weight_writes=bits.weight_writes * table.weight_write / 1e3,
        activation_reads=bits.activation_reads * table.activation_read / 1e3,
        activation_writes=bits.activation_writes * table.activation_write / 1e3,
        output_reads=bits.output_reads * table.output_read / 1e3,
        output_writes=bits.output_writes * table.output_write / 1e3,
    )


def cheapest_reads(
    table: EnergyTable, rows: int, inputs: int, outputs: int, bits: tuple[int, int, int]
) -> tuple[str, int, int, int]:
    """What one tile reads from the buffers while it computes, in the cheapest of three dataflows.

    A stream that stays in the array is read once a tile; the others are read again for every element of the
    loop that does not index them. Outputs are partial sums: each update is a read and a write.

    Args:
        table: the constants.
        rows: of the tile, as are `inputs` and `outputs`.
        inputs: see above.
        outputs: see above.
        bits: of one activation, one weight and one output.

    Returns:
        The stream that stays, and the bits of weights, activations and outputs.
    """
    activations, weights, sums = rows * inputs * bits[0], inputs * outputs * bits[1], rows * outputs * bits[2]
    flows = (
        ("outputs", weights * rows, activations * outputs, sums),
        ("weights", weights, activations * outputs, sums * inputs),
        ("activations", weights * rows, activations, sums * inputs),
    )
    update = table.output_read + table.output_write
    prices = (table.weight_read, table.activation_read, update)
    return min(flows, key=lambda flow: sum(n * price for n, price in zip(flow[1:], prices, strict=True)))
