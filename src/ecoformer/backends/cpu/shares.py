"""How threads share a call's work."""

from __future__ import annotations

from typing import Any

from ecoformer.backends.cpu.compiler import carray, compiled, inlined, to_fixed_tuple
from ecoformer.backends.cpu.problem import FINISHED, GATHER, SCATTER, TAKEN, TEAM_SIZE, Team
from ecoformer.backends.cpu.vectors import claim, current, give_way

_PATIENCE = 4096
"""Turns of waiting after which others may have the core: some microseconds."""


@inlined
def team_at(data: Any) -> Any:
    """The numbers that threads share, in which they count, and the same as a `Team`."""
    numbers = carray(data, (TEAM_SIZE,))
    return numbers, Team(*to_fixed_tuple(numbers, TEAM_SIZE))


@compiled
def shares(numbers: Any, team: Team) -> Any:
    """Jobs and which parts of them to do until none is left; the second of two passes waits for the first."""
    while True:
        job, share = team.job, claim(numbers, TAKEN)
        if share >= team.shares:
            if team.job != GATHER or share >= 2 * team.shares:
                return
            job, share = SCATTER, share - team.shares
            # Whoever holds a share of the first pass is at work on it, or would be if it had a core.
            turns = 0
            while current(numbers, FINISHED) < team.shares:
                turns += 1
                if turns > _PATIENCE:
                    give_way()
        yield job, share * team.parts // team.shares, (share + 1) * team.parts // team.shares
        claim(numbers, FINISHED)
