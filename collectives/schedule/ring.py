"""Ring, also called the bucket algorithm: each rank passes chunks to its right. It has the fewest bytes and most steps.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); MXNET-MPI
paper, section 6.2.

Steps: the vector has p chunks; every rank sends to its right and receives from its left. In step s of the
reduce-scatter (s = 0..p-2) rank r sends chunk r-s-1 and adds the message to its chunk r-s-2, both mod p. So after the
last step chunk r of rank r has the whole sum. In step s of the allgather rank r sends chunk r-s and overwrites chunk
r-s-1.

p = 3, the chunk sent in each step:

    rank 0:  2  1 |  0  2
    rank 1:  0  2 |  1  0
    rank 2:  1  0 |  2  1

A broadcast of a long vector is a binomial scatter and then the ring's allgather (van de Geijn); a reduce is the ring's
reduce-scatter and then a binomial gather.

Cost, allreduce: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma; reduce_scatter and allgather each cost half of alpha
and beta. broadcast, m = ceil(log2 p): (m + p-1) alpha + 2(p-1)/p n beta; reduce costs (p-1)/p n gamma more.
Limits: any p. Memory: one chunk, n/p, to receive a chunk before it is added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Round, Schedule, Stage, Steps, chunks_at, in_series, one_round


def reduce_scatter(p: int, rank: Index) -> Steps:
    """Sum the vectors: chunk r of the sum ends up on rank r."""
    for s in range(p - 1):
        yield one_round(_shift(p, rank, send=(rank - s - 1) % p, receive=(rank - s - 2) % p, add=True))


def allgather(p: int, rank: Index) -> Steps:
    """Send chunk r of rank r to all ranks."""
    for s in range(p - 1):
        yield one_round(_shift(p, rank, send=(rank - s) % p, receive=(rank - s - 1) % p, add=False))


def _shift(p: int, rank: Index, send: Index, receive: Index, add: bool) -> Round:
    return Round((rank + 1) % p, chunks_at(send), (rank - 1) % p, chunks_at(receive), add)


KINDS = ("reduce_scatter", "allgather", "allreduce", "broadcast", "reduce")


def build(kind: str, p: int, root: int = 0, tree: Callable[[int, Index], Steps] | None = None) -> Schedule:
    """Build any of `KINDS` over a ring of p ranks.

    broadcast needs `binomial.scatter` as `tree`, and begins with it. reduce needs `binomial.gather`, and ends with it.
    """
    stages: list[Stage] = []
    if kind == "broadcast" and tree:
        stages = [partial(tree, p)]
    if kind in ("reduce_scatter", "allreduce", "reduce"):
        stages.append(partial(reduce_scatter, p))
    if kind in ("allgather", "allreduce", "broadcast"):
        stages.append(partial(allgather, p))
    if kind == "reduce" and tree:
        stages.append(partial(tree, p))
    return Schedule(kind, "ring", p, (Lane(p, in_series(*stages)),), root)
