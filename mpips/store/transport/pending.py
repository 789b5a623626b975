"""Messages of arrays between nodes: those under way, the bytes they carry, and their tags.

A call that ends early must leave nothing under way in memory that the caller has back. So whoever sends or receives
there notes it in `MessagesUnderWay` until it is over, and `MessagesUnderWay.stop` sees to what is left when the
generation has ended.

Units in use have two tags each, which no others have; MPI sets how many there are. Frames, bodies and payloads of units
go over the store's communicator. What members of a client say to each other goes over one of its own, where a piece of
a key in one call has a tag, and the comparison of calls another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.clock import Clock
from mpips.collectives.errors import of_caller
from mpips.collectives.fabric.requests import keep, last_tag, over
from mpips.collectives.fabric.tasks import Task

Bytes = NDArray[np.uint8]
QUIET_SECONDS = 5.0
"""How long the end of a generation waits for messages whose memory is the caller's. Who answers at all does so
sooner."""
LOOK_SECONDS = 1e-4
TAG_FRAME, TAG_BODY, TAG_DATA = 1, 2, 16
COMPARE_TAG, ROWS_TAG, QUIET_TAG = 1, 2, 3
"""Inside a client: what members call; row-sparse gradients, which go one call at a time; the end of a generation."""
CALLS = 4
"""Calls after which the members' tags of a piece repeat: messages of one sender and tag stay in order anyway."""
PIECES = 1024
"""Pieces of a call after which tags repeat: never are so many under way at a time."""


def cut_bytes(array: NDArray[Any], nbytes: int) -> list[Bytes]:
    """Return the bytes of a 1-D array in messages of `nbytes` each but for the last; one at least. Views."""
    data = array.view(np.uint8)
    return [data[start : start + nbytes] for start in range(0, max(data.size, 1), max(nbytes, 1))]


class MessageGroup:
    """Messages that belong together, noted in `MessagesUnderWay` until they are over."""

    def __init__(
        self, known: dict[int, MessageGroup], receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]
    ) -> None:
        self.receives, self.sends = list(receives), list(sends)
        self._known = known
        known[id(self)] = self

    def pending(self) -> int:
        """Return how many are under way; one look at MPI for all that come, one for all that go."""
        self.receives, self.sends = _not_ended(self.receives), _not_ended(self.sends)
        left = len(self.receives) + len(self.sends)
        if not left:
            self._known.pop(id(self), None)
        return left

    def left(self) -> int:
        """Return how many are under way when the generation is over: messages to and from the dead are over, too."""
        self.receives = [request for request in self.receives if not over(request)]
        self.sends = [request for request in self.sends if not over(request)]
        return len(self.receives) + len(self.sends)

    def wait(self) -> Task[None]:
        """Wait until all are over."""
        before = len(self.receives) + len(self.sends)
        while left := self.pending():
            yield left < before
            before = left


class MessagesUnderWay:
    """The groups of messages of one rank that are not over."""

    def __init__(self) -> None:
        self._open: dict[int, MessageGroup] = {}

    def begin(self, receives: Sequence[MPI.Request] = (), sends: Sequence[MPI.Request] = ()) -> MessageGroup:
        """Note requests whose memory may be the caller's, until `pending` says that none is left."""
        return MessageGroup(self._open, receives, sends)

    def stop(self, seconds: float = QUIET_SECONDS) -> bool:
        """Let nothing touch memory of the caller any more, as the generation is over; whether nothing is under way.

        Cancels receives, and waits for sends: blocking, so long at most. What is left, as its peer does not answer, is
        kept with its memory until MPI is through with it. Not to be begun or waited for again before the next
        generation.
        """
        self.cancel()
        clock = Clock()
        while self.left() and clock.seconds() < seconds:
            time.sleep(LOOK_SECONDS)
        return self.leave()

    def cancel(self) -> None:
        """Receive nothing more, but for what is coming in already."""
        for group in list(self._open.values()):
            for request in reversed(group.receives):  # what comes meanwhile belongs to an earlier one
                if request:
                    request.Cancel()

    def pending(self) -> int:
        """Return how many messages are under way."""
        return sum(group.pending() for group in list(self._open.values()))

    def left(self) -> int:
        """Return how many are under way when the generation is over: messages to and from the dead are over, too."""
        return sum(group.left() for group in list(self._open.values()))

    def leave(self) -> bool:
        """Forget all; what is under way is kept with its memory until MPI is through with it. Whether nothing was."""
        left = [group for group in list(self._open.values()) if group.left()]
        for group in left:
            keep(group.receives + group.sends)
        self._open.clear()
        return not left


def _not_ended(requests: list[Any]) -> list[Any]:
    """Return those that have not ended; one look at MPI for all of them. Some may have been seen to end before, and an
    interrupt have come then."""
    if not requests or MPI.Request.Testsome(requests) == []:
        return requests
    return [request for request in requests if request]


# ---- tags


@cache
def most_units() -> int:
    """Return how many units may be in use at a time; the same on all ranks of a job."""
    return (last_tag() - TAG_DATA) // 2


def push_tag(unit: int) -> int:
    """Return the tag of payloads that go to the server."""
    return TAG_DATA + 2 * (unit % most_units())


def pull_tag(unit: int) -> int:
    """Return the tag of payloads that come from the server."""
    return push_tag(unit) + 1


def member_tag(piece: int, call: int, text: bytes = b"") -> int:
    """Return the tag of a piece's messages inside a client, in its call of that number; none of the three above.

    Members that make calls of other texts must not get each other's messages: one that is longer than the memory for it
    makes Open MPI write beyond its end.
    """
    span = last_tag() - TAG_DATA
    place = (CALLS * piece + call % CALLS) % min(CALLS * PIECES, span)
    return TAG_DATA + place + CALLS * PIECES * (crc32(text) % max(1, span // (CALLS * PIECES)))


class UnitNumbers:
    """Numbers of units, each assigned once: a server may still speak of a unit that is forgotten."""

    def __init__(self, used: Iterable[int] = ()) -> None:
        """`used`: numbers that were assigned before, all of which are in use."""
        numbers = list(used)
        self._next = max(numbers, default=-1) + 1
        self._tagged = {number % most_units() for number in numbers}

    def copy(self) -> UnitNumbers:
        """Return the same numbers, to assign some on trial."""
        numbers = UnitNumbers()
        numbers._next, numbers._tagged = self._next, self._tagged.copy()
        return numbers

    def assign(self, key: int | str) -> int:
        """Return the number of a new unit of the key; ValueError where all tags are in use."""
        most = most_units()
        if len(self._tagged) >= most:
            raise of_caller(
                ValueError(
                    f"init: key {key!r}: this MPI has tags for {most} units of keys, and all are in use; "
                    "init fewer and larger keys, or raise chunk_bytes"
                )
            )
        while self._next % most in self._tagged:
            self._next += 1
        self._tagged.add(self._next % most)
        self._next += 1
        return self._next - 1

    def release(self, numbers: Iterable[int]) -> None:
        """Units of these numbers are not in use any more."""
        self._tagged.difference_update(number % most_units() for number in numbers)
