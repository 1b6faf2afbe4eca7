"""How kernels are launched: block sizes, warps and programs by the sizes of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import torch

from ecoformer.backends.triton import plans

Step = Literal["gather", "read", "gather_grad", "token_grad"]
STEPS: tuple[Step, ...] = ("gather", "read", "gather_grad", "token_grad")

ONE_TILE = 1 << 20
"""As `Config.per_sm`: as many programs as there are tiles."""
SHORT, SHORTEST, FEW = 512, 128, 128
"""Tokens up to which one program computes a head, in one launch instead of two: in general, and with fewer
than FEW heads to keep a GPU busy."""
MANY = 1 << 17
"""Tokens of all heads from which there is enough work for programs of one warp."""
LIGHT, LIGHT_GROUPS, HEAVY = 400, 500, 1000
"""Bytes of a token on the chip up to which one or two warps suffice (the second with groups of bits), and up
to which four do."""


def padded(width: int) -> int:
    """The power of two, 16 or more, that a width takes in a tile."""
    return max(16, 1 << (width - 1).bit_length())


class Config(NamedTuple):
    """How one kernel is launched."""

    block: int
    """Tokens of a tile."""
    warps: int
    stages: int
    """Depth of the loads' pipeline."""
    per_sm: int
    """Programs for each multiprocessor; 0: one program for each head, in one launch for both passes."""
    stride: int = 1
    """In causal order, blocks of a stretch: there is one state for each stretch."""


# For codes that are signs of projections, with up to 32 channels and with more: in the order of `STEPS`.
_NARROW_SIGNS = (Config(32, 1, 4, 7), Config(32, 1, 3, 11), Config(32, 1, 3, 7), Config(32, 1, 4, 7))
_WIDE_SIGNS = (Config(64, 2, 3, 4), Config(32, 1, 3, 8), Config(32, 2, 3, 4), Config(32, 2, 3, 4))


def has_async_products(config: Config) -> bool:
    """Whether products may be compiled to `wgmma`: 64 rows, by a group of four warps.

    The assembler of CUDA 12.8, which Triton 3.6 and 3.7 bring, made wrong code of some on an H200, and
    that of CUDA 13.0 right code of the same: docs/notes.md. So nothing here is launched like that.
    """
    return config.block >= 64 and config.warps >= 4


class Sizes(NamedTuple):
    """What a choice depends on."""

    rows: int
    """Heads of all samples."""
    tokens: int
    dim: int
    value_dim: int
    support: int
    """0 where tokens are projections already."""
    bits: int
    dtype: torch.dtype
    features: int = 0
    """Rows of a state of groups of bits; 0 for the paper's affinity."""

    @property
    def bulk(self) -> int:
        """Bytes of a token on the chip, roughly: anything but bf16 is widened there."""
        widths = (self.dim, self.value_dim, self.support, self.features or self.bits)
        return sum(padded(width) for width in widths if width) * (2 if self.dtype == torch.bfloat16 else 4)


_trials: dict[Step, Config] = {}
_reduced: dict[tuple[Step, Sizes], Config] = {}


def choose(step: Step, sizes: Sizes) -> Config:
    """The configuration of a `trial`, or a reduced one, or the default."""
    if step in _trials:
        return _trials[step]
    if (step, sizes) in _reduced:
        return _reduced[step, sizes]
    return default(step, sizes)


