"""Direct exchange: every rank is the parameter server of its 1/p of the vector.

Source: BML paper, section 2 ("P2P" parameter server); MPI texts call it the linear or spread-out algorithm.

Steps: two, of p-1 rounds each, all in flight at once. Push: in round i (1..p-1) rank r sends chunk r+i to rank r+i and
adds what rank r-i sends of chunk r. Pull: in round i it sends its finished chunk r to rank r+i and copies chunk r-i.
A server adds what comes in the order of the ranks (`model.in_rank_order`), so an element's bits do not depend on
which server has it.

p = 3, (partner, chunk) that is sent in each round:

    rank 0:  (1,1) (2,2) | (1,0) (2,0)
    rank 1:  (2,2) (0,0) | (2,1) (0,1)
    rank 2:  (0,0) (1,1) | (0,2) (1,2)

Cost, allreduce: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, in 2 steps: as the ring in messages and bytes, but
only two waits, and p-1 flows at a time into each server.
Limits: any p. Memory: p-1 chunks, (p-1)/p n, for what is to be added.

alltoall is the same exchange without a sum: in round i rank r sends block r+i and receives block r-i.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Round, Schedule, Stage, Step, Steps, one, series


def reduce_scatter(p: int, rank: Index) -> Steps:
    """Chunk r is complete on rank r."""
    yield Step(p - 1, partial(_push, p, rank))


def allgather(p: int, rank: Index) -> Steps:
    """Chunk r goes from rank r to everybody."""
    yield Step(p - 1, partial(_pull, p, rank))


def alltoall(p: int, rank: Index) -> Steps:
    """Block d of rank r's input becomes block r of rank d's output."""
    yield Step(p - 1, partial(_swap, p, rank))


def _push(p: int, rank: Index, i: int) -> Round:
    to, come = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(to, one(to), come, one(rank), add=True)


def _pull(p: int, rank: Index, i: int) -> Round:
    to, come = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(to, one(rank), come, one(come), add=False)


def _swap(p: int, rank: Index, i: int) -> Round:
    to, come = (rank + i + 1) % p, (rank - i - 1) % p
    return Round(to, one(to), come, one(come), add=False)


STAGES: dict[str, Callable[[int], Stage]] = {
    "reduce_scatter": lambda p: partial(reduce_scatter, p),
    "allgather": lambda p: partial(allgather, p),
    "allreduce": lambda p: series(partial(reduce_scatter, p), partial(allgather, p)),
    "alltoall": lambda p: partial(alltoall, p),
}
KINDS = tuple(STAGES)


def build(kind: str, p: int) -> Schedule:
    """allreduce, reduce_scatter, allgather or alltoall by direct exchange between p ranks."""
    return Schedule(kind, "direct", p, (Lane(p, STAGES[kind](p)),))
