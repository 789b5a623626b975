"""Tags of messages between nodes: units in use have two each, which no others have; MPI sets how many there are.

Frames, bodies and payloads of units go over the store's communicator. What members of a client say to each other goes
over one of its own, where a piece of a key in one call has a tag, and the comparison of calls another.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from zlib import crc32

from collectives.errors import of_caller
from collectives.network.tags import last_tag

TAG_FRAME, TAG_BODY, TAG_DATA = 1, 2, 16
COMPARE_TAG, ROWS_TAG, QUIET_TAG = 1, 2, 3
"""Inside a client: what members call; row-sparse gradients, which go one call at a time; the end of a generation."""
CALLS = 4
"""Calls after which the members' tags of a piece repeat: messages of one sender and tag stay in order anyway."""
PIECES = 1024
"""Pieces of a call after which tags repeat: never are so many under way at a time."""


@cache
def most_units() -> int:
    """Units that may be in use at a time; the same on all ranks of a job."""
    return (last_tag() - TAG_DATA) // 2


def push_tag(unit: int) -> int:
    """The tag of payloads that go to the server."""
    return TAG_DATA + 2 * (unit % most_units())


def pull_tag(unit: int) -> int:
    """The tag of payloads that come from the server."""
    return push_tag(unit) + 1


def member_tag(piece: int, call: int, text: bytes = b"") -> int:
    """The tag of a piece's messages inside a client, in its call of that number; never one of the three above.

    Members that make calls of other texts must not get each other's messages: one that is longer than the memory for it
    makes Open MPI write beyond its end.
    """
    span = last_tag() - TAG_DATA
    place = (CALLS * piece + call % CALLS) % min(CALLS * PIECES, span)
    return TAG_DATA + place + CALLS * PIECES * (crc32(text) % max(1, span // (CALLS * PIECES)))


class Numbers:
    """Numbers of units, each given once: a server may still speak of a unit that is forgotten."""

    def __init__(self, used: Iterable[int] = ()) -> None:
        """`used`: numbers that were given before, all of which are in use."""
        numbers = list(used)
        self._next = max(numbers, default=-1) + 1
        self._tagged = {number % most_units() for number in numbers}

    def copy(self) -> Numbers:
        """Return the same numbers, to give some on trial."""
        numbers = Numbers()
        numbers._next, numbers._tagged = self._next, self._tagged.copy()
        return numbers

    def take(self, key: int | str) -> int:
        """The number of a new unit of the key; ValueError where all tags are in use."""
        most = most_units()
        if len(self._tagged) >= most:
            raise of_caller(ValueError(
                f"init: key {key!r}: this MPI has tags for {most} units of keys, and all are in use; "
                "init fewer and larger keys, or raise chunk_bytes"
            ))  # fmt: skip
        while self._next % most in self._tagged:
            self._next += 1
        self._tagged.add(self._next % most)
        self._next += 1
        return self._next - 1

    def give(self, numbers: Iterable[int]) -> None:
        """Units that are not in use any more."""
        self._tagged.difference_update(number % most_units() for number in numbers)
