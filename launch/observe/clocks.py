"""Clocks of several hosts: what to add to one's time to have another's, measured by exchanges, and how far it may err.

A host asks another for its time and halves the way: the answer was made between question and receipt, so the error is
half of that time at most. Of many exchanges the quickest counts. Measured twice, before and after, the offset between
is a straight line; what it has changed by is added to the error.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

EXCHANGES = 100
TAG = 77


class Offset(NamedTuple):
    """At `at_ns` of a clock, `offset_ns` was to be added to have the reference's time, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class Clock:
    """One clock beside the reference, from offsets measured at one or more times. None at all: it is the reference."""

    def __init__(self, offsets: Sequence[Offset] = ()) -> None:
        self._offsets = sorted(offsets)
        found = [one.offset_ns for one in offsets] or [0]
        drift = max(found) - min(found)
        self.error_ns = max((one.error_ns for one in offsets), default=0) + drift
        """At most, of any time between two measurements."""

    def to_reference(self, at_ns: int) -> int:
        """Return a time of this clock as the reference has it."""
        if not self._offsets:
            return at_ns
        place = bisect_left(self._offsets, (at_ns,))
        if place in (0, len(self._offsets)):
            return at_ns + self._offsets[min(place, len(self._offsets) - 1)].offset_ns
        before, after = self._offsets[place - 1], self._offsets[place]
        share = (at_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return at_ns + before.offset_ns + round(share * (after.offset_ns - before.offset_ns))


def measure(comm: MPI.Intracomm, clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Return the offset of this rank's clock to rank 0's. Collective, blocking."""
    if comm.rank:
        for _ in range(EXCHANGES):
            comm.recv(source=0, tag=TAG)
            comm.send(clock(), 0, TAG)
        return Offset(*comm.recv(source=0, tag=TAG))
    for other in range(1, comm.size):
        found = []
        for _ in range(EXCHANGES):
            asked = clock()
            comm.send(None, other, TAG)
            theirs = comm.recv(source=other, tag=TAG)
            heard = clock()
            found.append(Offset(theirs, (asked + heard) // 2 - theirs, (heard - asked + 1) // 2))
        comm.send(tuple(min(found, key=attrgetter("error_ns"))), other, TAG)
    return Offset(clock(), 0, 0)
