"""Rabenseifner's allreduce as MPI libraries run it: any p is folded to the next lower power of two. Pure.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004). This is a rival, whose time is only
predicted. For p = 2^m it is the catalogue's `halving_doubling`, which needs no fold for other p.

The first 2(p - 2^m) ranks form pairs. One rank of each pair is passive: it hands over its vector, does nothing while
the other ranks halve and double, and receives the result. There are two ways to fold a pair:

    halves  (Open MPI)  The ranks exchange halves, and each adds its half. The passive rank sends its sum. It is the
                        odd rank.
    whole   (MPICH)     The passive rank sends its vector. It is the even rank.
"""

from __future__ import annotations

from functools import partial

from collectives.schedule import bcube
from collectives.schedule.model import (
    NOBODY,
    ChunkInterval,
    Index,
    Lane,
    Round,
    Schedule,
    Stage,
    Steps,
    folded,
    in_group,
    in_series,
    one_round,
    where,
)
from collectives.schedule.recursive_doubling import levels_of

FOLDS = ("halves", "whole")


def build(p: int, fold: str) -> Schedule:
    """Return the schedule over p ranks. `fold` is one of `FOLDS`."""
    levels = levels_of(p)
    radices, order, q = (2,) * levels, tuple(range(levels)), 1 << levels
    core = in_series(partial(bcube.reduce_scatter, radices, order), partial(bcube.allgather, radices, order))
    if p == q:
        stage = core
    elif fold == "whole":
        stage = folded(core, p, q, q)
    else:
        stage = partial(_by_halves, core, p - q, q)
    return Schedule("allreduce", f"rabenseifner, fold by {fold}", p, (Lane(q, stage),))


def _by_halves(core: Stage, extra: int, chunks: int, rank: Index) -> Steps:
    low, high, whole = ChunkInterval(0, chunks // 2), ChunkInterval(chunks // 2, chunks), ChunkInterval(0, chunks)
    paired = rank < 2 * extra
    active, retired = paired & (rank % 2 == 0), paired & (rank % 2 == 1)
    to_active, to_retired = where(retired, rank - 1, NOBODY), where(active, rank + 1, NOBODY)
    partner = where(active, rank + 1, to_active)
    yield one_round(Round(partner, _either(active, high, low), partner, _either(active, low, high), add=True))
    yield one_round(Round(to_active, high, to_retired, high, add=False))
    member = where(paired, rank // 2, rank - extra)
    for step in in_group(core, member, lambda m: where(m < extra, 2 * m, m + extra)):
        yield step.map(partial(_standing_by, retired))
    yield one_round(Round(to_retired, whole, to_active, whole, add=False))


def _either(condition: Index, a: ChunkInterval, b: ChunkInterval) -> ChunkInterval:
    return ChunkInterval(where(condition, a.start, b.start), where(condition, a.stop, b.stop))


def _standing_by(retired: Index, r: Round) -> Round:
    to, come = where(retired, NOBODY, r.send_to), where(retired, NOBODY, r.receive_from)
    return r._replace(send_to=to, receive_from=come)