def reduce(step: Step, sizes: Sizes, config: Config) -> Config | None:
    """Use a smaller configuration from now on, for lack of memory on the chip; None if there is none."""
    if config.stages > 1:
        smaller = config._replace(stages=1)
    elif step == "token_grad" and config.per_sm < ONE_TILE:
        smaller = config._replace(per_sm=ONE_TILE)
    elif config.block > 16:
        smaller = config._replace(block=config.block // 2)
    else:
        return None
    if step in _trials:
        _trials[step] = smaller
    else:
        _reduced[step, sizes] = smaller
    plans.forget()
    return smaller


def default(step: Step, sizes: Sizes) -> Config:
    """What was fastest on an H200: one or two warps a program; more for wide tokens, with smaller tiles."""
    if sizes.features:
        return _grouped(step, sizes)
    many = sizes.rows * sizes.tokens >= MANY
    short = sizes.tokens <= (SHORTEST if sizes.rows < FEW else SHORT)
    if sizes.bulk > LIGHT:
        config = Config(32, 4, 1, 8) if sizes.bulk <= HEAVY else Config(16, 8, 1, 8)
        config = config._replace(per_sm=ONE_TILE) if step == "token_grad" else config
    elif short and step in ("gather", "gather_grad"):
        config = Config(32, 1, 3, 0) if step == "gather" and many else Config(64, 2, 1, 0)
    elif step == "gather":
        # As many programs as fit at once by their registers: one more round takes as long as the first.
        config = Config(16, 1, 3, 10 if sizes.dim <= 32 else 8)
    elif step == "read":
        config = Config(64 if sizes.value_dim <= 32 else 32, 1, 1, 8)
    elif step == "gather_grad":
        config = Config(32, 1, 3, 8)
    else:
        config = Config(64 if sizes.dim > 32 and many else 32, 2, 2, 16)
    return config._replace(block=min(config.block, padded(sizes.tokens)))


def _grouped(step: Step, sizes: Sizes) -> Config:
    """The same for groups of bits, with as many programs as fit at once by their registers."""
    short = sizes.tokens <= (SHORTEST if sizes.rows < FEW else SHORT)
    narrow = max(sizes.dim, sizes.value_dim) <= 32
    if sizes.bulk > LIGHT_GROUPS:
        config = Config(32, 4, 1, 4) if sizes.bulk <= HEAVY else Config(16, 8, 1, 4)
        config = config._replace(per_sm=ONE_TILE) if step == "token_grad" else config
    elif not sizes.support:
        steps = _NARROW_SIGNS if narrow else _WIDE_SIGNS
        config = steps[STEPS.index(step)]
    elif short and step in ("gather", "gather_grad"):
        config = Config(32, 2, 2 if step == "gather" else 1, 0)
    elif step == "gather":
        config = Config(32, 1, 3, 7) if narrow else Config(32, 2, 2, 4)
    elif step == "read":
        config = Config(32, 1, 1, 8)
    elif step == "gather_grad":
        config = Config(32, 1, 3, 7) if narrow else Config(32, 2, 2, 4)
    else:
        config = Config(32, 2, 2, 3) if narrow else Config(32, 2, 1, 4)
    return config._replace(block=min(config.block, padded(sizes.tokens)))


def causal_config(sizes: Sizes, light: bool = False) -> Config:
    """For kernels in causal order; block and stride decide the shape of what the backward gets.

    A state of groups is four times as large as one of bits, and has a stretch four times as long. `light`:
    for a kernel that needs few registers, thus one warp.
    """
    if sizes.features:
        narrow = max(sizes.dim, sizes.value_dim) <= 32 and sizes.dtype == torch.bfloat16
        warps = 4 if sizes.bulk > LIGHT_GROUPS else 1 if light and narrow else 2
        return Config(32, warps, 1, 0, 8)
    if sizes.bulk <= LIGHT:
        return Config(64, 2, 1, 0)
    return Config(32, 4, 1, 0) if sizes.bulk <= HEAVY else Config(16, 8, 1, 0)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A CUDA device's compute capability."""
    return torch.cuda.get_device_capability(device)


@contextmanager
def trial(**configs: Config) -> Iterator[None]:
    """Use these configurations, by step."""
    before = dict(_trials)
    _trials.update(configs)  # type: ignore[arg-type]
    plans.forget()
    try:
        yield
    finally:
        _trials.clear()
        _trials.update(before)
        plans.forget()
