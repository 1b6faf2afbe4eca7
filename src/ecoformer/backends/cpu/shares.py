"""How threads share a call's work."""

from __future__ import annotations

from typing import Any

from ecoformer.backends.cpu.compiler import inlined
from ecoformer.backends.cpu.problem import FINISHED, GATHER, SCATTER, TAKEN, Team
from ecoformer.backends.cpu.vectors import claim, current, give_way

_PATIENCE = 4096
"""Turns of waiting after which others may have the core: some microseconds."""


@inlined
def take_share(numbers: Any, team: Team) -> tuple[int, int, int]:
    """A job and which parts of it to do; -1 for no job. Waits for the first of two passes."""
    job, share = team.job, claim(numbers, TAKEN)
    if share >= team.shares:
        if team.job != GATHER or share >= 2 * team.shares:
            return -1, 0, 0
        job, share = SCATTER, share - team.shares
        # Whoever holds a share of the first pass is at work on it, or would be if it had a core.
        turns = 0
        while current(numbers, FINISHED) < team.shares:
            turns += 1
            if turns > _PATIENCE:
                give_way()
    return job, share * team.parts // team.shares, (share + 1) * team.parts // team.shares
