"""Recursive doubling, for short vectors: the fewest steps, but each step sends the whole vector.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

Steps: for p = 2^m, in step s each rank exchanges its whole vector with the rank whose number differs in bit s, and
adds. For other p the ranks are first *folded* to the largest power 2^m below p: among the first 2(p - 2^m) ranks, each
even rank gives its vector to the next odd rank, waits, and gets the result at the end.

p = 3; a<>b is an exchange, a>b a one-way message:

    0>1 (add)    1<>2 (add)    1>0 (copy)

In an exchange, one side computes a+b and the other b+a, which have the same bits in IEEE arithmetic. So all ranks have
the same bits at the end.

Cost, p = 2^m: m alpha + m n beta + m n gamma. A fold adds 2 alpha + 2 n beta + n gamma.
Limits: any p. Memory: one vector.
"""

from __future__ import annotations

from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Round, Schedule, Steps, chunks_at, folded, one_round

KINDS = ("allreduce",)


def allreduce(levels: int, rank: Index) -> Steps:
    """Sum the single chunk of 2^levels ranks. All ranks get the sum."""
    for level in range(levels):
        partner = rank ^ (1 << level)
        yield one_round(Round(partner, chunks_at(0), partner, chunks_at(0), add=True))


def levels_of(p: int) -> int:
    """Return the largest m with 2^m <= p."""
    return p.bit_length() - 1


def build(kind: str, p: int) -> Schedule:
    """Build an allreduce over any p."""
    levels = levels_of(p)
    return Schedule(kind, "recursive_doubling", p, (Lane(1, folded(partial(allreduce, levels), p, 1 << levels, 1)),))
