"""The affinity of two codes: groups of bits, and how strongly each group and bit counts.

A code of b bits is cut into G groups of s consecutive bits. The affinity of two codes h and g is

    a(h, g) = sum over groups j of weight_j * product over bits r in group j of (1 + beta_j h_r g_r).

With b groups of one bit it is the paper's 2^c + h . g. Larger groups are sharper: a group of four bits with
beta = 1 tells 16 kinds of tokens apart.

In a group where d bits differ the product is (1 + beta)^(s - d) (1 - beta)^d, so it counts scale * ratio^d
with scale = weight (1 + beta)^s and ratio = (1 - beta) / (1 + beta). Attention therefore needs, for every
group and each of its 2^s values, the sum over the keys that have this value: linear attention whose
*features* say which value a group has. Mixing these sums by scale * ratio^d, once a head, gives what each
value reads. Every number in it is positive, so nothing cancels.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ecoformer.arguments import shape

Bias = Literal["paper", "tight"]
FLOOR = 2.0**-30
"""Denominators are at least this share of what they would be if every key had the mean affinity of all codes,
sum_j weight_j. The paper's affinity never gets there."""
LARGEST = 8
"""Bits of a group: it has 2^s values."""


@dataclass(frozen=True, eq=False)
class Affinity:
    """Similarity of two codes; see the top of this module for its formula.

    Args:
        groups: G, which must divide the number of bits into groups of at most 8.
        beta: how much a bit that agrees counts over one that does not, 0 < beta <= 1: a number, or a tensor
            (H, G) with one for each head and group, which may require a gradient.
        weight: what a group counts, positive: a number or a tensor (H, G).
        check: whether to check the values of tensors; on a GPU they never are, since that would wait for it.
    """

    groups: int
    beta: float | Tensor = 0.5
    weight: float | Tensor = 1.0
    check: InitVar[bool] = True
    _prepared: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self, check: bool) -> None:
        if not isinstance(self.groups, int) or self.groups < 1:
            raise ValueError(f"groups must be a whole number of at least 1, got {self.groups!r}")
        for name, value, top in (("beta", self.beta, 1.0), ("weight", self.weight, float("inf"))):
            if isinstance(value, Tensor):
                _check_tensor(name, value, self.groups, top, check)
            elif not 0 < value <= top:
                raise ValueError(f"{name} must be {_range(top)}, got {value}")

    @classmethod
    def paper(cls, bits: int) -> Affinity:
        """2^c + h . g with c = ceil(log2(b + 1)), as in the paper."""
        return cls.biased(bits, 1 << bits.bit_length())

    @classmethod
    def tight(cls, bits: int) -> Affinity:
        """b + 1 + h . g, the smallest constant that keeps every affinity positive."""
        return cls.biased(bits, bits + 1)

    @classmethod
    def biased(cls, bits: int, constant: int) -> Affinity:
        """`constant` + h . g."""
        return cls(bits, bits / constant, constant / bits)

    @classmethod
    def of(cls, bias: Bias, bits: int) -> Affinity:
        """The affinity that `bias` names."""
        if bias == "paper":
            return cls.paper(bits)
        if bias == "tight":
            return cls.tight(bits)
        raise ValueError(f'bias must be "paper" or "tight", got {bias!r}')

    def constant(self, bits: int) -> float | None:
        """c where the affinity is proportional to c + h . g, as in the paper; None where it is not."""
        if self.groups != bits or isinstance(self.beta, Tensor) or isinstance(self.weight, Tensor):
            return None
        constant = int(bits) / self.beta  # torch.jit.trace makes sizes tensors
        whole = float(round(constant))
        return whole if abs(constant - whole) < 1e-9 else constant  # exact sums of whole numbers stay exact

    def needs_floor(self, bits: int) -> bool:
        """Whether a denominator can become as small as rounding errors."""
        constant = self.constant(bits)
        return constant is None or constant - bits < FLOOR * constant

    def size(self, bits: int) -> int:
        """s, bits of a group."""
        size = bits // self.groups
        if bits % self.groups or not 1 <= size <= LARGEST:
            raise ValueError(
                f"groups={self.groups} must divide codes of {bits} bits into groups of 1 to {LARGEST} bits"
            )
        return size

    def features(self, codes: Tensor) -> Tensor:
        """Features (..., N, F) of codes (..., N, b)."""
        return codes if self.constant(codes.shape[-1]) is not None else group_values(codes, self.groups)

    def levels(self, bits: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """`scale` and `ratio` (H or 1, G), see above, in the dtype and on the device of `like`."""
        beta, weight = (
            x.to(device=like.device, dtype=like.dtype)
            if isinstance(x, Tensor)
            else like.new_full((1, self.groups), x)
            for x in (self.beta, self.weight)
        )
        return weight * (1 + beta) ** self.size(bits), (1 - beta) / (1 + beta)

    def prepared(self, bits: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`scale` and `ratio` (H, G) and the smallest denominator a key (H,), in fp32 for fused backends.

        Kept where beta and weight are numbers: this takes as long as a short kernel.
        """
        key, learned = None, isinstance(self.beta, Tensor) or isinstance(self.weight, Tensor)
        if not learned and not torch.compiler.is_compiling():
            key = (bits, heads, device, torch.is_inference_mode_enabled())
        if key in self._prepared:
            return self._prepared[key]
        like = torch.empty(0, dtype=torch.float32, device=device)
        scale, ratio = (x.expand(heads, -1).contiguous() for x in self.levels(bits, like))
        found = scale, ratio, FLOOR * self.total(like).detach().expand(heads)
        if key is not None:
            self._prepared.clear()
            self._prepared[key] = found
        return found

    def total(self, like: Tensor) -> Tensor:
        """The mean affinity of all codes, the sum of the groups' weights (H or 1,)."""
        if isinstance(self.weight, Tensor):
            return self.weight.to(device=like.device, dtype=like.dtype).sum(dim=-1)
        return like.new_full((1,), self.weight * self.groups)

    def check_heads(self, v: Tensor) -> None:
        """Refuse tensors for another number of heads than v (..., H, N, D) has."""
        heads = v.shape[-3] if v.ndim > 2 else 1
        for name, value in (("beta", self.beta), ("weight", self.weight)):
            if isinstance(value, Tensor) and value.shape[0] not in (1, heads):
                raise ValueError(
                    f"affinity.{name} {shape(value)} must have a row for each of the {heads} heads of v"
                )


def _check_tensor(name: str, value: Tensor, groups: int, top: float, check: bool) -> None:
    if value.ndim != 2 or value.shape[1] != groups:
        raise ValueError(f"{name} must be a number or (H, G) with G = {groups} groups, got {shape(value)}")
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if check and value.device.type == "cpu" and not traced and not bool(((value > 0) & (value <= top)).all()):
        raise ValueError(f"{name} {shape(value)} must be {_range(top)}")


def _range(top: float) -> str:
    return "positive and at most 1" if top == 1 else "positive"


def group_values(codes: Tensor, groups: int) -> Tensor:
    """1 for the value that each group of bits has, 0 for its other values: (..., N, G * 2^s).

    Bit r of a value is bit r of the group. The features are linear in every bit, so codes between -1 and 1
    get the affinity of the formula, and each bit its exact derivative.
    """
    grouped = codes.reshape(*codes.shape[:-1], groups, codes.shape[-1] // groups)
    values = torch.ones_like(grouped[..., :1])
    for r in range(grouped.shape[-1]):
        bit = grouped[..., r : r + 1]
        values = torch.cat([values * (0.5 - 0.5 * bit), values * (0.5 + 0.5 * bit)], dim=-1)
    return values.flatten(-2)


def mixing(scale: Tensor, ratio: Tensor, size: int) -> Tensor:
    """scale * ratio^d for all pairs of a group's values, d their differing bits: (H, G, 2^s, 2^s)."""
    one = torch.ones_like(ratio)
    bit = torch.stack([torch.stack([one, ratio], dim=-1), torch.stack([ratio, one], dim=-1)], dim=-2)
    mixed = scale[..., None, None]
    for _ in range(size):
        # The new bit is the highest one of a value: it selects the block.
        mixed = (bit[..., :, None, :, None] * mixed[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    return mixed
