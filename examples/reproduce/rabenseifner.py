"""Rabenseifner's allreduce as MPIs run it: over any p, by a fold to the next power of two below. Pure.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004). For p = 2^m it is the catalogue's
`halving_doubling`, which needs no fold for other p: this is a rival, to be predicted only. Of the first 2(p - 2^m)
ranks every second one stands by while the others halve and double, and is given the result. Two ways to fold:

    halves  (Open MPI)  a pair exchanges halves, both add; the one that will stand by sends its sum. The odd ones do.
    whole   (MPICH)     the one that will stand by sends its vector. The even ones do.
"""

from __future__ import annotations

from functools import partial

from collectives.schedule import bcube
from collectives.schedule.model import (
    NOBODY,
    Index,
    Interval,
    Lane,
    Round,
    Schedule,
    Stage,
    Steps,
    folded,
    series,
    single,
    where,
    within,
)
from collectives.schedule.recursive_doubling import levels_of

FOLDS = ("halves", "whole")


def build(p: int, fold: str) -> Schedule:
    """The allreduce over p ranks; `fold` is one of `FOLDS`."""
    levels = levels_of(p)
    radices, order, q = (2,) * levels, tuple(range(levels)), 1 << levels
    core = series(partial(bcube.reduce_scatter, radices, order), partial(bcube.allgather, radices, order))
    if p == q:
        stage = core
    elif fold == "whole":
        stage = folded(core, p, q, q)
    else:
        stage = partial(_by_halves, core, p - q, q)
    return Schedule("allreduce", f"rabenseifner, fold by {fold}", p, (Lane(q, stage),))


def _by_halves(core: Stage, extra: int, chunks: int, rank: Index) -> Steps:
    low, high, whole = Interval(0, chunks // 2), Interval(chunks // 2, chunks), Interval(0, chunks)
    paired = rank < 2 * extra
    active, retired = paired & (rank % 2 == 0), paired & (rank % 2 == 1)
    to_active, to_retired = where(retired, rank - 1, NOBODY), where(active, rank + 1, NOBODY)
    partner = where(active, rank + 1, to_active)
    yield single(Round(partner, _either(active, high, low), partner, _either(active, low, high), add=True))
    yield single(Round(to_active, high, to_retired, high, add=False))
    member = where(paired, rank // 2, rank - extra)
    for step in within(core, member, lambda m: where(m < extra, 2 * m, m + extra)):
        yield step.map(partial(_standing_by, retired))
    yield single(Round(to_retired, whole, to_active, whole, add=False))


def _either(condition: Index, a: Interval, b: Interval) -> Interval:
    return Interval(where(condition, a.start, b.start), where(condition, a.stop, b.stop))


def _standing_by(retired: Index, r: Round) -> Round:
    to, come = where(retired, NOBODY, r.send_to), where(retired, NOBODY, r.receive_from)
    return r._replace(send_to=to, receive_from=come)
