"""Direct exchange: every rank is the parameter server of its 1/p of the vector.

Source: BML paper, section 2 ("P2P" parameter server). MPI literature calls it the linear or spread-out algorithm.

Steps: a push and a pull, each with p-1 rounds, which are all in flight at once. Push: in round i (1..p-1) rank r sends
chunk r+i to rank r+i, and adds the chunk r that rank r-i sends. Pull: in round i rank r sends its finished chunk r to
rank r+i and receives chunk r-i. All numbers are mod p.
A server adds the chunks that it receives in the order of the ranks (`model.in_rank_order`), so an element's bits do not
depend on the server that sums it.

p = 3, (partner, chunk) sent in each round:

    rank 0:  (1,1) (2,2) | (1,0) (2,0)
    rank 1:  (2,2) (0,0) | (2,1) (0,1)
    rank 2:  (0,0) (1,1) | (0,2) (1,2)

Cost, allreduce: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, in 2 steps. A rank sends as many messages and bytes
as in the ring, but waits only twice, and receives from p-1 ranks at the same time.
Limits: any p. Memory: p-1 chunks, (p-1)/p n, to receive the chunks before they are added.

alltoall is a push without sums: in round i rank r sends block r+i and receives block r-i.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpips.collectives.schedule.model import (
    Index,
    Lane,
    Round,
    Schedule,
    ScheduleStep,
    Stage,
    Steps,
    chunks_at,
    in_series,
)


def reduce_scatter(p: int, rank: Index) -> Steps:
    """Sum the vectors: chunk r of the sum ends up on rank r."""
    yield ScheduleStep(p - 1, partial(_push, p, rank))


def allgather(p: int, rank: Index) -> Steps:
    """Send chunk r of rank r to all ranks."""
    yield ScheduleStep(p - 1, partial(_pull, p, rank))


def alltoall(p: int, rank: Index) -> Steps:
    """Move block d of the input of rank r to block r of the output of rank d, for all r and d."""
    yield ScheduleStep(p - 1, partial(_swap, p, rank))


def _push(p: int, rank: Index, i: int) -> Round:
    target, source = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(target, chunks_at(target), source, chunks_at(rank), add=True)


def _pull(p: int, rank: Index, i: int) -> Round:
    target, source = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(target, chunks_at(rank), source, chunks_at(source), add=False)


def _swap(p: int, rank: Index, i: int) -> Round:
    target, source = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(target, chunks_at(target), source, chunks_at(source), add=False)


STAGES: dict[str, Callable[[int], Stage]] = {
    "reduce_scatter": lambda p: partial(reduce_scatter, p),
    "allgather": lambda p: partial(allgather, p),
    "allreduce": lambda p: in_series(partial(reduce_scatter, p), partial(allgather, p)),
    "alltoall": lambda p: partial(alltoall, p),
}
KINDS = tuple(STAGES)


def build(kind: str, p: int) -> Schedule:
    """Build allreduce, reduce_scatter, allgather or alltoall by direct exchange between p ranks."""
    return Schedule(kind, "direct", p, (Lane(p, STAGES[kind](p)),))
