"""The operations the accelerator runs: a matrix product of rows, and a convolution."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .array import pair, whole


def _check(op: Any, sizes: tuple[str, ...]) -> None:
    for name in sizes:
        object.__setattr__(op, name, whole(name, getattr(op, name)))
    for name in ("activation_bits", "weight_bits"):
        remedy = "bits start at 1 (a code); quantise the operands and pass their width"
        object.__setattr__(op, name, whole(name, getattr(op, name), remedy=remedy))


@dataclass(frozen=True)
class FullyConnected:
    """`rows` vectors of `inputs` activations times one matrix of inputs × outputs weights.

    Any matrix product is one: in attention, keys and values are the weights that the queries meet.
    """

    rows: int
    inputs: int
    outputs: int
    activation_bits: int = 8
    weight_bits: int = 8

    def __post_init__(self) -> None:
        _check(self, ("rows", "inputs", "outputs"))

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.rows * self.inputs * self.outputs

    def to_dict(self) -> dict[str, Any]:
        """The operation, for JSON."""
        return {"kind": "fully_connected"} | asdict(self)


@dataclass(frozen=True)
class Convolution:
    """A convolution over `batch` feature maps of `in_channels` × `height` × `width`.

    It runs as the matrix product of its patches: batch · out_height · out_width rows, in_channels · kernel ·
    kernel inputs, `out_channels` outputs. All published figures of BitFusion are of fully connected
    operations, so the following is assumed:

    - Patches are cut out between the buffer and the array. DRAM and buffer hold the feature map: a tile moves
      each pixel that it touches once, padded zeros not at all, and neighbouring tiles each fetch the lines
      they share.
    - A tile is part of a line, complete lines, or complete feature maps; it has all taps of its channels.
    - Groups run one after another. Several run together as one product with zeros between them where their
      outputs fit side by side in the array and that is faster: a depthwise convolution alone would fill one
      column of the array and pad each output to a line.
    """

    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: int | tuple[int, int] = 3
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    activation_bits: int = 8
    weight_bits: int = 8

    def __post_init__(self) -> None:
        _check(self, ("batch", "in_channels", "out_channels", "height", "width", "groups"))
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, name, pair(name, getattr(self, name), least))
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of groups={self.groups}: change one"
                )
        if min(self.out_height, self.out_width) < 1:
            size = f"{self.height} x {self.width} with padding {self.padding}"
            raise ValueError(f"kernel={self.kernel} is larger than the input {size}: pad it or enlarge it")

    @property
    def out_height(self) -> int:
        """Lines of the output."""
        return self._out(0, self.height)

    @property
    def out_width(self) -> int:
        """Pixels of an output line."""
        return self._out(1, self.width)

    @property
    def taps(self) -> int:
        """Pixels under the kernel."""
        return self._along("kernel", 0) * self._along("kernel", 1)

    @property
    def macs(self) -> int:
        """Multiply-accumulates, those with padded zeros included."""
        per_pixel = self.in_channels // self.groups * self.taps * self.out_channels
        return self.batch * self.out_height * self.out_width * per_pixel

    def span(self, axis: int, outputs: int) -> int:
        """Input positions along an axis (0: vertical) that a run of adjacent outputs touches."""
        reach = (outputs - 1) * self._along("stride", axis) + self._extent(axis)
        return min(reach, outputs * self._along("kernel", axis), (self.height, self.width)[axis])

    def to_dict(self) -> dict[str, Any]:
        """The operation, for JSON."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return {"kind": "convolution"} | plain

    def _along(self, name: str, axis: int) -> int:
        return pair(name, getattr(self, name), least=0)[axis]

    def _extent(self, axis: int) -> int:
        return self._along("dilation", axis) * (self._along("kernel", axis) - 1) + 1

    def _out(self, axis: int, size: int) -> int:
        padded = size + 2 * self._along("padding", axis)
        return (padded - self._extent(axis)) // self._along("stride", axis) + 1


Op = FullyConnected | Convolution
"""What `simulate` takes."""
Work = list[tuple[Op, int]]
"""Operations, and how often each runs."""
