"""What mechanisms compute, in a short vocabulary: `Product`, `Convolution`, and `Counts` for everything else.

A mechanism or hasher states its operations once, in its method `operations`. The paper's accounting and the
BitFusion model derive from that list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

KINDS = ("mul", "add", "shift", "lookup", "compare", "exp", "bytes")


@dataclass(frozen=True)
class Counts:
    """Numbers of operations by kind, and of bytes moved."""

    mul: int = 0
    add: int = 0
    shift: int = 0
    lookup: int = 0
    compare: int = 0
    exp: int = 0
    bytes: int = 0
    narrow: Mapping[str, Counts] = field(default_factory=dict, compare=False)
    """Those of the operations that are not fp32, by width, such as "int8"; not part of equality."""

    def __add__(self, other: Counts) -> Counts:
        narrow = {
            width: self.narrow.get(width, Counts()) + other.narrow.get(width, Counts())
            for width in (*self.narrow, *(width for width in other.narrow if width not in self.narrow))
        }
        return replace(Counts(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS)), narrow=narrow)

    def __mul__(self, times: int) -> Counts:
        narrow = {width: counts * times for width, counts in self.narrow.items()}
        return replace(Counts(*(getattr(self, kind) * times for kind in KINDS)), narrow=narrow)

    def of(self, width: str) -> Counts:
        """The same operations, all of this width; bytes have none."""
        own = replace(self, bytes=0, narrow={})
        return replace(self, narrow={} if width == "fp32" or own == Counts() else {width: own})

    @property
    def widths(self) -> dict[str, Counts]:
        """The operations by width, fp32 first, without bytes."""
        narrow = sum(self.narrow.values(), Counts())
        wide = replace(self + narrow * -1, bytes=0, narrow={})
        return ({"fp32": wide} if wide != Counts() else {}) | dict(self.narrow)

    def to_dict(self) -> dict[str, int]:
        """The numbers by kind."""
        return {kind: getattr(self, kind) for kind in KINDS}


def mac(count: int = 1) -> Counts:
    """Multiply-accumulates: one multiplication and one addition each."""
    return Counts(mul=count, add=count)


Operand = Literal["value", "weight", "code"]
"""Computed from the input, learned and shared by all samples, or ±1."""


@dataclass(frozen=True)
class Product:
    """`times` matrix products of (rows, inner) by (inner, columns).

    `term` is what the paper counts for one term of a sum: by default a multiply-accumulate, and only an
    addition where an operand is a code.
    """

    rows: int
    inner: int
    columns: int
    times: int = 1
    left: Operand = "value"
    right: Operand = "value"
    term: Counts | None = None

    @property
    def macs(self) -> int:
        """Terms of all sums."""
        return self.rows * self.inner * self.columns * self.times

    @property
    def counts(self) -> Counts:
        """The paper's count."""
        usual = Counts(add=1) if "code" in (self.left, self.right) else mac()
        return (self.term or usual) * self.macs


@dataclass(frozen=True)
class Convolution:
    """A convolution of `batch` images with learned weights; pairs are (vertical, horizontal).

    A sequence is an image of height 1. `size` is that of the input without padding.
    """

    left: ClassVar[Operand] = "value"
    right: ClassVar[Operand] = "weight"

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def macs(self) -> int:
        """One for every weight and output position; a bias is not included."""
        weights = math.prod(self.kernel) * self.in_channels // self.groups * self.out_channels
        return weights * self.batch * math.prod(self.output)

    @property
    def counts(self) -> Counts:
        """The paper's count."""
        return mac(self.macs)


Operation = Product | Convolution | Counts
Operations = list[Operation]


def paper_counts(operations: Operations) -> Counts:
    """The multiplications and additions that the paper counts for these operations."""
    return sum((op if isinstance(op, Counts) else op.counts for op in operations), Counts())


def softmax_attention(groups: int, queries: int, keys: int, channels: int) -> Operations:
    """Softmax attention in each group: scores, their scaling (one multiplication each), weighted sums."""
    scores, sums = Product(queries, channels, keys, groups), Product(queries, keys, channels, groups)
    return [scores, Counts(mul=groups * queries * keys), sums]


class Described:
    """A module that can state its operations.

    A subclass that overrides the method named by `computed_by` computes something else, so it does not
    inherit `operations`: it defines its own, or is listed as not counted.
    """

    computed_by: ClassVar[str]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.computed_by in cls.__dict__ and "operations" not in cls.__dict__:
            cls.operations = Described.operations  # type: ignore[method-assign]

    def operations(self, batch: int, tokens: int) -> Operations | None:
        """What a call on `batch` samples of `tokens` tokens computes; None if unknown.

        Projections and other submodules are counted on their own and do not belong here.
        """
        return None
