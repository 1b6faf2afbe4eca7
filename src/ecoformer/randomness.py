"""Where random draws come from."""

from __future__ import annotations

import torch


def seeded(seed: int | None) -> torch.Generator:
    """A CPU generator: of `seed`, or following `torch.manual_seed` if that is None."""
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    return torch.Generator("cpu").manual_seed(seed)


def forked() -> torch.Generator:
    """A CPU generator that follows `torch.manual_seed` and leaves the global random state as it is."""
    with torch.random.fork_rng(devices=[]):
        return seeded(None)
