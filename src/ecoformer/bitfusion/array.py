"""The accelerator's configuration and its energy constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def check_positive(name: str, value: Any) -> None:
    """Refuse anything but an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class EnergyTable:
    """Energy constants in picojoules; the defaults are BitFusion's, 45 nm.

    The core's constant is per fusion unit, so it scales with the array. The buffers' constants do not depend
    on their sizes: for sizes far from the paper's, pass your own.
    """

    unit_cycle: float = 235.104 / (16 * 32)
    """One fusion unit, per cycle in which the array computes; a stalled array costs nothing."""
    dram_bit: float = 15.0
    weight_read: float = 0.02137
    weight_write: float = 0.02892
    activation_read: float = 0.05947
    activation_write: float = 0.11370
    output_read: float = 0.03316
    # Known as 0.07308. The figures known to the picojoule fix the sum of read and write at 0.1062375 rather
    # than 0.10624; outputs are always read and written equally often, so either may take the rest.
    output_write: float = 0.0730775


@dataclass(frozen=True)
class BitFusion:
    """A systolic array of fusion units with three double-buffered memories; the defaults are the paper's.

    A fusion unit is a multiplier of `max_bits` × `max_bits` that splits into narrower ones, down to
    `min_bits`. Narrower operands compute as `min_bits` and move as what they are.
    """

    inputs: int = 16
    """Fusion units along the inputs, whose products are summed."""
    outputs: int = 32
    """Fusion units along the outputs."""
    frequency_hz: float = 500e6
    dram_bits_per_cycle: int = 192
    weight_buffer: int = 64 * 1024
    """In bytes, as are the other buffers. Half of a buffer is computed on while the other half is filled."""
    activation_buffer: int = 32 * 1024
    output_buffer: int = 16 * 1024
    min_bits: int = 2
    max_bits: int = 8
    output_bits: int = 32
    """Width of the sums, in the buffer and in DRAM."""
    energy: EnergyTable = field(default_factory=EnergyTable)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("energy", "frequency_hz"):
                check_positive(f"BitFusion.{name}", value)

    def fusion(self, activation_bits: int, weight_bits: int) -> int:
        """Products per fusion unit and cycle at these precisions."""
        activations, weights = (
            self.max_bits // max(bits, self.min_bits) for bits in (activation_bits, weight_bits)
        )
        return activations * weights

    def check_bits(self, bits: tuple[int, int]) -> None:
        """Refuse a precision that the fusion units do not have."""
        for name, number in zip(("activation", "weight"), bits, strict=True):
            check_positive(f"{name} bits", number)
            if number > self.max_bits:
                raise ValueError(f"{name} bits must be at most max_bits={self.max_bits}, got {number}")
