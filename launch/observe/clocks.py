"""Clocks of several hosts: what to add to one's time to have another's, measured by exchanges, and how far it may err.

A host asks another for its time and halves the way: the answer was made between question and receipt, so the error is
half of that time at most. Of many exchanges the quickest counts. Between two measurements the offset is a straight
line, and what it has changed by is added to the error.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

EXCHANGES = 100
LONGEST_SECONDS = 0.5
"""Of all exchanges: on a slow link there are fewer."""
MOST_DRIFT = 500e-6
"""Of one clock against another: what Linux lets NTP correct one by."""


class Offset(NamedTuple):
    """At `at_ns` of a clock, `offset_ns` was to be added to have the reference's time, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class Clock:
    """One clock beside the reference, from offsets measured at one or more times. None at all: it is the reference."""

    def __init__(self, offsets: Sequence[Offset] = ()) -> None:
        self.offsets = sorted(offsets)

    def to_reference(self, at_ns: int) -> int:
        """Return a time of this clock as the reference has it."""
        if not self.offsets:
            return at_ns
        place = bisect_left(self.offsets, (at_ns,))
        if place in (0, len(self.offsets)):
            return at_ns + self.offsets[min(place, len(self.offsets) - 1)].offset_ns
        before, after = self.offsets[place - 1], self.offsets[place]
        share = (at_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return at_ns + before.offset_ns + round(share * (after.offset_ns - before.offset_ns))

    def error_ns(self, first_ns: int, last_ns: int) -> int:
        """Return by how much the times of this clock from `first_ns` to `last_ns` may be wrong, at most."""
        if not self.offsets:
            return 0
        between = [
            max(one.error_ns, other.error_ns) + abs(one.offset_ns - other.offset_ns)
            for one, other in pairwise(self.offsets)
        ]
        beyond = max(self.offsets[0].at_ns - first_ns, last_ns - self.offsets[-1].at_ns, 0)
        return max(between, default=self.offsets[0].error_ns) + round(beyond * MOST_DRIFT)


def measure(ask: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Return the offset of another clock to this one. `ask` returns the other's time; blocking, for about a second."""
    found: list[Offset] = []
    begun = clock()
    while len(found) < EXCHANGES and clock() - begun < LONGEST_SECONDS * 1e9:
        asked = clock()
        theirs = ask()
        heard = clock()
        found.append(Offset(theirs, (asked + heard) // 2 - theirs, (heard - asked + 1) // 2))
    return min(found, key=attrgetter("error_ns"))
