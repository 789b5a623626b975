"""Tags of payloads between nodes: units in use have two each, which no others have; MPI sets how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from collectives.network.drain import last_tag
from mpips.lines import TAG_DATA


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


class Numbers:
    """Numbers of units, each given once: a server may still speak of a unit that is forgotten."""

    def __init__(self) -> None:
        self._next = 0
        self._tagged: set[int] = set()

    def take(self, key: int | str) -> int:
        """The number of a new unit of the key; ValueError where all tags are in use."""
        most = most_units()
        if len(self._tagged) >= most:
            raise ValueError(
                f"init: key {key!r}: this MPI has tags for {most} units of keys, and all are in use; "
                "init fewer and larger keys, or raise chunk_bytes"
            )
        while self._next % most in self._tagged:
            self._next += 1
        self._tagged.add(self._next % most)
        self._next += 1
        return self._next - 1

    def give(self, numbers: Iterable[int]) -> None:
        """Units that are not in use any more."""
        self._tagged.difference_update(number % most_units() for number in numbers)
