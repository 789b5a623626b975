"""Binomial trees: one vector to all or from all in ceil(log2 p) steps, and its pieces to or from each.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

Steps, ranks counted from the root: in the broadcast the distance d is the largest power of two below p, then d/2,
..., 1; each rank that is a multiple of 2d sends all to the rank d further on. The reduce is the same tree backwards,
with sums. The far ones first, so that the last steps, which have the most messages, stay among neighbours, and so
that the ranks below a rank are an interval. allreduce is the reduce, then the broadcast.

p = 6, broadcast:   0>4    0>2 (4>6: not there)    0>1 2>3 4>5

`scatter` gives rank r chunk r, down the same tree, each message being the chunks of the receiver's part of it;
`gather` is its reverse. With an allgather or a reduce-scatter they make a broadcast or a reduce of long vectors
(`ring`).

Cost, m = ceil(log2 p): broadcast m alpha + m n beta; reduce the same + m n gamma; allreduce both.
scatter, gather: m alpha + (p-1)/p n beta.
Limits: any p, any root. Memory: reduce one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpips.collectives.schedule.model import (
    NOBODY,
    Index,
    Interval,
    Lane,
    Round,
    Schedule,
    Stage,
    Steps,
    one,
    series,
    single,
    where,
)


def broadcast(p: int, rank: Index) -> Steps:
    """Rank 0's one chunk goes to all."""
    for distance in reversed(_distances(p)):
        child, parent = _tree(p, rank, distance)
        yield single(Round(child, one(0), parent, one(0), add=False))


def reduce(p: int, rank: Index) -> Steps:
    """All ranks' one chunk is summed on rank 0."""
    for distance in _distances(p):
        child, parent = _tree(p, rank, distance)
        yield single(Round(parent, one(0), child, one(0), add=True))


def scatter(p: int, rank: Index) -> Steps:
    """Chunk r goes from rank 0 to rank r."""
    for distance in reversed(_distances(p)):
        child, parent = _tree(p, rank, distance)
        yield single(Round(child, _part(p, rank + distance, distance), parent, _part(p, rank, distance), add=False))


def gather(p: int, rank: Index) -> Steps:
    """Chunk r goes from rank r to rank 0."""
    for distance in _distances(p):
        child, parent = _tree(p, rank, distance)
        yield single(Round(parent, _part(p, rank, distance), child, _part(p, rank + distance, distance), add=False))


def _distances(p: int) -> list[int]:
    return [1 << level for level in range((p - 1).bit_length())]


def _tree(p: int, rank: Index, distance: int) -> tuple[Index, Index]:
    """The child and the parent that a rank has at this distance, or NOBODY."""
    place = rank % (2 * distance)
    child = where((place == 0) & (rank + distance < p), rank + distance, NOBODY)
    return child, where(place == distance, rank - distance, NOBODY)


def _part(p: int, rank: Index, distance: int) -> Interval:
    """The ranks below `rank` in the tree, itself included."""
    return Interval(rank, where(rank + distance < p, rank + distance, p))


STAGES: dict[str, Callable[[int], Stage]] = {
    "broadcast": lambda p: partial(broadcast, p),
    "reduce": lambda p: partial(reduce, p),
    "allreduce": lambda p: series(partial(reduce, p), partial(broadcast, p)),
}
KINDS = tuple(STAGES)


def build(kind: str, p: int, root: int = 0) -> Schedule:
    """broadcast or reduce from or to `root`, or allreduce, over any p."""
    return Schedule(kind, "binomial", p, (Lane(1, STAGES[kind](p)),), root)
