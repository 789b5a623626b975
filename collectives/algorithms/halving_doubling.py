"""Halving and doubling: bytes as few as the ring's, steps as few as recursive doubling's; also Rabenseifner's
algorithm.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004); Thakur, Rabenseifner and Gropp (2005).

Steps: for p = 2^m it is the exchange of `bcube` over digits of size 2, in one lane: reduce-scatter by halving (first
half the vector with the nearest rank, then a quarter with the rank 2 away, ...), allgather by doubling, the same way
back. For other p the ranks are first folded to a power of two, as in `recursive_doubling`.

p = 4, (partner, chunks) that rank 0 sends:  (1,2-3) (2,1) | (2,0) (1,0-1)

Cost: 2m alpha + 2(p-1)/p n beta + (p-1)/p n gamma, m = log2 p; for other p, with 2^m the power below, 2 alpha + 2 n
beta + n gamma more. reduce_scatter and allgather cost half of alpha and beta. Limits: allreduce any p, the others p =
2^m. Memory: half a vector.
"""

from __future__ import annotations

from functools import partial

from ..schedule import Lane, Schedule, series
from . import bcube
from .recursive_doubling import folded, levels_of

KINDS = ("allreduce", "reduce_scatter", "allgather")


def build(kind: str, p: int) -> Schedule:
    """allreduce over any p; reduce_scatter and allgather over a power of two."""
    levels = levels_of(p)
    radices, order = (2,) * levels, tuple(range(levels))
    if kind == "allreduce":
        halve, double = partial(bcube.reduce_scatter, radices, order), partial(bcube.allgather, radices, order)
        chunks = 1 << levels
        return Schedule(kind, "halving_doubling", p, (Lane(chunks, folded(series(halve, double), p, chunks)),))
    if p != 1 << levels:
        raise ValueError(f"halving_doubling serves {kind} on 2, 4, 8, ... ranks, not on {p}: choose ring or direct")
    return bcube.over(kind, radices, 1, "halving_doubling")
