"""Halving and doubling, also called Rabenseifner's algorithm: as few bytes as the ring, in few steps.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004); Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005). The papers are about p = 2^m. This module uses
the exchange of `bcube`, whose digits may have different sizes, so it also serves other p, mostly without a fold.

Steps: a rank is written as a number whose digits have the prime factors of p as their radices. The reduce-scatter takes
one digit after the other: ranks that differ only in this digit split the chunks that they hold among themselves (in
halves if the factor is 2). The nearest ranks come first. The allgather takes the digits in the reverse order. A prime
factor above 7 would cost many messages. Then the ranks are first folded to the next smaller number that has no such
factor, as in `recursive_doubling`.

What rank 0 sends, as (partner, chunks); | separates steps of different digits, || the two halves of the allreduce:

    p = 4:  (1,2-3) | (2,1) || (2,0) | (1,0-1)
    p = 6:  (1,3-5) | (2,1) (4,2) || (2,0) (4,0) | (1,0-2)

Cost, with q the number of ranks after the fold and s the sum of (factor - 1) over the prime factors of q (m for
q = 2^m): 2s alpha + 2(q-1)/q n beta + (q-1)/q n gamma; a fold adds 2 alpha + 2 n beta + n gamma. reduce_scatter and
allgather cost half of alpha and beta.
Limits: allreduce any p, the other kinds p without a prime factor above 7.
Memory: (f-1)/f of a vector, where f is the first factor.
"""

from __future__ import annotations

from collections.abc import Callable

from mpips.collectives.schedule.model import Lane, Schedule, folded

KINDS = ("allreduce", "reduce_scatter", "allgather")
PRIMES = (2, 3, 5, 7)


def factors(p: int) -> tuple[int, ...]:
    """Return those prime factors of p that are at most 7, in ascending order."""
    primes = []
    for prime in PRIMES:
        while p % prime == 0:
            primes.append(prime)
            p //= prime
    return tuple(primes)


def core(p: int) -> int:
    """Return the largest number up to p that has no prime factor above 7."""
    rest = p
    for factor in factors(p):
        rest //= factor
    return p if rest == 1 else core(p - 1)


def build(kind: str, p: int, exchange: Callable[[str, tuple[int, ...], int, str], Schedule]) -> Schedule:
    """Build allreduce over any p, or reduce_scatter or allgather over p without a prime factor above 7.

    `exchange` is `bcube.over`.
    """
    chunks = core(p)
    if kind != "allreduce" and p != chunks:
        raise ValueError(f"halving_doubling serves {kind} on p without a prime factor above 7, not on {p}: choose ring")
    inner = exchange(kind, factors(chunks), 1, "halving_doubling")
    if p == chunks:
        return inner
    return Schedule(kind, inner.name, p, (Lane(chunks, folded(inner.lanes[0].stage, p, chunks, chunks)),))
