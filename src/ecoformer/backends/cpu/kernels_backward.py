"""What threads call in a backward: shares of all heads, or of parts of heads, until none is left."""

from __future__ import annotations

from typing import Any

from ecoformer.backends.cpu.causal_gradients import causal_gradients
from ecoformer.backends.cpu.compiler import callback, digest_of_sources, inlined, to_fixed_tuple
from ecoformer.backends.cpu.gradients import key_gradients, query_gradients
from ecoformer.backends.cpu.hashing_backward import prepare_backward
from ecoformer.backends.cpu.kernels import worker
from ecoformer.backends.cpu.problem import (
    CAUSAL,
    GATHER,
    GRADIENTS_SIZE,
    MEMBERS,
    SCATTER,
    Gradients,
    Worker,
)
from ecoformer.backends.cpu.shares import shares, team_at
from ecoformer.backends.cpu.sums import merge, save
from ecoformer.backends.cpu.vectors import claim, integers


@inlined
def _run(job: int, first: int, last: int, w: Worker, g: Gradients) -> None:
    """Parts `first` to `last`; those of a head in all samples follow each other."""
    p, at = w.p, w.at
    ready = -1
    for unit in range(first, last):
        group, piece = unit // p.pieces, unit % p.pieces
        head, batch = group // p.batch, group % p.batch
        if head != ready:
            prepare_backward(w, head)
            ready = head
        if job == CAUSAL:
            causal_gradients(w, g, unit, batch, head)
            continue
        if job != SCATTER:
            begin, end = piece * p.queries // p.pieces, (piece + 1) * p.queries // p.pieces
            query_gradients(w, g, unit, batch, head, begin, end)
            save(w, at.grads, at.grad_tallies, p.sums, p.tallies, unit)
        if job != GATHER:
            begin, end = piece * p.keys // p.pieces, (piece + 1) * p.keys // p.pieces
            merge(w, p.sums, p.tallies, group * p.pieces, (group + 1) * p.pieces)
            key_gradients(w, g, unit, batch, head, begin, end)


def _entry(digest: int) -> Any:
    """numba compiles anew when this file changes or what a function closes over, but not for other files."""

    @callback
    def work(data: Any) -> None:
        """What every thread of a team calls with the same `Team`: it takes shares until none is left."""
        if digest == 0:
            return
        numbers, team = team_at(data)
        w = worker(team.scratch + claim(numbers, MEMBERS) * team.size, team.problem, team.layout)
        g = Gradients(*to_fixed_tuple(integers(team.gradients), GRADIENTS_SIZE))
        for job, first, last in shares(numbers, team):
            _run(job, first, last, w, g)

    return work


work: Any = _entry(digest_of_sources())
