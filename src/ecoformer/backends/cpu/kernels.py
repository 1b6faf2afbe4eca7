"""What threads call: shares of all heads, or of parts of heads, until none is left."""

from __future__ import annotations

from typing import Any

from ecoformer.backends.cpu.causal import causal_head
from ecoformer.backends.cpu.compiler import callback, digest_of_sources, inlined, to_fixed_tuple
from ecoformer.backends.cpu.hashing import prepare
from ecoformer.backends.cpu.problem import (
    CAUSAL,
    GATHER,
    LAYOUT_SIZE,
    MEMBERS,
    PROBLEM_SIZE,
    SCATTER,
    Layout,
    Problem,
    Worker,
)
from ecoformer.backends.cpu.shares import shares, team_at
from ecoformer.backends.cpu.sums import clear, gather, merge, save, scatter, tabulate, total_weight
from ecoformer.backends.cpu.vectors import claim, doubles, floats, integers, octets


@inlined
def worker(address: int, problem: int, layout: int) -> Any:
    """A thread with scratch memory at `address`; the others are addresses of a `Problem` and a `Layout`."""
    p = Problem(*to_fixed_tuple(integers(problem), PROBLEM_SIZE))
    at = Layout(*to_fixed_tuple(integers(layout), LAYOUT_SIZE))
    own = address + 4 * at.integers
    codes = own + 8 * at.codes
    nans = codes + 8 * at.tokens
    if p.codes:
        codes, nans = p.codes, p.codes + 8 * p.batch * p.heads * p.keys
    return Worker(p, at, floats(address), doubles(own), integers(own), integers(codes), octets(nans))


@inlined
def _run(job: int, first: int, last: int, w: Worker) -> None:
    """Parts `first` to `last`; those of a head in all samples follow each other."""
    p, at = w.p, w.at
    ready = -1
    for unit in range(first, last):
        group, piece = unit // p.pieces, unit % p.pieces
        head, batch = group // p.batch, group % p.batch
        if head != ready and not (job == SCATTER and p.k == 0):
            prepare(w, head)
            ready = head
        if job == CAUSAL:
            causal_head(w, batch, head)
            continue
        to = group * p.keys if p.codes else 0
        if job == SCATTER:
            merge(w, p.sums, p.tallies, group * p.pieces, (group + 1) * p.pieces)
        else:
            clear(w, at.sums, at.tallies)
            gather(w, batch, head, piece * p.keys // p.pieces, (piece + 1) * p.keys // p.pieces, to)
        if job == GATHER:
            save(w, at.sums, at.tallies, p.sums, p.tallies, unit)
            continue
        if p.kept_sums and piece == 0:
            save(w, at.sums, at.tallies, p.kept_sums, p.kept_tallies, group)
        total = total_weight(w)
        tabulate(w, head)
        scatter(w, batch, head, piece * p.queries // p.pieces, (piece + 1) * p.queries // p.pieces, to, total)


def _entry(digest: int) -> Any:
    """numba compiles anew when this file changes or what a function closes over, but not for other files."""

    @callback
    def work(data: Any) -> None:
        """What every thread of a team calls with the same `Team`: it takes shares until none is left."""
        if digest == 0:
            return
        numbers, team = team_at(data)
        w = worker(team.scratch + claim(numbers, MEMBERS) * team.size, team.problem, team.layout)
        for job, first, last in shares(numbers, team):
            _run(job, first, last, w)

    return work


work: Any = _entry(digest_of_sources())
