"""Binomial trees: broadcast, reduce, scatter and gather of one vector in ceil(log2 p) steps.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

Steps, with ranks counted from the root: in the broadcast the distance d is first the largest power of two below p, then
half of it, and so on down to 1. Each rank that is a multiple of 2d sends the vector to the rank d further on. The
reduce sends along the same tree in the other direction, and adds. The largest distance comes first for two reasons: the
last steps, which have the most messages, stay among neighbours, and the ranks below any rank of the tree are an
interval. allreduce is a reduce and then a broadcast.

p = 6, broadcast; a>b is a message:   0>4    0>2 (rank 4 sends nothing, as rank 6 does not exist)    0>1 2>3 4>5

`scatter` brings chunk r to rank r, down the same tree: each message has the chunks of the receiver and of all ranks
below the receiver. `gather` is the reverse of `scatter`. A broadcast of a long vector is a scatter and an allgather; a
reduce of a long vector is a reduce-scatter and a gather (`ring`).

Cost, m = ceil(log2 p): broadcast m alpha + m n beta; reduce m alpha + m n beta + m n gamma; allreduce the sum of these.
scatter, gather: m alpha + (p-1)/p n beta.
Limits: any p, any root. Memory: reduce and allreduce take one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpips.collectives.schedule.model import (
    NOBODY,
    ChunkInterval,
    Index,
    Lane,
    Round,
    Schedule,
    Stage,
    Steps,
    chunks_at,
    in_series,
    one_round,
    where,
)


def broadcast(p: int, rank: Index) -> Steps:
    """Send the single chunk of rank 0 to all ranks."""
    for distance in reversed(_distances(p)):
        child, parent = _tree(p, rank, distance)
        yield one_round(Round(child, chunks_at(0), parent, chunks_at(0), add=False))


def reduce(p: int, rank: Index) -> Steps:
    """Sum the single chunk of all ranks on rank 0."""
    for distance in _distances(p):
        child, parent = _tree(p, rank, distance)
        yield one_round(Round(parent, chunks_at(0), child, chunks_at(0), add=True))


def scatter(p: int, rank: Index) -> Steps:
    """Send chunk r from rank 0 to rank r."""
    for distance in reversed(_distances(p)):
        child, parent = _tree(p, rank, distance)
        yield one_round(Round(child, _part(p, rank + distance, distance), parent, _part(p, rank, distance), add=False))


def gather(p: int, rank: Index) -> Steps:
    """Send chunk r from rank r to rank 0."""
    for distance in _distances(p):
        child, parent = _tree(p, rank, distance)
        yield one_round(Round(parent, _part(p, rank, distance), child, _part(p, rank + distance, distance), add=False))


def _distances(p: int) -> list[int]:
    return [1 << level for level in range((p - 1).bit_length())]


def _tree(p: int, rank: Index, distance: int) -> tuple[Index, Index]:
    """Return the child and the parent of a rank at this distance. Each is NOBODY if the rank has none."""
    place = rank % (2 * distance)
    child = where((place == 0) & (rank + distance < p), rank + distance, NOBODY)
    return child, where(place == distance, rank - distance, NOBODY)


def _part(p: int, rank: Index, distance: int) -> ChunkInterval:
    """Return the chunks of a rank and of all ranks below it in the tree, which are one interval."""
    return ChunkInterval(rank, where(rank + distance < p, rank + distance, p))


STAGES: dict[str, Callable[[int], Stage]] = {
    "broadcast": lambda p: partial(broadcast, p),
    "reduce": lambda p: partial(reduce, p),
    "allreduce": lambda p: in_series(partial(reduce, p), partial(broadcast, p)),
}
KINDS = tuple(STAGES)


def build(kind: str, p: int, root: int = 0) -> Schedule:
    """Build a broadcast from `root`, a reduce to `root`, or an allreduce, over any p."""
    return Schedule(kind, "binomial", p, (Lane(1, STAGES[kind](p)),), root)
