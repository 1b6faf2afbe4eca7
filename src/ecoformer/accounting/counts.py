"""Operations of a layer, by kind."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Counts:
    """How many operations of each kind, and how many bytes are moved."""

    mul: int = 0
    add: int = 0
    shift: int = 0
    lookup: int = 0
    compare: int = 0
    exp: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(getattr(self, f.name) * times for f in fields(self)))

    def to_dict(self) -> dict[str, int]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


KINDS = tuple(f.name for f in fields(Counts))


def mac(count: int) -> Counts:
    """Multiply-accumulates: one multiplication and one addition each."""
    return Counts(mul=count, add=count)
