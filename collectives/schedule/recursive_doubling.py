"""Recursive doubling: the fewest steps, the whole vector in each; for short vectors.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

Steps: for p = 2^m, in step s everybody exchanges all it has with the rank whose number differs in bit s, and adds.
For other p the ranks are first folded to 2^m, the largest power below: of the first 2(p - 2^m) ranks each even one
gives its vector to its odd neighbour, stands by, and is given the result in the end.

p = 3, (partner), a>b for a one-way message:

    0>1 (add)    1<>2 (add)    1>0 (copy)

Both sides of an exchange add the same two vectors, a+b here and b+a there, which IEEE arithmetic makes the same bits;
by induction all ranks have the same bits after every step.

Cost: m alpha + m n beta + m n gamma, m = log2 p; for other p 2 alpha + 2 n beta + n gamma more.
Limits: any p. Memory: one vector.
"""

from __future__ import annotations

from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Round, Schedule, Steps, folded, one, single

KINDS = ("allreduce",)


def allreduce(levels: int, rank: Index) -> Steps:
    """Everybody's one chunk becomes the sum, over 2^levels ranks."""
    for level in range(levels):
        partner = rank ^ (1 << level)
        yield single(Round(partner, one(0), partner, one(0), add=True))


def levels_of(p: int) -> int:
    """m of the largest 2^m that is at most p."""
    return p.bit_length() - 1


def build(kind: str, p: int) -> Schedule:
    """allreduce of short vectors over any p."""
    levels = levels_of(p)
    return Schedule(kind, "recursive_doubling", p, (Lane(1, folded(partial(allreduce, levels), p, 1 << levels, 1)),))
