"""Layers that compute in whole numbers: int8 weights and inputs, int32 sums.

Numbers become int8 by a grid: x is about scale * (n - zero) with n from -128 to 127. Weights have a scale for
each output channel and no zero. In exported graphs the same layers are pairs of QuantizeLinear and
DequantizeLinear around standard operators (QDQ), which runtimes fuse to their integer kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ecoformer.arguments import shape
from ecoformer.ops.eager import full_precision
from ecoformer.ops.exported import exporting

LARGEST = 127
"""Of int8 values."""

LOWEST, HIGHEST = -128, 127
MOST_INPUTS = 1 << 16
"""Numbers that an int8 product adds up: sums of more may not fit in 32 bits."""
_SMALLEST_SCALE = 1e-30
"""Smaller numbers are zero."""


class Grid(NamedTuple):
    """How numbers become int8."""

    scale: float
    zero: int = 0


def quantized(x: Tensor, scale: Tensor, zero: Tensor | int = 0) -> Tensor:
    """The int8 numbers nearest to x."""
    return (torch.round(x / scale) + zero).clamp(LOWEST, HIGHEST).to(torch.int8)


def quantized_weight(weight: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 weights (out, ...) and a scale for each output channel, not below `least`; 1 for one of zeros."""
    scale = weight.detach().float().flatten(1).abs().amax(dim=1) / LARGEST
    scale = scale if least is None else torch.maximum(scale, least)
    scale = torch.where(scale < _SMALLEST_SCALE, 1.0, scale)
    rows = scale.view(-1, *[1] * (weight.ndim - 1))
    return quantized(weight.detach().float(), rows), scale


def dequantized(x: Tensor, grid: Grid, scale: float | None = None) -> Tensor:
    """x by way of int8, for an exported graph; as uint8, for which runtimes have the fastest kernels.

    `scale` is that of the result, if it is to be another than the grid's.
    """
    decomposed, rest = _decomposed(), (grid.zero - LOWEST, 0, HIGHEST - LOWEST, torch.uint8)
    numbers = decomposed.quantize_per_tensor(x.float(), grid.scale, *rest)
    found: Tensor = decomposed.dequantize_per_tensor(numbers, scale or grid.scale, *rest)
    return found


def _decomposed() -> Any:
    """PyTorch's own operators for quantisation in graphs, which its exporter must know before it starts."""
    import torch.ao.quantization.fx._decomposed

    return torch.ops.quantized_decomposed


@torch.library.custom_op("ecoformer::integer_conv2d", mutates_args=())
def integer_conv2d(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int) -> Tensor:
    """int32 sums of a convolution of int8 numbers without padding.

    PyTorch has no such convolution, so floating point computes it: exactly, as long as sums fit.
    """
    fits = weight[0].numel() * 128 * 128 < 1 << 24
    dtype = torch.float32 if fits else torch.float64
    with full_precision(x.device):
        out = F.conv2d(x.to(dtype), weight.to(dtype), stride=stride, dilation=dilation, groups=groups)
    return out.to(torch.int32)


@integer_conv2d.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int) -> Tensor:
    return F.conv2d(x, weight, stride=stride, dilation=dilation, groups=groups).to(torch.int32)


