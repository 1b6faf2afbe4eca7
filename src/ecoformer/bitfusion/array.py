"""The accelerator's configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .checks import amount, whole
from .energy import EnergyTable

__all__ = ["BitFusion"]


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
    """In bytes, as are the other buffers. Half holds what is computed on, half what comes next."""
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
                check = amount if name == "frequency_hz" else whole
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
        """Refuse a precision that no fusion unit can be set to."""
        if not 1 <= bits <= self.max_bits:
            raise ValueError(
                f"{name}={bits} is a precision this array lacks, it has 1 to {self.max_bits} bits: "
                f"quantise to {self.max_bits} bits or fewer, or give the array a larger max_bits"
            )

    @classmethod
    def from_dict(cls, content: Any) -> BitFusion:
        """What `to_dict` gave, or any part of it; the rest is the paper's."""
        settings = dict(_known("array", content, cls))
        energy = _known("energy", settings.pop("energy", {}), EnergyTable)
        return cls(**settings, energy=EnergyTable(**energy))

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON can hold it."""
        return asdict(self)


def _known(what: str, content: Any, of: type) -> dict[str, Any]:
    """`content`, if it is a mapping of nothing but the fields of a class."""
    names = [f.name for f in fields(of)]
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be an object of {', '.join(names)}, got {type(content).__name__}")
    unknown = [name for name in content if name not in names]
    if unknown:
        raise ValueError(f"{what} has no {unknown[0]!r}: it has {', '.join(names)}")
    return content
