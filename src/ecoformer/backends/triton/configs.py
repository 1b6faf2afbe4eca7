"""How kernels are launched: block sizes by default, or what `tune` measured, kept in the user's cache folder.

Nothing is measured at import or in a call. `python -m ecoformer.backends.triton.tuning` does it once and writes
a small JSON file, by device, Triton version and class of shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

Step = Literal["gather", "read", "gather_grad", "token_grad"]
STEPS: tuple[Step, ...] = ("gather", "read", "gather_grad", "token_grad")

SHORT = 512
"""Tokens up to which one program does a whole head: one launch instead of two."""


class Config(NamedTuple):
    """How one kernel is launched."""

    block: int
    """Tokens of a tile."""
    warps: int
    stages: int
    """Depth of the loads' pipeline."""
    per_sm: int
    """Programs for each multiprocessor; 0 lets one program do a whole head, in one launch for both passes."""


class Sizes(NamedTuple):
    """What a choice hangs on."""

    rows: int
    """Heads of all samples."""
    tokens: int
    dim: int
    value_dim: int
    support: int
    bits: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Its class: rows and tokens by powers of two."""
        dtype = str(self.dtype).removeprefix("torch.")
        rows, tokens = (1 << (x - 1).bit_length() for x in (self.rows, self.tokens))
        return f"{dtype} r{rows} n{tokens} d{self.dim} e{self.value_dim} m{self.support} b{self.bits}"


_trials: dict[Step, Config] = {}


def choose(step: Step, sizes: Sizes, device: torch.device) -> Config:
    """The configuration on trial, else the measured one, else the default."""
    if step in _trials:
        return _trials[step]
    if device.type == "cuda":
        found = measured().get(device_key(device), {}).get(sizes.key, {}).get(step)
        if found is not None:
            return Config(*found)
    return default(step, sizes)


def default(step: Step, sizes: Sizes) -> Config:
    """Tiles of about 8K numbers, several programs on every multiprocessor; whole heads if they are short."""
    wide = max(sizes.dim, sizes.value_dim, sizes.support)
    block = 128 if wide <= 64 else 64
    if step == "token_grad":
        block = 64
    alone = sizes.tokens <= SHORT
    if alone:
        block = min(block, max(16, triton.next_power_of_2(sizes.tokens)))
    return Config(block, 4, 2, 0 if alone and step in ("gather", "gather_grad") else 8)


def causal_block(sizes: Sizes) -> int:
    """Tokens of a causal block. Not measured: it decides the shape of what the backward is handed."""
    return 128 if max(sizes.dim, sizes.value_dim) <= 64 and sizes.bits <= 32 else 64


@contextmanager
def trial(**configs: Config) -> Iterator[None]:
    """Use these configurations, by step, whatever was measured."""
    before = dict(_trials)
    _trials.update(configs)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _trials.clear()
        _trials.update(before)


def cache_file() -> Path:
    """Where measurements are kept: ECOFORMER_CACHE, or the user's cache folder."""
    own = os.environ.get("ECOFORMER_CACHE")
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecoformer"
    return (Path(own) if own else shared) / "triton.json"


@cache
def device_key(device: torch.device) -> str:
    """A device's name and Triton's version: what was measured elsewhere does not count."""
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


@cache
def measured() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Configurations by device, class of sizes and step; a file that cannot be read counts as empty."""
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(sizes: Sizes, device: torch.device, configs: dict[Step, Config]) -> Path:
    """Add measured configurations to the file, which is replaced as a whole."""
    table = measured()
    entry = table.setdefault(device_key(device), {}).setdefault(sizes.key, {})
    entry.update({step: list(config) for step, config in configs.items()})
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True))
    temporary.replace(path)
    return path


def sizes_of(x: Tensor, v: Tensor, support: Tensor, bits: int) -> Sizes:
    """Sizes of tokens (B, H, N, D) with values (B, H, ., E)."""
    return Sizes(
        x.shape[0] * x.shape[1], x.shape[2], x.shape[3], v.shape[3], support.shape[1], bits, v.dtype
    )
