"""The search against brute force, and what must hold of every result."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoformer.bitfusion import PAPER_ARRAY, BitFusion, EnergyTable, simulate
from ecoformer.operations import Convolution, Product

TINY = BitFusion(
    inputs=2, outputs=4, dram_bits_per_cycle=24, weight_buffer=160, activation_buffer=64, output_buffer=96
)
ARRAYS = [PAPER_ARRAY, TINY, replace(TINY, weight_buffer=512, dram_bits_per_cycle=7)]
DIMENSION = st.integers(1, 70)
BITS = st.tuples(st.integers(1, 8), st.integers(1, 8))
PRODUCTS = st.builds(Product, DIMENSION, DIMENSION, DIMENSION)
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutions(draw):
    size, kernel, stride = draw(st.tuples(st.integers(3, 9), st.integers(3, 9))), draw(PAIR), draw(PAIR)
    output = tuple((s - k) // step + 1 for s, k, step in zip(size, kernel, stride, strict=True))
    channels = draw(st.sampled_from([2, 6])), draw(st.sampled_from([2, 4]))
    return Convolution(
        draw(st.integers(1, 3)), *channels, size, output, kernel, stride, groups=draw(st.integers(1, 2))
    )


OPS = PRODUCTS | convolutions()


def sizes(limit, unit=1):
    powers = [unit * 2**i for i in range(12)]
    return {min(size, limit) for size in powers}


def brute_force(op, bits, array):
    """Fewest (cycles, nJ), written down once more from the description and without any shortcut."""
    lanes = array.inputs * array.fusion(*bits)
    rooms = {"w": 4 * array.weight_buffer, "a": 4 * array.activation_buffer, "o": 4 * array.output_buffer}
    found = []
    for b, i, o in itertools.product(sizes(op.rows), sizes(op.inner), sizes(op.columns, array.outputs)):
        steps, columns = math.ceil(i / lanes), math.ceil(o / array.outputs)
        data = {
            "w": steps * lanes * o * bits[1],
            "a": i * b * bits[0],
            "o": columns * array.outputs * b * array.output_bits,
        }
        if any(data[stream] > rooms[stream] for stream in data):
            continue
        trips = {"b": math.ceil(op.rows / b), "i": math.ceil(op.inner / i), "o": math.ceil(op.columns / o)}
        count = trips["b"] * trips["i"] * trips["o"]
        busy = count * b * columns * steps
        for order in itertools.permutations("bio"):
            total, held = traffic(data, rooms, trips, order)
            found.append(
                (
                    cycles(busy, total, held, array.dram_bits_per_cycle),
                    nanojoules(bits, array, busy, total, (b, i, o), count),
                )
            )
    return min(found)


def traffic(data, rooms, trips, inner_first):
    total, held = dict(data), dict(data)
    for stream, loops in {"w": "io", "a": "bi", "o": "bo"}.items():
        footprint = data[stream]
        for loop in inner_first:
            if loop in loops or footprint > rooms[stream]:
                total[stream] *= trips[loop]
            if loop in loops:
                footprint *= trips[loop]
                held[stream] = footprint if footprint <= rooms[stream] else held[stream]
    return total, held


def cycles(busy, total, held, width):
    first, last = sum(held.values()), held["o"]
    rest = total["w"] + total["a"] + 2 * total["o"] - first - last
    stall = max(0, math.ceil(rest / width) - busy) + math.ceil(first / width) + math.ceil(last / width)
    return busy + stall


def nanojoules(bits, array, busy, total, tile, count):
    table, (b, i, o) = array.energy, tile
    weights, activations, sums = i * o * bits[1], b * i * bits[0], b * o * array.output_bits
    update = table.output_read + table.output_write
    inside = min(
        weights * b * table.weight_read + activations * o * table.activation_read + sums * update,
        weights * table.weight_read + activations * o * table.activation_read + i * sums * update,
        weights * b * table.weight_read + activations * table.activation_read + i * sums * update,
    )
    filling = total["w"] * table.weight_write + total["a"] * table.activation_write + total["o"] * update
    dram = (total["w"] + total["a"] + 2 * total["o"]) * table.dram_bit
    core = busy * array.inputs * array.outputs * table.unit_cycle
    return (core + dram + filling + count * inside) / 1e3


@pytest.mark.parametrize("array", ARRAYS)
@given(op=PRODUCTS, bits=BITS)
def test_the_search_equals_brute_force(array, op, bits):
    result = simulate(op, bits, array)
    fewest, least = brute_force(op, bits, array)
    assert result.cycles == fewest
    assert result.energy_nj == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("array", ARRAYS)
@given(op=OPS, bits=BITS)
def test_parts_sum_up(array, op, bits):
    result = simulate(op, bits, array)
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["cycles"] == plain["compute_cycles"] + plain["stall_cycles"] == result.cycles
    assert math.fsum(plain["energy_parts_nj"].values()) == pytest.approx(plain["energy_nj"], rel=1e-12)
    assert result.energy.dram == pytest.approx(sum(plain["dram_bits"].values()) * array.energy.dram_bit / 1e3)
    assert plain["latency_s"] == result.cycles / array.frequency_hz
    # Every operand crosses the interface at least once.
    if isinstance(op, Product):
        assert result.dram_bits.weights >= op.inner * op.columns * bits[1]
        assert result.dram_bits.activations >= op.rows * op.inner * bits[0]
        assert result.dram_bits.output_writes >= op.rows * op.columns * array.output_bits


def test_one_bit_computes_as_two_and_moves_as_one():
    one, two = (simulate(Product(16, 256, 1024), (bits, bits)) for bits in (1, 2))
    assert one.compute_cycles == two.compute_cycles
    assert 2 * one.dram_bits.weights == two.dram_bits.weights
    assert 2 * one.dram_bits.activations == two.dram_bits.activations


def test_energy_constants_are_the_users():
    op = Product(16, 32, 32)
    free = BitFusion(energy=EnergyTable(0, 0, 0, 0, 0, 0, 0, 0))
    assert simulate(op, array=free).energy_nj == 0
    only_core = replace(free, energy=replace(free.energy, unit_cycle=1.0))
    assert simulate(op, array=only_core).energy_nj == pytest.approx(32 * 512 / 1e3)
    # Where sums cost nothing to update, the activations stay in the array and are read once.
    cheap_sums = replace(free, energy=replace(free.energy, activation_read=1.0))
    assert simulate(op, array=cheap_sums).energy_nj == pytest.approx(16 * 32 * 8 / 1e3)
