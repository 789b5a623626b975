"""Track MPI messages that carry arrays between nodes, and assign message tags.

When a call ends early, the caller gets its arrays back, and MPI must no longer read or write them. So
`MessagesUnderWay` notes every send and receive in such memory until it has completed. At the end of a generation
`MessagesUnderWay.stop` cancels the other messages, or waits for them.

A *unit* is the part of a key on one server, as the server numbers it. Each unit in use has two tags of its own, so the
number of tags that MPI allows limits the number of units. All messages between workers and servers use the store's
communicator. The members of a client (a group of workers that sum before they push) have a communicator of their own.
On this communicator each piece of a key has a tag of its own within a call, and the comparison of calls uses one more
tag.
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
# At the end of a generation a rank waits at most this long for messages in the caller's memory. A peer that is alive
# answers sooner.
QUIET_SECONDS = 5.0
LOOK_SECONDS = 1e-4
TAG_FRAME, TAG_BODY, TAG_DATA = 1, 2, 16
# tags inside a client: for the comparison of calls, and for the end of a generation
COMPARE_TAG, QUIET_TAG = 1, 2
# Inside a client the tag of a piece repeats after this many calls. That is safe, because MPI keeps messages with equal
# sender and tag in order.
CALLS = 4
# Within a call tags repeat after this many pieces. Fewer pieces are in flight at a time.
PIECES = 1024


class MessageGroup:
    """Messages that belong together. `MessagesUnderWay` keeps the group until all its messages have completed."""

    def __init__(
        self, known: dict[int, MessageGroup], receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]
    ) -> None:
        self.receives = list(receives)
        self.sends = list(sends)
        self._known = known
        known[id(self)] = self

    def pending(self) -> int:
        """Return the number of messages still in flight. Asks MPI twice: once for all receives, once for all sends."""
        self.receives, self.sends = _not_ended(self.receives), _not_ended(self.sends)
        left = len(self.receives) + len(self.sends)
        if not left:
            self._known.pop(id(self), None)
        return left

    def left(self) -> int:
        """Return the number of messages still in flight at the end of a generation. Skip messages of dead ranks."""
        self.receives = [request for request in self.receives if not is_over(request)]
        self.sends = [request for request in self.sends if not is_over(request)]
        return len(self.receives) + len(self.sends)

    def wait(self) -> Task[None]:
        """Wait until all messages of the group have completed."""
        before = len(self.receives) + len(self.sends)
        while left := self.pending():
            yield left < before
            before = left


class MessagesUnderWay:
    """The groups of messages of one rank that have not completed."""

    def __init__(self) -> None:
        self._open: dict[int, MessageGroup] = {}

    def begin(self, receives: Sequence[MPI.Request] = (), sends: Sequence[MPI.Request] = ()) -> MessageGroup:
        """Track requests that may use the caller's memory, until the group's `pending` returns 0."""
        return MessageGroup(self._open, receives, sends)

    def stop(self, seconds: float = QUIET_SECONDS) -> bool:
        """At the end of a generation, make MPI stop using the caller's memory. Return True if all messages have ended.

        Cancels receives, and waits at most `seconds` for sends. If a peer does not answer, its requests are kept
        together with their memory until MPI has finished with them. Before the next generation no message may be begun
        or waited for.
        """
        self.cancel()
        clock = Clock()
        while self.left() and clock.seconds() < seconds:
            time.sleep(LOOK_SECONDS)
        return self.leave()

    def cancel(self) -> None:
        """Cancel all receives, except those whose message is arriving already."""
        for group in list(self._open.values()):
            # Cancel in reverse order, because a message that arrives meanwhile is matched to the earliest receive.
            for request in reversed(group.receives):
                if request:
                    request.Cancel()

    def pending(self) -> int:
        """Return the number of messages still in flight."""
        return sum(group.pending() for group in list(self._open.values()))

    def left(self) -> int:
        """Return the number of messages still in flight at the end of a generation. Skip messages of dead ranks."""
        return sum(group.left() for group in list(self._open.values()))

    def leave(self) -> bool:
        """Forget all groups. Return True if no message is in flight.

        Messages that are in flight keep their memory until MPI has finished with them.
        """
        left = [group for group in list(self._open.values()) if group.left()]
        for group in left:
            keep_until_complete(group.receives + group.sends)
        self._open.clear()
        return not left


def _not_ended(requests: list[Any]) -> list[Any]:
    """Return the requests that have not completed. Asks MPI once for all of them.

    `requests` may contain null requests, which are completed ones. They are still in the list if an interrupt came
    right after an earlier call, before they were removed.
    """
    if not requests or MPI.Request.Testsome(requests) == []:
        return requests
    return [request for request in requests if request]


# ---- tags


@cache
def most_units() -> int:
    """Return the largest number of units that may be in use at a time. All ranks of a job get the same number."""
    return (last_tag() - TAG_DATA) // 2


def push_tag(unit: int) -> int:
    """Return the tag of messages that carry a unit's data to the server."""
    return TAG_DATA + 2 * (unit % most_units())


def pull_tag(unit: int) -> int:
    """Return the tag of messages that carry a unit's data from the server."""
    return push_tag(unit) + 1


def member_tag(piece: int, call: int, text: bytes = b"") -> int:
    """Return the tag of a piece's messages in a call inside a client. It differs from COMPARE_TAG and QUIET_TAG.

    The tag depends on the text of the call. Otherwise members that make different calls could receive each other's
    messages. If such a message is longer than the receiver's memory, Open MPI writes beyond the end of the memory.

    Args:
        piece: The number of the piece in its key.
        call: The number of the call.
        text: The name of the call, which members compare.
    """
    span = last_tag() - TAG_DATA
    place = (CALLS * piece + call % CALLS) % min(CALLS * PIECES, span)
    return TAG_DATA + place + CALLS * PIECES * (crc32(text) % max(1, span // (CALLS * PIECES)))


class UnitNumbers:
    """Assigns numbers to units. It never reuses a number, because servers may still send messages about old units."""

    def __init__(self, used: Iterable[int] = ()) -> None:
        """`used` are the numbers of existing units."""
        numbers = list(used)
        self._next = max(numbers, default=-1) + 1
        self._tagged = {number % most_units() for number in numbers}

    def copy(self) -> UnitNumbers:
        """Return a copy. A caller first assigns numbers with the copy, and keeps the copy only if nothing fails."""
        numbers = UnitNumbers()
        numbers._next, numbers._tagged = self._next, self._tagged.copy()
        return numbers

    def assign(self, key: int | str) -> int:
        """Return a number for a new unit of the key. Raise ValueError if all tags are in use."""
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
        """Release the tags of units that are no longer in use. The numbers of these units are not assigned again."""
        self._tagged.difference_update(number % most_units() for number in numbers)
