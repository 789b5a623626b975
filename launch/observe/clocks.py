"""Convert times of one host's clock to times of another host's clock, by measured offsets, with a bound on the error.

To measure an offset, a host asks another host for its time. The answer is taken to be the time halfway between sending
the question and receiving the answer. The error is at most half of the time between these two moments. So many
questions are asked, and the one with the quickest answer counts. Between two measurements the offset is assumed to
change linearly, and the change is added to the error.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

# A measurement asks this many questions, or fewer if they would take longer than LONGEST_SECONDS.
EXCHANGES = 100
LONGEST_SECONDS = 0.5
# The largest drift of one clock against another. Linux lets NTP speed up or slow down a clock by this share at most.
MOST_DRIFT = 500e-6


class Offset(NamedTuple):
    """One measurement of a clock against the reference clock."""

    # the time of the measurement, by the measured clock
    at_ns: int
    # the time of the reference clock minus `at_ns`
    offset_ns: int
    # the largest error of `offset_ns`
    error_ns: int


class HostClock:
    """Converts times of one host's clock to times of the reference clock.

    `offsets` are measurements of the clock. If there are no measurements, the clock is the reference clock itself.
    """

    def __init__(self, offsets: Sequence[Offset] = ()) -> None:
        self.offsets = sorted(offsets)

    def to_reference(self, at_ns: int) -> int:
        """Return what the reference clock shows when this clock shows `at_ns`."""
        if not self.offsets:
            return at_ns
        index = bisect_left(self.offsets, (at_ns,))
        if index in (0, len(self.offsets)):
            return at_ns + self.offsets[min(index, len(self.offsets) - 1)].offset_ns
        before, after = self.offsets[index - 1], self.offsets[index]
        share = (at_ns - before.at_ns) / (after.at_ns - before.at_ns)
        return at_ns + before.offset_ns + round(share * (after.offset_ns - before.offset_ns))

    def error_ns(self, first_ns: int, last_ns: int) -> int:
        """Return the largest error of `to_reference` for times from `first_ns` to `last_ns`."""
        if not self.offsets:
            return 0
        between = [
            max(before.error_ns, after.error_ns) + abs(before.offset_ns - after.offset_ns)
            for before, after in pairwise(self.offsets)
        ]
        # how far the times lie before the first measurement, or after the last measurement
        beyond = max(self.offsets[0].at_ns - first_ns, last_ns - self.offsets[-1].at_ns, 0)
        return max(between, default=self.offsets[0].error_ns) + round(beyond * MOST_DRIFT)


def measure(ask: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Measure another host's clock against this host's clock. Blocks for `LONGEST_SECONDS` plus one question at most.

    Args:
        ask: A function that returns the time of the other clock in nanoseconds. The function may block.
        clock: A function that returns the time of this clock, the reference, in nanoseconds.
    """
    offsets: list[Offset] = []
    start = clock()
    while len(offsets) < EXCHANGES and clock() - start < LONGEST_SECONDS * 1e9:
        sent = clock()
        other = ask()
        received = clock()
        offsets.append(Offset(other, (sent + received) // 2 - other, (received - sent + 1) // 2))
    return min(offsets, key=attrgetter("error_ns"))
