"""Halving and doubling: bytes as few as the ring's in few steps; also Rabenseifner's algorithm.

Source: Rabenseifner, "Optimization of collective reduction operations" (2004); Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005). Here for other p than 2^m too without a fold,
by the exchange of `bcube` over digits of unlike sizes.

Steps: the digits of a rank are those to the prime factors of p. The reduce-scatter takes one digit after the other: the
ranks that differ in it only split what they hold among themselves (in halves where the factor is 2), the nearest ranks
first; the allgather goes the same way back. Where p has a prime factor above 7, which would make for many messages, the
ranks are first folded to the next number below that has none, as in `recursive_doubling`.

p = 4, (partner, chunks) that rank 0 sends:  (1,2-3) (2,1) | (2,0) (1,0-1)
p = 6, the same:  (1,3-5) | (2,1) (4,2) || (2,0) (4,0) | (1,0-2)

Cost, with q the number of ranks after the fold and s the sum of (factor - 1) over its prime factors (m for q = 2^m):
2s alpha + 2(q-1)/q n beta + (q-1)/q n gamma; with a fold 2 alpha + 2 n beta + n gamma more. reduce_scatter and
allgather cost half of alpha and beta.
Limits: allreduce any p, the others p without a prime factor above 7. Memory: (f-1)/f of a vector, f the first factor.
"""

from __future__ import annotations

from collections.abc import Callable

from mpips.collectives.schedule.model import Lane, Schedule, folded

KINDS = ("allreduce", "reduce_scatter", "allgather")
PRIMES = (2, 3, 5, 7)


def factors(p: int) -> tuple[int, ...]:
    """The prime factors of p up to 7, ascending; their product is p where it has no other."""
    found = []
    for prime in PRIMES:
        while p % prime == 0:
            found.append(prime)
            p //= prime
    return tuple(found)


def core(p: int) -> int:
    """The largest number up to p that has no prime factor above 7."""
    rest = p
    for factor in factors(p):
        rest //= factor
    return p if rest == 1 else core(p - 1)


def build(kind: str, p: int, exchange: Callable[[str, tuple[int, ...], int, str], Schedule]) -> Schedule:
    """allreduce over any p; reduce_scatter and allgather over p without a prime factor above 7. `exchange` is that of
    `bcube` over digits."""
    chunks = core(p)
    if kind != "allreduce" and p != chunks:
        raise ValueError(f"halving_doubling serves {kind} on p without a prime factor above 7, not on {p}: choose ring")
    inner = exchange(kind, factors(chunks), 1, "halving_doubling")
    if p == chunks:
        return inner
    return Schedule(kind, inner.name, p, (Lane(chunks, folded(inner.lanes[0].stage, p, chunks, chunks)),))
