"""Clocks of several hosts: convert times from one to another by measured offsets, and tell the largest error.

A host asks another for its time, and takes it for the time halfway between the question and the answer. The error is at
most half of the time in between, so the quickest of many exchanges counts. Between two measurements the offset is taken
to change linearly, and the change is added to the error.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

# A measurement makes this many exchanges, or fewer on a slow link, where they would take longer than LONGEST_SECONDS.
EXCHANGES = 100
LONGEST_SECONDS = 0.5
# The largest drift of one clock against another: the most by which Linux lets NTP correct a clock.
MOST_DRIFT = 500e-6


class Offset(NamedTuple):
    """One measurement of a clock: at its time `at_ns`, the reference showed `at_ns + offset_ns`, within `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class Clock:
    """Converts the times of a clock to those of the reference, by measured offsets.

    A clock without offsets is the reference itself.
    """

    def __init__(self, offsets: Sequence[Offset] = ()) -> None:
        self.offsets = sorted(offsets)

    def to_reference(self, at_ns: int) -> int:
        """Convert a time of this clock to the time that the reference showed."""
        if not self.offsets:
            return at_ns
        place = bisect_left(self.offsets, (at_ns,))
        if place in (0, len(self.offsets)):
            return at_ns + self.offsets[min(place, len(self.offsets) - 1)].offset_ns
        before, after = self.offsets[place - 1], self.offsets[place]
        share = (at_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return at_ns + before.offset_ns + round(share * (after.offset_ns - before.offset_ns))

    def error_ns(self, first_ns: int, last_ns: int) -> int:
        """Return the largest error of converted times of this clock between `first_ns` and `last_ns`."""
        if not self.offsets:
            return 0
        between = [
            max(one.error_ns, other.error_ns) + abs(one.offset_ns - other.offset_ns)
            for one, other in pairwise(self.offsets)
        ]
        beyond = max(self.offsets[0].at_ns - first_ns, last_ns - self.offsets[-1].at_ns, 0)
        return max(between, default=self.offsets[0].error_ns) + round(beyond * MOST_DRIFT)


def measure(ask: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Measure another clock against this one. Blocks for up to `LONGEST_SECONDS`, plus one exchange.

    Args:
        ask: Returns the time of the other clock in nanoseconds.
        clock: Returns the time of this clock, the reference.
    """
    found: list[Offset] = []
    begun = clock()
    while len(found) < EXCHANGES and clock() - begun < LONGEST_SECONDS * 1e9:
        asked = clock()
        theirs = ask()
        heard = clock()
        found.append(Offset(theirs, (asked + heard) // 2 - theirs, (heard - asked + 1) // 2))
    return min(found, key=attrgetter("error_ns"))
