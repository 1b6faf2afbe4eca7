"""`sharp_eco` in whole numbers, with its projections and its local branch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention.eco import KEY_WEIGHT_GAIN, LARGEST_EXPONENT, HashedAttention, SharpEcoAttention
from ecoformer.attention.local import LocalBranch, depthwise
from ecoformer.hashing import SignHasher
from ecoformer.operations import Operations, Product
from ecoformer.ops.exported import attention as exported_attention
from ecoformer.ops.exported import exporting
from ecoformer.ops.integer import LEVELS, integer_attention, integer_levels, integer_multiplier, pack_signs
from ecoformer.quantization.layers import (
    LARGEST,
    Grid,
    HasGrids,
    IntegerLinear,
    by_channel,
    dequantized,
    integer_conv2d,
    integer_product,
    quantized_weight,
)


class IntegerLocal(HasGrids, LocalBranch):
    """A local branch of int8 values: int32 sums, and what one unit of them stands for, by channel."""

    weight: Any
    scale: Tensor

    def __init__(self, branch: LocalBranch) -> None:
        nn.Module.__init__(self)
        self.size, self.sizes = branch.size, branch.sizes
        new: Any = {"device": branch.weight.device}
        self.register_buffer("weight", torch.zeros((*branch.weight.shape, 1), dtype=torch.int8, **new))
        self.register_buffer("scale", torch.ones(len(branch.weight), **new))

    def fill(self, weight: Tensor, steps: Tensor) -> None:
        """Take over weights, for values with these steps by channel."""
        numbers, scale = quantized_weight(weight)
        self.weight.copy_(numbers.unsqueeze(-1))
        self.scale.copy_(scale * steps)

    def _sums(self, v: Tensor, padding: list[int]) -> Tensor:
        """int32 sums; in an exported graph, what they stand for."""
        numbers = self.weight.squeeze(-1)
        if exporting():
            return depthwise(v, by_channel(numbers, self.scale), padding)
        if len(self.sizes) == 1:
            v, numbers, padding = v.unsqueeze(2), numbers.unsqueeze(2), [0, *padding]
        vertical, horizontal = padding
        v = F.pad(v, (horizontal, horizontal, vertical, vertical))
        sums: Tensor = integer_conv2d(v, numbers, [1, 1], [1, 1], v.shape[1])
        return sums.squeeze(2) if len(self.sizes) == 1 else sums


class IntegerAttention(HasGrids, HashedAttention):
    """`sharp_eco` in whole numbers: see `ops/integer.py` for the attention itself.

    One product gives the sums of codes, exponents and values. Codes are the signs of theirs. The exponent of
    a key's weight is found by comparing its sum with the 24 numbers where it changes. Values become int8 with
    a scale for each head, and outputs with one for all.
    """

    name = "sharp_eco"
    projects_to_codes = True
    thresholds: Tensor
    levels: Tensor
    multiplier: Tensor
    value_scale: Tensor
    output_scale: Tensor

    def __init__(self, layer: SharpEcoAttention) -> None:
        nn.Module.__init__(self)
        self.dim, self.num_heads, self.head_dim = layer.dim, layer.num_heads, layer.head_dim
        self.groups, self.separate, self.bits = layer.groups, layer.separate, layer.hasher.bits
        self.bias, self.attn_drop, self.affinity = "paper", 0.0, None
        self.local = None if layer.local is None else IntegerLocal(layer.local)
        self.hasher = SignHasher(layer.num_heads, self.bits)
        self.weighted = layer.key_weights is not None
        self.key_weights: Any = self.weighted or None  # for `operations`
        heads, groups = layer.num_heads, layer.groups or 1
        device, dtype = layer.v.weight.device, layer.v.weight.dtype
        codes = heads * self.bits * (2 if layer.separate else 1)
        self.parts = [codes, heads if self.weighted else 0, layer.dim]
        self.projection = IntegerLinear(layer.dim, sum(self.parts), device, dtype)
        self.proj: Any = nn.Identity()
        if isinstance(layer.proj, (nn.Linear, IntegerLinear)):
            self.proj = IntegerLinear(layer.dim, layer.dim, device, dtype)
        new: Any = {"device": device}
        self.register_buffer("thresholds", torch.zeros(self.parts[1], 24, dtype=torch.int32, **new))
        size = (heads, groups, self.bits // groups + 1)
        self.register_buffer("levels", torch.zeros(size, dtype=torch.int32, **new))
        self.register_buffer("multiplier", torch.zeros(heads, 2, dtype=torch.int32, **new))
        self.register_buffer("value_scale", torch.ones(heads, **new))
        self._add_grid("output", device)

    @torch.no_grad()
    def fill_from(self, layer: SharpEcoAttention, grid: Grid, values: Tensor, output: float) -> None:
        """Take over a layer's weights.

        Args:
            layer: the layer.
            grid: of the input.
            values: the largest value (H,) of each head.
            output: the largest output.
        """
        exponent = [] if layer.key_weights is None else [layer.key_weights.exponent]
        linears: list[Any] = [layer.qk, *exponent, layer.v]
        weight = torch.cat([linear.weight for linear in linears])
        biases = [torch.zeros(len(x.weight)).to(x.weight) if x.bias is None else x.bias for x in linears]
        self.projection.fill(weight, torch.cat(biases), grid)
        affinity: Any = layer.affinity
        self.levels.copy_(integer_levels(affinity(self.bits)))
        self.set_grid("output", Grid(max(output, 1e-12) / LARGEST))
        # A head whose values are tiny next to the outputs of others adds nothing that int8 can show.
        self.value_scale.copy_(torch.maximum(values / LARGEST, self.output_scale / 200))
        self.multiplier.copy_(integer_multiplier(self.value_scale / self.output_scale))
        if isinstance(self.local, IntegerLocal) and layer.local is not None:
            self.local.fill(layer.local.weight, self.value_scale.repeat_interleave(self.head_dim))
        if self.weighted:
            # e >= t where 12 tanh(y / 3) rounds to at least t.
            changes = torch.arange(1 - LARGEST_EXPONENT, LARGEST_EXPONENT + 1, dtype=torch.float64) - 0.5
            changes = torch.atanh(changes / LARGEST_EXPONENT) * LARGEST_EXPONENT / KEY_WEIGHT_GAIN
            steps = self.projection.steps[self.parts[0] : sum(self.parts[:2])].double()
            found = torch.ceil(changes.to(steps.device) / steps.unsqueeze(-1))
            self.thresholds.copy_(found.clamp(-(1 << 31), (1 << 31) - 1))
        if isinstance(layer.proj, nn.Linear):
            self.proj.fill(layer.proj.weight, layer.proj.bias, self._grids["output"])

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """Tokens (B, N, dim) to tokens (B, N, dim), as every mechanism."""
        if is_causal:
            raise ValueError("is_causal=True is not supported by integer attention: keep this layer in fp32")
        self._check(x, key_padding_mask, is_causal)
        self._check_training(x)
        if exporting():
            return self._exported(x, key_padding_mask, grid, prefix)
        batch, tokens = x.shape[:2]
        sums = integer_product(self.projection.quantized(x), self.projection.numbers)
        coded, exponents, values = torch.split(sums, self.parts, dim=-1)
        bias = torch.split(self.projection.bias, self.parts)
        codes = pack_signs(coded, -bias[0], self.bits)
        codes = codes.view(batch, tokens, 2 if self.separate else 1, self.num_heads)
        codes_q, codes_k = codes[:, :, 0].transpose(1, 2), codes[:, :, -1].transpose(1, 2)
        exponent = None
        if self.weighted:
            above = ((exponents + bias[1]).unsqueeze(-1) >= self.thresholds).sum(dim=-1) - LARGEST_EXPONENT
            exponent = above.to(torch.int8).view(batch, tokens, self.num_heads).transpose(1, 2)
        values = self._values(values + bias[2]).view(batch, tokens, self.dim)
        v = values.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        tables = (self.levels, self.multiplier)
        out = integer_attention(codes_q, codes_k, v, *tables, exponent, key_padding_mask)
        numbers = out.transpose(1, 2).reshape(-1, self.dim)
        if isinstance(self.local, IntegerLocal):
            sums = self.local(values, key_padding_mask, False, grid, prefix).reshape(-1, self.dim)
            total = numbers + torch.round(sums * (self.local.scale / self.output_scale))
            numbers = total.clamp(-LARGEST, LARGEST).to(torch.int8)
        if isinstance(self.proj, IntegerLinear):
            found = self.proj.of_numbers(numbers)
        else:
            found = numbers * self.output_scale
        return found.view(x.shape).to(x.dtype)

    def _values(self, sums: Tensor) -> Tensor:
        """Values as int8, from -127 to 127."""
        factor = self.projection.steps[-self.dim :] / self.value_scale.repeat_interleave(self.head_dim)
        return torch.round(sums * factor).clamp(-LARGEST, LARGEST).to(torch.int8)

    def _exported(
        self, x: Tensor, key_padding_mask: Tensor | None, grid: tuple[int, int] | None, prefix: int
    ) -> Tensor:
        """The same up to rounding, in floating point where runtimes have no integer operator.

        Parts of the projection are products of their own, and scales are folded into weights and tables, so
        that nothing passes over all tokens only to be cut or scaled.
        """
        heads, half = self.num_heads, self.num_heads * self.bits
        rows = dequantized(x.flatten(0, 1), self.projection._grids["input"])

        def part(start: int, size: int, factor: Tensor | float = 1.0) -> Tensor:
            return self.projection.part(rows, slice(start, start + size), factor)

        q = self._heads(part(0, half), x)
        k = self._heads(part(half, half), x) if self.separate else None
        weight = None
        if self.weighted:
            # Rounded to steps of 1/12, read as steps of log 2, which is the logarithm of 2^e.
            exponent = torch.tanh(part(self.parts[0], heads, KEY_WEIGHT_GAIN / LARGEST_EXPONENT))
            exponent = dequantized(exponent, Grid(1 / LARGEST_EXPONENT), math.log(2))
            weight = self._heads(torch.exp(exponent), x).squeeze(-1)
        steps = self.value_scale.repeat_interleave(self.head_dim)
        values = dequantized(part(sum(self.parts[:2]), self.dim, 1 / steps), Grid(1.0))
        v = self._heads(values, x)
        if key_padding_mask is not None:
            seen = ~key_padding_mask.unsqueeze(1)
            weight = seen.float() if weight is None else torch.where(seen, weight, 0)
        levels = self.levels.float() / LEVELS
        out = exported_attention(q, k, v, levels, weight, self.bits, self.value_scale)
        out = out.squeeze(1) if heads == 1 else out.transpose(1, 2).flatten(2)
        if self.local is not None:
            out = out + self.local(values.view(x.shape), key_padding_mask, False, grid, prefix)
        if isinstance(self.proj, IntegerLinear):
            return self.proj.exported(out).to(x.dtype)
        return dequantized(out, self._grids["output"]).to(x.dtype)

    def operations(self, batch: int, tokens: int) -> Operations | None:
        """As `sharp_eco`, with the projections, which are not modules of their own here."""
        attention = super().operations(batch, tokens)
        columns = [*self.parts, self.dim if isinstance(self.proj, IntegerLinear) else 0]
        projected = [Product(batch * tokens, self.dim, n, right="weight") for n in columns if n]
        return None if attention is None else [*projected, *attention]

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, integer, bits={self.bits}, groups={self.groups}"