class HasGrids(nn.Module):
    """Grids as buffers, and as plain numbers for exported graphs, in which buffers have no values."""

    _grids: Mapping[str, Grid] = {}

    def _add_grid(self, name: str, device: torch.device | None) -> None:
        self.register_buffer(f"{name}_scale", torch.ones((), device=device))
        self.register_buffer(f"{name}_zero", torch.zeros((), dtype=torch.int32, device=device))
        self._grids = {**self._grids, name: Grid(1.0)}

    def set_grid(self, name: str, grid: Grid) -> None:
        """Where numbers of this name lie."""
        getattr(self, f"{name}_scale").fill_(grid.scale)
        getattr(self, f"{name}_zero").fill_(grid.zero)
        self.remember_grids()

    def _check_training(self, x: Tensor) -> None:
        if self.training and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("gradients do not pass integer layers: train the original, then quantise it")

    def remember_grids(self) -> None:
        """Read the plain numbers from the buffers."""
        for name in self._grids:
            scale, zero = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
            if not scale.is_meta:
                self._grids = {**self._grids, name: Grid(float(scale), int(zero))}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales stay in fp32, whatever the model is converted to; as whole numbers, they are only moved."""
        kept = {
            name: fn(x.view(torch.int32)).view(x.dtype)
            for name, x in self._buffers.items()
            if x is not None and x.is_floating_point()
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(kept)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.remember_grids()


class _Integer(HasGrids):
    """int8 weights with a scale each, biases in units of the sums, and the grid of the input.

    Models read their layers' weights, for their dtype or to use them twice, so `weight` is in floating point.
    In a state dict, `weight` is the int8 numbers, with one more axis than the original's, so that nobody can
    load them as floating-point weights: libraries compare names and shapes, but not dtypes.
    """

    numbers: Tensor
    dtype: torch.dtype
    scale: Tensor
    bias: Tensor
    input_scale: Tensor
    input_zero: Tensor

    def _hold(self, size: tuple[int, ...], device: torch.device | None, dtype: torch.dtype) -> None:
        _decomposed()
        self.dtype = dtype
        new: Any = {"device": device}
        self.register_buffer("numbers", torch.zeros(size, dtype=torch.int8, **new))
        self.register_buffer("scale", torch.ones(size[0], **new))
        self.register_buffer("bias", torch.zeros(size[0], dtype=torch.int32, **new))
        self._add_grid("input", device)

    def fill(self, weight: Tensor, bias: Tensor | None, grid: Grid) -> None:
        """Take over a layer's weights, for inputs on this grid.

        Sums are at most 255 * 127 for each input, and biases take half of what is left of 32 bits. Where the
        weights of a channel are tiny next to its bias, the scale is larger than they need, so that it fits.
        """
        least = None
        if bias is not None:
            room = ((1 << 31) - 255 * LARGEST * math.prod(weight.shape[1:])) // 2
            least = (bias.detach().double().abs() / (room * grid.scale)).float()
        numbers, scale = quantized_weight(weight, least)
        self.numbers.copy_(numbers)
        self.scale.copy_(scale)
        self.set_grid("input", grid)
        offset = -grid.zero * self.numbers.flatten(1).sum(dim=1, dtype=torch.int64)
        if bias is not None:
            steps = bias.detach().double() / (self.scale.double() * grid.scale)
            offset = offset + steps.round().long()
        self.bias.copy_(offset)

    @property
    def weight(self) -> Tensor:
        """What the int8 weights stand for, in the model's dtype; computed where more than that is read."""
        recorded = torch.compiler.is_compiling() or exporting() or torch._C._get_tracing_state()
        return self.float_weight() if recorded else _LazyWeight(self)

    def float_weight(self) -> Tensor:
        """The same, computed at once."""
        return self._float_weight().to(self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._named_as_in_files():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._named_as_in_files():
            super()._load_from_state_dict(*args)

    @contextmanager
    def _named_as_in_files(self) -> Iterator[None]:
        buffers = self._buffers
        buffers["weight"] = cast(Tensor, buffers.pop("numbers")).unsqueeze(-1)
        try:
            yield
        finally:
            buffers["numbers"] = cast(Tensor, buffers.pop("weight")).squeeze(-1)

    def _check(self, x: Tensor, fits: bool, expected: str) -> None:
        if not (fits and x.is_floating_point()):
            raise ValueError(f"input must be floating point {expected}, got {x.dtype} {shape(x)}")
        self._check_training(x)

    @property
    def steps(self) -> Tensor:
        """What one unit of the sums stands for, by output channel."""
        return self.scale * self.input_scale

    def _float_weight(self, channels: slice = slice(None), factor: Tensor | float = 1.0) -> Tensor:
        """Weights in an exported graph, times a factor."""
        return by_channel(self.numbers[channels], self.scale[channels] * factor)

    def _float_bias(self, channels: slice = slice(None), factor: Tensor | float = 1.0) -> Tensor:
        """Biases in an exported graph, where the input's zero is subtracted; int32 in the file."""
        whole = self.bias + self.input_zero * self.numbers.flatten(1).sum(dim=1, dtype=torch.int32)
        return by_channel(whole[channels], self.steps[channels] * factor)


def by_channel(numbers: Tensor, scale: Tensor) -> Tensor:
    """Whole numbers times a scale for each of the first axis, as an exported graph says it."""
    ends = torch.iinfo(numbers.dtype)
    zeros = torch.zeros_like(scale, dtype=numbers.dtype)
    found: Tensor = _decomposed().dequantize_per_channel(
        numbers, scale, zeros, 0, ends.min, ends.max, numbers.dtype
    )
    return found


class _LazyWeight(Tensor):
    """A layer's weight in floating point, computed by the first operator that takes it."""

    @staticmethod
    def __new__(cls, layer: _Integer) -> Any:
        like: Any = {"dtype": layer.dtype, "device": layer.numbers.device}
        found: Any = Tensor._make_wrapper_subclass(cls, layer.numbers.shape, **like)
        found._layer = layer
        return found

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = tree_map_only(cls, lambda x: x._layer.float_weight(), (args, kwargs or {}))
        return func(*given[0], **given[1])


class IntegerLinear(_Integer):
    """A linear layer on int8 numbers; what comes out is floating point again."""

    def __init__(
        self, in_features: int, out_features: int, device: Any = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._hold((out_features, in_features), device, dtype)

    def quantized(self, x: Tensor) -> Tensor:
        """int8 numbers (rows, in_features) of an input."""
        return quantized(x, self.input_scale, self.input_zero).reshape(-1, self.in_features)

    def sums(self, numbers: Tensor) -> Tensor:
        """int32 sums (rows, out_features) of int8 numbers (rows, in_features)."""
        return integer_product(numbers, self.numbers) + self.bias

    def of_numbers(self, numbers: Tensor) -> Tensor:
        """The output for int8 numbers (rows, in_features)."""
        return self.sums(numbers) * self.steps

    def exported(self, x: Tensor) -> Tensor:
        """The same for an exported graph."""
        rows = dequantized(x.flatten(0, -2), self._grids["input"])  # one product with a bias, if a matrix
        return self.part(rows, slice(None)).view(*x.shape[:-1], self.out_features).to(x.dtype)

    def part(self, rows: Tensor, channels: slice, factor: Tensor | float = 1.0) -> Tensor:
        """Some channels of the output, times a factor, of dequantised rows in an exported graph."""
        return F.linear(rows, self._float_weight(channels, factor), self._float_bias(channels, factor))

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        x = input
        self._check(x, x.shape[-1:] == (self.in_features,), f"(..., {self.in_features})")
        if exporting():
            return self.exported(x)
        out = self.of_numbers(self.quantized(x))
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T of int8 matrices as int32."""
    if x.device.type in ("cpu", "meta"):
        return torch._int_mm(x, weight.t())
    return (x.double() @ weight.t().double()).to(torch.int32)  # exact; CUDA's _int_mm takes some sizes only


class IntegerConv2d(_Integer):
    """A convolution of int8 numbers; its output lies on a grid of int8 too."""

    output_scale: Tensor
    output_zero: Tensor

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.size, self.groups = tuple(layer.weight.shape), layer.groups
        self.stride, self.dilation = layer.stride, layer.dilation
        self.padding: Any = layer.padding
        self._hold(self.size, layer.weight.device, layer.weight.dtype)
        self._add_grid("output", layer.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Conv2d`."""
        x = input
        channels = self.size[1] * self.groups
        self._check(x, x.ndim in (3, 4) and x.shape[-3] == channels, f"(B, {channels}, H, W)")
        vertical, horizontal = self.padding
        settings: Any = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        if exporting():
            weight, bias = self._float_weight(), self._float_bias()
            rounded = dequantized(x, self._grids["input"])
            out = F.conv2d(rounded, weight, bias, padding=self.padding, **settings)
            return dequantized(out, self._grids["output"]).to(x.dtype)
        if vertical or horizontal:
            x = F.pad(x, (horizontal, horizontal, vertical, vertical))
        numbers = quantized(x, self.input_scale, self.input_zero)
        sums = integer_conv2d(numbers, self.numbers, list(self.stride), list(self.dilation), self.groups)
        sums = sums + self.bias.view(-1, 1, 1)
        requantized = quantized(sums * self.steps.view(-1, 1, 1), self.output_scale, self.output_zero)
        return ((requantized.float() - self.output_zero) * self.output_scale).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"size={self.size}, stride={self.stride}, padding={self.padding}, groups={self.groups}"
