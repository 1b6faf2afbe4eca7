"""Convolutions as matrix products, and arguments that make no sense."""

from __future__ import annotations

import pytest

from ecoformer.bitfusion import (
    BitFusion,
    Convolution,
    EnergyTable,
    FullyConnected,
    attention_layer,
    simulate,
    simulate_all,
)


def test_a_pointwise_convolution_is_a_matrix_product():
    convolution = simulate(Convolution(1, 64, 32, 16, 64, kernel=1))
    product = simulate(FullyConnected(1024, 64, 32))
    assert convolution.cycles == product.cycles
    assert convolution.energy_nj == product.energy_nj
    assert convolution.op.macs == product.op.macs


def test_activations_move_as_a_feature_map_not_as_patches():
    op = Convolution(1, 16, 32, 16, 16, kernel=3, padding=1)
    result = simulate(op)
    pixels = 16 * 16 * 16 * 8
    assert pixels <= result.dram_bits.activations <= 2 * pixels  # patches would be nine times as much
    assert op.macs == 256 * 9 * 16 * 32
    assert result.compute_cycles == 256 * 9


def test_a_stride_beyond_the_kernel_skips_pixels():
    dense, strided = (
        Convolution(1, 16, 32, 16, 16, kernel=1),
        Convolution(1, 16, 32, 16, 16, kernel=1, stride=2),
    )
    assert (strided.out_height, strided.out_width) == (8, 8)
    assert 4 * simulate(strided).dram_bits.activations == simulate(dense).dram_bits.activations


@pytest.mark.parametrize("kernel", [1, 3, (3, 1)])
@pytest.mark.parametrize("stride", [1, 2, (1, 3)])
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_output_sizes_are_pytorchs(kernel, stride, padding, dilation):
    import torch

    ours = Convolution(1, 2, 4, 11, 9, kernel, stride, padding, dilation)
    theirs = torch.nn.Conv2d(2, 4, kernel, stride, padding, dilation, device="meta")
    shape = theirs(torch.empty(1, 2, 11, 9, device="meta")).shape
    assert (ours.out_height, ours.out_width) == tuple(shape[2:])


@pytest.mark.parametrize("outputs", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 2), (2, 3, 1), (1, 4, 1)]
)
def test_span_counts_the_pixels_a_run_of_outputs_touches(outputs, kernel, stride, dilation):
    op = Convolution(1, 1, 1, 100, 100, kernel, stride, 0, dilation)
    touched = {o * stride + k * dilation for o in range(outputs) for k in range(kernel)}
    assert len(touched) <= op.span(0, outputs) <= max(touched) + 1


def test_groups_share_the_array_where_that_is_faster():
    depthwise = simulate(Convolution(1, 64, 64, 14, 14, padding=1, groups=64))
    assert depthwise.tiling.repeats == 2  # 32 outputs side by side
    alone = simulate(Convolution(1, 1, 1, 14, 14, padding=1))
    assert depthwise.cycles < 64 * alone.cycles
    halves = simulate(Convolution(1, 128, 128, 14, 14, padding=1, groups=2))
    half = simulate(Convolution(1, 64, 64, 14, 14, padding=1))
    assert halves.cycles == 2 * half.cycles
    assert halves.energy_nj == pytest.approx(2 * half.energy_nj)
    assert halves.dram_bits.total == 2 * half.dram_bits.total


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.5, True, "8"])
@pytest.mark.parametrize("name", ["activation_bits", "weight_bits"])
def test_a_precision_the_array_lacks(name, bits):
    with pytest.raises(ValueError, match=rf"^{name}.*(quantise)[^\n]*$"):
        simulate(FullyConnected(16, 32, 32, **{name: bits}))
    with pytest.raises(ValueError, match=rf"^{name}.*(quantise)[^\n]*$"):
        simulate(Convolution(1, 4, 4, 8, 8, **{name: bits}))


