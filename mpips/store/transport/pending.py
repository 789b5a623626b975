"""Messages of arrays between nodes: those under way, the bytes they carry, and their tags.

When a call ends early, MPI must no longer touch memory that the caller gets back. So every send and receive in such
memory is noted in `MessagesUnderWay` until it has completed, and `MessagesUnderWay.stop` deals with what is left at the
end of a generation.

Each unit in use has two tags of its own. MPI limits the number of tags, and by that the number of units. Frames, bodies
and payloads of units go over the store's communicator. The members of a client have a communicator of their own, with a
tag for each piece of a key in a call, and one for the comparison of calls.
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
from mpips.collectives.fabric.requests import is_over, keep_until_complete, last_tag
from mpips.collectives.fabric.tasks import Task

Bytes = NDArray[np.uint8]
# How long the end of a generation waits for messages in the caller's memory. A peer that answers at all is faster.
QUIET_SECONDS = 5.0
LOOK_SECONDS = 1e-4
TAG_FRAME, TAG_BODY, TAG_DATA = 1, 2, 16
# tags inside a client: the comparison of calls; the end of a generation
COMPARE_TAG, QUIET_TAG = 1, 2
# The members' tags of a piece repeat after this many calls. Messages of one sender and tag stay in order anyway.
CALLS = 4
# The tags of a call repeat after this many pieces. Fewer are under way at a time.
PIECES = 1024


class MessageGroup:
    """Messages that belong together, noted in `MessagesUnderWay` until all have completed."""

    def __init__(
        self, known: dict[int, MessageGroup], receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]
    ) -> None:
        self.receives = list(receives)
        self.sends = list(sends)
        self._known = known
        known[id(self)] = self

    def pending(self) -> int:
        """Return the number under way. Looks at MPI twice: once for all receives, once for all sends."""
        self.receives, self.sends = _not_ended(self.receives), _not_ended(self.sends)
        left = len(self.receives) + len(self.sends)
        if not left:
            self._known.pop(id(self), None)
        return left

    def left(self) -> int:
        """Return the number under way at the end of a generation, without those to and from dead ranks."""
        self.receives = [request for request in self.receives if not is_over(request)]
        self.sends = [request for request in self.sends if not is_over(request)]
        return len(self.receives) + len(self.sends)

    def wait(self) -> Task[None]:
        """Wait until all have completed."""
        before = len(self.receives) + len(self.sends)
        while left := self.pending():
            yield left < before
            before = left


class MessagesUnderWay:
    """The groups of messages of one rank that have not completed."""

    def __init__(self) -> None:
        self._open: dict[int, MessageGroup] = {}

    def begin(self, receives: Sequence[MPI.Request] = (), sends: Sequence[MPI.Request] = ()) -> MessageGroup:
        """Keep track of requests whose memory may be the caller's, until `pending` returns 0."""
        return MessageGroup(self._open, receives, sends)

    def stop(self, seconds: float = QUIET_SECONDS) -> bool:
        """Make MPI stop using the caller's memory, at the end of a generation. Return True if all messages have ended.

        Receives are cancelled. Sends are waited for, for `seconds` at most. If a peer does not answer, its requests are
        kept with their memory until MPI has finished with them. Nothing may be begun or waited for afterwards, until
        the next generation.
        """
        self.cancel()
        clock = Clock()
        while self.left() and clock.seconds() < seconds:
            time.sleep(LOOK_SECONDS)
        return self.leave()

    def cancel(self) -> None:
        """Cancel all receives, except those whose message is arriving already."""
        for group in list(self._open.values()):
            # In reverse order: a message that arrives meanwhile belongs to an earlier receive.
            for request in reversed(group.receives):
                if request:
                    request.Cancel()

    def pending(self) -> int:
        """Return the number of messages under way."""
        return sum(group.pending() for group in list(self._open.values()))

    def left(self) -> int:
        """Return the number under way at the end of a generation, without those to and from dead ranks."""
        return sum(group.left() for group in list(self._open.values()))

    def leave(self) -> bool:
        """Forget all groups. True if none was under way; those that are keep their memory until MPI has finished."""
        left = [group for group in list(self._open.values()) if group.left()]
        for group in left:
            keep_until_complete(group.receives + group.sends)
        self._open.clear()
        return not left


def _not_ended(requests: list[Any]) -> list[Any]:
    """Return the requests that have not completed, with one look at MPI for all of them.

    The list may hold requests that an earlier look has seen complete, if an interrupt came right after it.
    """
    if not requests or MPI.Request.Testsome(requests) == []:
        return requests
    return [request for request in requests if request]


# ---- tags


@cache
def most_units() -> int:
    """Return how many units may be in use at a time. The same on all ranks of a job."""
    return (last_tag() - TAG_DATA) // 2


def push_tag(unit: int) -> int:
    """Return the tag of a unit's payloads to the server."""
    return TAG_DATA + 2 * (unit % most_units())


def pull_tag(unit: int) -> int:
    """Return the tag of a unit's payloads from the server."""
    return push_tag(unit) + 1


def member_tag(piece: int, call: int, text: bytes = b"") -> int:
    """Return the tag of a piece's messages inside a client, in a call. It differs from the two tags above.

    The text of the call is part of it. Otherwise members that make different calls could get each other's messages, and
    a message that is longer than the memory for it makes Open MPI write beyond its end.

    Args:
        piece: The number of the piece in its key.
        call: The number of the call.
        text: The call, as members compare it.
    """
    span = last_tag() - TAG_DATA
    place = (CALLS * piece + call % CALLS) % min(CALLS * PIECES, span)
    return TAG_DATA + place + CALLS * PIECES * (crc32(text) % max(1, span // (CALLS * PIECES)))


class UnitNumbers:
    """Numbers of units. Each is assigned only once, because a server may still speak of a unit that is forgotten."""

    def __init__(self, used: Iterable[int] = ()) -> None:
        """`used`: numbers that are in use already."""
        numbers = list(used)
        self._next = max(numbers, default=-1) + 1
        self._tagged = {number % most_units() for number in numbers}

    def copy(self) -> UnitNumbers:
        """Return a copy on which numbers can be assigned on trial."""
        numbers = UnitNumbers()
        numbers._next, numbers._tagged = self._next, self._tagged.copy()
        return numbers

    def assign(self, key: int | str) -> int:
        """Return a number for a new unit of the key. ValueError if all tags are in use."""
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
        """Release the tags of units that are no longer in use. Their numbers are not assigned again."""
        self._tagged.difference_update(number % most_units() for number in numbers)
