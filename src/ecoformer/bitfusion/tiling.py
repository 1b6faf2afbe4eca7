"""Cutting an operation into tiles and loops, and the DRAM traffic that this causes.

Three loops run over the tiles: rows, inputs and outputs. Each of the three streams is indexed by two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from ecoformer.operations import Convolution, Product

from .array import BitFusion

Op = Product | Convolution
Bits = tuple[int, int]
"""Of activations, the left operand, and of weights."""
_INDEXED_BY = {"weights": (1, 2), "activations": (0, 1), "sums": (0, 2)}
_ORDERS = tuple(permutations(range(3)))


class RowTile(NamedTuple):
    """Some rows of the product, how many such tiles there are, and the pixels one touches in each channel."""

    rows: int
    trips: int
    pixels: int


@dataclass(frozen=True)
class Problem:
    """An operation as one matrix product."""

    row_tiles: tuple[RowTile, ...]
    channels: int
    taps: int
    outputs: int
    bits: Bits


class Tile(NamedTuple):
    """One tile: its size, how often each loop runs, its cycles, and its data in bits."""

    rows: int
    inputs: int
    outputs: int
    trips: tuple[int, int, int]
    cycles: int
    weights: int
    activations: int
    sums: int

    @property
    def tiles(self) -> int:
        """Number of tiles; the last one of a loop is charged like the others."""
        return self.trips[0] * self.trips[1] * self.trips[2]


class Traffic(NamedTuple):
    """Bits of a stream over the entire operation, and the most that its buffer holds at a time."""

    total: int
    resident: int


class Schedule(NamedTuple):
    """A tile in an order of the loops (outermost first) and the traffic of the three streams."""

    tile: Tile
    order: tuple[int, ...]
    weights: Traffic
    activations: Traffic
    sums: Traffic

    @property
    def dram_bits(self) -> int:
        """All traffic; sums are read and written."""
        return self.weights.total + self.activations.total + 2 * self.sums.total

    def cycles(self, width: int) -> tuple[int, int]:
        """Cycles of computing and of stalling on a DRAM interface of `width` bits a cycle.

        The first fill and the last drain of the buffers stall the array; other traffic moves while it
        computes.
        """
        busy = self.tile.cycles * self.tile.tiles
        last = self.sums.resident
        first = self.weights.resident + self.activations.resident + last
        hidden = _ceil(self.dram_bits - first - last, width)
        return busy, max(0, hidden - busy) + _ceil(first, width) + _ceil(last, width)


def lower(op: Op, bits: Bits, array: BitFusion) -> list[tuple[Problem, int]]:
    """The ways to run an operation as a matrix product, each with the number of times it runs."""
    if isinstance(op, Product):
        rows = tuple(RowTile(size, _ceil(op.rows, size), size) for size in _steps(op.rows))
        return [(Problem(rows, op.inner, 1, op.columns, bits), op.times)]
    rows, taps = tuple(_pixel_tiles(op)), math.prod(op.kernel)
    channels, outputs = op.in_channels // op.groups, op.out_channels // op.groups
    return [
        (Problem(rows, n * channels, taps, n * outputs, bits), op.groups // n)
        for n in range(1, op.groups + 1)
        if op.groups % n == 0 and (n == 1 or n * outputs <= array.outputs)
    ]


def tiles(problem: Problem, array: BitFusion) -> Iterator[Tile]:
    """All tiles that fit the buffers, larger ones first."""
    lanes = array.inputs * array.fusion(*problem.bits)
    capacity = capacities(array)
    for outputs in _steps(problem.outputs, array.outputs):
        columns = _ceil(outputs, array.outputs)
        for channels in _steps(problem.channels):
            steps = _ceil(channels * problem.taps, lanes)
            weights = steps * lanes * outputs * problem.bits[1]
            if weights > capacity["weights"]:
                continue
            trips = _ceil(problem.channels, channels), _ceil(problem.outputs, outputs)
            for part in problem.row_tiles:
                activations = part.pixels * channels * problem.bits[0]
                sums = columns * array.outputs * part.rows * array.output_bits
                if activations <= capacity["activations"] and sums <= capacity["sums"]:
                    size = (part.rows, channels * problem.taps, outputs)
                    cycles = part.rows * columns * steps
                    yield Tile(*size, (part.trips, *trips), cycles, weights, activations, sums)


def schedules(tile: Tile, array: BitFusion) -> Iterator[Schedule]:
    """A tile in all orders of the loops that differ; the place of a loop that runs once does not matter."""
    capacity, seen = capacities(array), set()
    for order in _ORDERS:
        real = tuple(loop for loop in order if tile.trips[loop] > 1)
        if real not in seen:
            seen.add(real)
            streams = (
                _traffic(getattr(tile, name), capacity[name], loops, tile, order[::-1])
                for name, loops in _INDEXED_BY.items()
            )
            yield Schedule(tile, order, *streams)


def capacities(array: BitFusion) -> dict[str, int]:
    """Bits of each stream that can be computed on: half the buffer, as the other half is being filled."""
    return {
        "weights": 4 * array.weight_buffer,
        "activations": 4 * array.activation_buffer,
        "sums": 4 * array.output_buffer,
    }


def _traffic(
    bits: int, capacity: int, indexed_by: tuple[int, int], tile: Tile, inner_first: tuple[int, ...]
) -> Traffic:
    """A stream's traffic, from the innermost loop outwards.

    A loop that indexes the stream brings new data. One that does not reuses the data in the buffer if
    everything that the loops inside it touch fits there, and otherwise fetches it again.
    """
    total = footprint = resident = bits
    for loop in inner_first:
        trips = tile.trips[loop]
        if loop in indexed_by:
            total *= trips
            footprint *= trips
            if footprint <= capacity:
                resident = footprint
        elif footprint > capacity:
            total *= trips
    return Traffic(total, resident)


def _pixel_tiles(op: Convolution) -> Iterator[RowTile]:
    """Complete feature maps, complete lines, or part of a line."""
    height, width = op.output
    line = pixels_touched(op, 1, width)
    for maps in _steps(op.batch):
        yield RowTile(
            maps * height * width, _ceil(op.batch, maps), maps * pixels_touched(op, 0, height) * line
        )
    for lines in _steps(height)[1:]:
        yield RowTile(lines * width, _ceil(height, lines) * op.batch, pixels_touched(op, 0, lines) * line)
    for part in _steps(width)[1:]:
        pixels = pixels_touched(op, 0, 1) * pixels_touched(op, 1, part)
        yield RowTile(part, _ceil(width, part) * height * op.batch, pixels)


def pixels_touched(op: Convolution, axis: int, outputs: int) -> int:
    """Input positions along an axis (0: vertical) that a run of adjacent outputs touches."""
    reach = (outputs - 1) * op.stride[axis] + op.dilation[axis] * (op.kernel[axis] - 1) + 1
    return min(reach, outputs * op.kernel[axis], op.size[axis])


def _steps(size: int, unit: int = 1) -> list[int]:
    """`size`, and all unit · 2^i below it, from the largest."""
    steps = []
    while unit < size:
        steps.append(unit)
        unit *= 2
    return [size, *reversed(steps)]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
