"""The accelerator's configuration, its energy constants, and checks of arguments."""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def whole(name: str, value: Any, least: int = 1, remedy: str = "") -> int:
    """`value` as an int of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        remedy = remedy or f"pass a whole number of at least {least}"
        raise ValueError(f"{name} must be a whole number from {least}, got {value!r}: {remedy}")
    return number


def pair(name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """One number for both axes, or (vertical, horizontal)."""
    if not isinstance(value, tuple | list):
        return whole(name, value, least), whole(name, value, least)
    if len(value) != 2:
        raise ValueError(f"{name} must be one number or (vertical, horizontal), got {value!r}: pass two")
    return whole(f"{name}[0]", value[0], least), whole(f"{name}[1]", value[1], least)


def _amount(name: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a finite float above zero, or from zero on."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero) or isinstance(value, bool):
        bound = "at least 0" if zero else "above 0"
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}: pass such a number")
    return number


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

    def __post_init__(self) -> None:
        for item in fields(self):
            value = _amount(f"EnergyTable.{item.name}", getattr(self, item.name), zero=True)
            object.__setattr__(self, item.name, value)


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
        for name, value in vars(self).copy().items():
            if name == "energy":
                if not isinstance(value, EnergyTable):
                    raise ValueError(f"BitFusion.energy must be an EnergyTable, got {type(value).__name__}")
            else:
                check = _amount if name == "frequency_hz" else whole
                object.__setattr__(self, name, check(f"BitFusion.{name}", value))
        if self.min_bits > self.max_bits:
            raise ValueError(
                f"BitFusion.min_bits={self.min_bits} is above max_bits={self.max_bits}: lower min_bits"
            )

    def fusion(self, activation_bits: int, weight_bits: int) -> int:
        """Products per fusion unit and cycle at these precisions."""
        activations, weights = (
            self.max_bits // max(bits, self.min_bits) for bits in (activation_bits, weight_bits)
        )
        return activations * weights

    def check_bits(self, name: str, bits: int) -> None:
        """Refuse a precision that the fusion units do not have."""
        if not 1 <= bits <= self.max_bits:
            raise ValueError(
                f"{name}={bits} is not a precision of this array, which has 1 to {self.max_bits} bits: "
                f"quantise to {self.max_bits} bits or fewer, or give the array a larger max_bits"
            )

    @classmethod
    def from_dict(cls, content: Any) -> BitFusion:
        """The array of a dict like that of `to_dict`; what it leaves out is the paper's."""
        settings = dict(_known("array", content, cls))
        energy = _known("energy", settings.pop("energy", {}), EnergyTable)
        return cls(**settings, energy=EnergyTable(**energy))

    def to_dict(self) -> dict[str, Any]:
        """The configuration, for JSON."""
        return asdict(self)


def _known(what: str, content: Any, of: type) -> dict[str, Any]:
    """`content`, if it is a dict of fields of this class."""
    names = [item.name for item in fields(of)]
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be an object of {', '.join(names)}, got {type(content).__name__}")
    unknown = [name for name in content if name not in names]
    if unknown:
        raise ValueError(f"{what} has no {unknown[0]!r}: it has {', '.join(names)}")
    return content