def test_another_array_may_have_that_precision():
    result = simulate(FullyConnected(16, 32, 32, 16, 16), BitFusion(max_bits=16))
    assert result.compute_cycles == 32
    assert BitFusion(max_bits=16).fusion(2, 16) == 8
    assert BitFusion(min_bits=4).fusion(1, 2) == 4


@pytest.mark.parametrize("value", [0, -3, 1.5, None, True, float("nan")])
def test_sizes_must_be_positive(value):
    for name in ("rows", "inputs", "outputs"):
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number from 1, got [^\n]*: pass"):
            FullyConnected(**{"rows": 1, "inputs": 1, "outputs": 1, name: value})
    sizes = dict.fromkeys(("batch", "in_channels", "out_channels", "height", "width", "groups"), 4)
    for name in sizes:
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number"):
            Convolution(**{**sizes, name: value})
    for name in ("inputs", "outputs", "dram_bits_per_cycle", "weight_buffer", "output_bits", "max_bits"):
        with pytest.raises(ValueError, match=rf"^BitFusion.{name} must be a whole number"):
            BitFusion(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "fast", None])
def test_the_clock_must_be_positive(value):
    with pytest.raises(ValueError, match=r"^BitFusion.frequency_hz must be a finite number above 0"):
        BitFusion(frequency_hz=value)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"^EnergyTable.dram_bit must be a finite number at least 0"):
        EnergyTable(dram_bit=-1)
    with pytest.raises(ValueError, match="must be an EnergyTable, got dict"):
        BitFusion(energy={})
    with pytest.raises(ValueError, match=r"min_bits=4 is above max_bits=2: lower"):
        BitFusion(min_bits=4, max_bits=2)
    with pytest.raises(ValueError, match=r"in_channels=6 must be a multiple of groups=4"):
        Convolution(1, 6, 8, 8, 8, groups=4)
    with pytest.raises(ValueError, match=r"kernel=\(9, 9\) is larger than the input 8 x 8"):
        Convolution(1, 3, 8, 8, 8, kernel=9)
    with pytest.raises(ValueError, match=r"stride must be one number or \(vertical, horizontal\)"):
        Convolution(1, 3, 8, 8, 8, stride=(1, 2, 3))
    with pytest.raises(ValueError, match=r"kernel\[1\] must be a whole number from 1"):
        Convolution(1, 3, 8, 8, 8, kernel=(1, 0))
    with pytest.raises(TypeError, match="op must be a FullyConnected or a Convolution, got tuple"):
        simulate((16, 32, 32))
    with pytest.raises(TypeError, match="array must be a BitFusion, got str"):
        simulate(FullyConnected(1, 1, 1), "paper")
    with pytest.raises(ValueError, match="times must be a whole number from 0"):
        simulate_all([(FullyConnected(1, 1, 1), -1)])
    with pytest.raises(ValueError, match="nope"):
        attention_layer("nope")
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        attention_layer("eco", tokens=0)


@pytest.mark.parametrize(
    ("name", "least"), [("weight_buffer", 1024), ("activation_buffer", 2), ("output_buffer", 256)]
)
def test_a_buffer_too_small_names_the_size_that_suffices(name, least):
    op = FullyConnected(16, 32, 32)
    with pytest.raises(ValueError, match=rf"^BitFusion.{name}={least - 1} bytes .* at least {least} bytes$"):
        simulate(op, BitFusion(**{name: least - 1}))
    assert simulate(op, BitFusion(**{name: least})).cycles > 0


def test_a_buffer_for_a_convolution_holds_a_patch():
    op = Convolution(1, 8, 8, 8, 8, kernel=3)
    with pytest.raises(ValueError, match=r"activation_buffer=17 bytes .* at least 18 bytes"):
        simulate(op, BitFusion(activation_buffer=17))
    assert simulate(op, BitFusion(activation_buffer=18)).tiling.rows == 1
