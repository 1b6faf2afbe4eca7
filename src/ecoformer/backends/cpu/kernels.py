"""What threads call: shares of all heads, or of parts of heads, until none is left."""

from __future__ import annotations

from typing import Any

from ecoformer.backends.cpu.causal import causal_head
from ecoformer.backends.cpu.compiler import callback, carray, digest_of_sources, inlined, to_fixed_tuple
from ecoformer.backends.cpu.hashing import prepare
from ecoformer.backends.cpu.problem import (
    CAUSAL,
    FINISHED,
    GATHER,
    MEMBERS,
    PLACES_SIZE,
    PROBLEM_SIZE,
    SCATTER,
    TAKEN,
    TEAM_SIZE,
    Places,
    Problem,
    Team,
    padded,
    state_rows,
)
from ecoformer.backends.cpu.rows import add_row
from ecoformer.backends.cpu.sums import clear, gather, scatter, tabulate, total_weight
from ecoformer.backends.cpu.vectors import claim, current, doubles, floats, give_way, integers, octets

_padded = inlined(padded)
_state_rows = inlined(state_rows)
_PATIENCE = 4096
"""Turns of waiting after which others may have the core: some microseconds."""


@inlined
def _merge(p: Problem, at: Places, room: Any, exact: Any, group: int) -> None:
    """The sums of all parts of a head."""
    sums, tallies = floats(p.sums), doubles(p.tallies)
    rows = _state_rows(p.bits, p.group)
    size = rows * _padded(p.channels)
    clear(p, room, at.sums, exact, at.tallies)
    for part in range(group * p.pieces, (group + 1) * p.pieces):
        add_row(room, at.sums, sums, part * size, size)
        for i in range(rows + 1):
            exact[at.tallies + i] += tallies[part * (rows + 1) + i]


@inlined
def _run(job: int, first: int, last: int, address: int, problem: int, layout: int) -> None:
    """Parts `first` to `last`: sums over keys (GATHER), what queries read (SCATTER), or both (WHOLE).

    Heads with the same hash functions follow each other. Memory at `address` is the thread's own; `problem`
    and `layout` are the addresses of a `Problem` and its `Places`, of int64 each.
    """
    p = Problem(*to_fixed_tuple(integers(problem), PROBLEM_SIZE))
    at = Places(*to_fixed_tuple(integers(layout), PLACES_SIZE))
    own_integers = address + 4 * at.integers
    own_codes = own_integers + 8 * at.codes
    room, whole, exact = floats(address), integers(own_integers), doubles(own_integers)
    codes, nans = integers(own_codes), octets(own_codes + 8 * at.tokens)
    if p.codes:
        codes, nans = integers(p.codes), octets(p.codes + 8 * p.batch * p.heads * p.keys)
    sums, tallies, rows = room, exact, _state_rows(p.bits, p.group)
    if job == GATHER:
        sums, tallies = floats(p.sums), doubles(p.tallies)
    ready = -1
    for unit in range(first, last):
        group, piece = unit // p.pieces, unit % p.pieces
        head, batch = group // p.batch, group % p.batch
        if head != ready and not (job == SCATTER and p.codes):
            prepare(p, at, room, head)
            ready = head
        if job == CAUSAL:
            causal_head(p, at, room, exact, batch, head, codes, nans)
            continue
        to = group * p.keys if p.codes else 0
        sums0, tally = at.sums, at.tallies
        if job == GATHER:
            sums0, tally = unit * rows * _padded(p.channels), unit * (rows + 1)
        if job == SCATTER:
            _merge(p, at, room, exact, group)
        else:
            begin, end = piece * p.keys // p.pieces, (piece + 1) * p.keys // p.pieces
            clear(p, sums, sums0, tallies, tally)
            gather(p, at, room, exact, batch, head, begin, end, codes, nans, to, sums, sums0, tallies, tally)
        if job != GATHER:
            begin, end = piece * p.queries // p.pieces, (piece + 1) * p.queries // p.pieces
            total = total_weight(p, exact, at.tallies)
            tabulate(p, at, room, exact, head)
            scatter(p, at, room, exact, whole, batch, head, begin, end, codes, nans, to, total)


def _entry(digest: int) -> Any:
    """numba compiles anew when this file changes or what a function closes over, but not for other files."""

    @callback
    def work(data: Any) -> None:
        """What every thread of a team calls with the same `Team`: shares are taken until none is left."""
        if digest == 0:
            return
        numbers = carray(data, (TEAM_SIZE,))
        team = Team(*to_fixed_tuple(numbers, TEAM_SIZE))
        room = team.scratch + claim(numbers, MEMBERS) * team.size
        job, share = team.job, claim(numbers, TAKEN)
        while True:
            if share >= team.shares:
                if team.job != GATHER or share >= 2 * team.shares:
                    break
                job, share = SCATTER, share - team.shares
                # Whoever holds a share that is gathered is at work on it, or would be if it had a core.
                turns = 0
                while current(numbers, FINISHED) < team.shares:
                    turns += 1
                    if turns > _PATIENCE:
                        give_way()
            first, last = share * team.parts // team.shares, (share + 1) * team.parts // team.shares
            _run(job, first, last, room, team.problem, team.layout)
            claim(numbers, FINISHED)
            share = claim(numbers, TAKEN)

    return work


work: Any = _entry(digest_of_sources())
