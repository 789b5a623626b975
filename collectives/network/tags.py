"""The tags of a plan's messages: the same on all ranks, and others than those of plans in flight beside it."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from mpi4py import MPI

FIRST_TAG = 16
LEAST_TAG = 32767  # the highest tag on the poorest MPI
TAGS = 8000  # of plans; MPI promises 32,767 at least


def last_tag() -> int:
    """The highest tag of this MPI, which nothing else is sent with."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG)


class Lanes(NamedTuple):
    """What messages go over: the communicator of all ranks, and that of the ranks with this one's place in their nodes
    (None where nodes differ in size)."""

    comm: MPI.Intracomm
    across: MPI.Comm | None


class Tags:
    """The tags of one plan. `first` counts the tags that were dealt on these lanes before, on all ranks alike.

    None is a one-shot call: nothing of its sort is ever in flight beside it, so what a text of it makes is enough.
    Ranks whose calls differ then do not take each other's messages, and `control` finds out why they wait. All tags
    that plans leave serve for that: Open MPI has 2^31, and MPICH 2^29.
    """

    def __init__(self, lanes: Lanes, first: int | None = None):
        self.lanes, self._first = lanes, first
        self.count = 0
        """How many were taken."""

    def take(self, count: int, text: str) -> list[int]:
        """All tags of the plan, one for each lane. ValueError where there are not so many."""
        if count > TAGS:
            raise ValueError(f"{text} has {count} lanes, and there are tags for {TAGS}: choose fewer rings")
        self.count = count
        if self._first is not None:
            return [FIRST_TAG + (self._first + lane) % TAGS for lane in range(count)]
        begin, first = FIRST_TAG + TAGS, zlib.crc32(text.encode())
        return [begin + (first + lane) % (last_tag() - begin) for lane in range(count)]
