"""Convolutions as matrix products, and arguments that make no sense."""

from __future__ import annotations

import pytest

from ecoformer.bitfusion import BitFusion, simulate
from ecoformer.bitfusion.tiling import pixels_touched
from ecoformer.operations import Convolution, Product


def square(channels, outputs, side, kernel=3, stride=1, **more):
    """A convolution of a square image, padded to keep its size where the stride is 1."""
    output = (side - 1) // stride + 1
    pairs = ((side, side), (output, output), (kernel, kernel), (stride, stride))
    return Convolution(1, channels, outputs, *pairs, **more)


def test_a_pointwise_convolution_is_a_matrix_product():
    convolution = simulate(Convolution(1, 64, 32, (16, 64), (16, 64), (1, 1)))
    product = simulate(Product(1024, 64, 32))
    assert convolution.cycles == product.cycles
    assert convolution.energy_nj == product.energy_nj


def test_activations_move_as_a_feature_map_not_as_patches():
    op = square(16, 32, 16)
    result = simulate(op)
    pixels = 16 * 16 * 16 * 8
    assert pixels <= result.dram_bits.activations <= 2 * pixels  # patches would be nine times as much
    assert op.macs == 256 * 9 * 16 * 32
    assert result.compute_cycles == 256 * 9


@pytest.mark.parametrize("outputs", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 2), (2, 3, 1), (1, 4, 1)]
)
def test_pixels_that_a_run_of_outputs_touches(outputs, kernel, stride, dilation):
    op = square(1, 1, 100, kernel, stride, dilation=(dilation, dilation))
    touched = {o * stride + k * dilation for o in range(outputs) for k in range(kernel)}
    assert len(touched) <= pixels_touched(op, 0, outputs) <= max(touched) + 1


def test_groups_share_the_array_where_that_is_faster():
    depthwise = simulate(square(64, 64, 14, groups=64))
    assert depthwise.compute_cycles == 2 * 14 * 14 * 18  # 32 channels side by side
    assert depthwise.cycles < 64 * simulate(square(1, 1, 14)).cycles
    halves, half = simulate(square(128, 128, 14, groups=2)), simulate(square(64, 64, 14))
    assert halves.cycles == 2 * half.cycles
    assert halves.energy_nj == pytest.approx(2 * half.energy_nj)
    assert sum(halves.dram_bits) == 2 * sum(half.dram_bits)


@pytest.mark.parametrize("bits", [0, 9, 2.5, True, "8"])
@pytest.mark.parametrize("side", ["activation", "weight"])
def test_a_precision_the_array_lacks(side, bits):
    pair = (bits, 8) if side == "activation" else (8, bits)
    with pytest.raises(ValueError, match=f"{side} bits must be"):
        simulate(Product(16, 32, 32), pair)


def test_another_array_may_have_that_precision():
    assert simulate(Product(16, 32, 32), (16, 16), BitFusion(max_bits=16)).compute_cycles == 32
    assert BitFusion(max_bits=16).fusion(2, 16) == 8
    assert BitFusion(min_bits=4).fusion(1, 2) == 4


@pytest.mark.parametrize("value", [0, -3, 1.5, None, True])
def test_sizes_must_be_positive(value):
    for name in ("rows", "inner", "columns", "times"):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
            simulate(Product(**{"rows": 1, "inner": 1, "columns": 1, name: value}))
    with pytest.raises(ValueError, match="kernel must be a positive integer"):
        simulate(Convolution(1, 1, 1, (4, 4), (4, 4), (1, value)))
    for name in ("inputs", "dram_bits_per_cycle", "weight_buffer", "max_bits"):
        with pytest.raises(ValueError, match=f"BitFusion.{name} must be a positive integer"):
            BitFusion(**{name: value})


@pytest.mark.parametrize(
    ("name", "least"), [("weight_buffer", 1024), ("activation_buffer", 2), ("output_buffer", 256)]
)
def test_a_buffer_that_is_too_small(name, least):
    op = Product(16, 32, 32)
    with pytest.raises(ValueError, match="fits the buffers"):
        simulate(op, array=BitFusion(**{name: least - 1}))
    assert simulate(op, array=BitFusion(**{name: least})).cycles > 0
