"""Workers whose collectives belong together see that they make the same call, in the same order.

A collective of two keys of equal size and dtype would succeed and sum what does not belong together. Where workers
share a node, each notes its call beforehand and all compare the notes afterwards (`Roll`), which costs no message;
between nodes they compare a checksum while the messages of the call are under way, whose tags tell calls apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator

import msgspec
import numpy as np
from mpi4py import MPI

from mpips import meet
from mpips.arguments import Name
from mpips.roll import Roll

LEAST_TAGS = 32767  # that MPI promises


class Card(msgspec.Struct, array_like=True):
    """What a worker calls, or why it cannot."""

    what: str
    keys: list[Name]
    """The keys that it is yet to use in this call, the present one first."""
    pushes: bool
    refusal: str = ""


_numbers = [0]


def _next_number(comm: MPI.Comm) -> int:
    """A number that no two members of `comm` had in common before. Collective.

    What was sent in a call that was given up stays behind, and MPI may give a later communicator the same context.
    """
    highest = np.array(_numbers, np.int64)
    comm.Allreduce(MPI.IN_PLACE, highest, MPI.MAX)
    _numbers[0] = int(highest[0]) + 1
    return _numbers[0]


class Agreement:
    """The calls of the workers of `comm`, from worker `first` on, in program order. Making it is collective."""

    def __init__(self, comm: MPI.Comm, first: int, one_node: bool) -> None:
        self._comm, self._first = comm, first
        self._number = _next_number(comm)
        self._roll = Roll(comm) if one_node else None
        self.calls = 0
        """Calls that this worker has said, the same as all have."""
        self._extremes = np.zeros(2, np.int64)
        self._request = MPI.REQUEST_NULL
        self._call = 0
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAGS)

    @property
    def one_node(self) -> bool:
        """Whether calls are noted before and compared after; else they are compared before."""
        return self._roll is not None

    def note(self, text: str) -> None:
        """On one node: what this worker calls next."""
        assert self._roll is not None
        self.calls += 1
        self._roll.note(text)

    def noted(self) -> bool:
        """On one node: whether all have made the same call; to be asked when it is over."""
        assert self._roll is not None
        return self._roll.agrees()

    def same(self, text: str) -> Generator[None, None, bool]:
        """Between nodes: whether all call the same next."""
        self.compare(text)
        while (verdict := self.compared()) is None:
            yield
        return verdict

    def compare(self, text: str) -> None:
        """Between nodes: start to compare what all call next."""
        self.calls += 1
        digest = zlib.crc32(text.encode())
        self._call = zlib.crc32(f"{self._number} {self.calls} {text}".encode())
        self._extremes[:] = digest, -digest
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._extremes, MPI.MAX)

    def compared(self) -> bool | None:
        """Whether all call the same; None where that is not known yet."""
        if not self._request.Test():
            return None
        return bool(self._extremes[0] == -self._extremes[1])

    def tag(self, number: int) -> int:
        """The tag of message `number` of the present call: messages of calls, or stores, that differ do not meet."""
        return (self._call + number) % self._tags

    def explain(self, card: Card, fallback: str) -> tuple[str, list[Card]]:
        """The sentence about a call that cannot be made, or that differs, and what each worker called.

        Collective, blocking; `fallback` where all called the same.
        """
        told = meet.exchange(self._comm, msgspec.msgpack.encode(card), card.what)
        cards = [msgspec.msgpack.decode(data, type=Card) for data in told]
        refusals = [other.refusal for other in cards if other.refusal]
        if refusals:
            return refusals[0], cards
        calls = [f"{other.what} of key {other.keys[0]!r}" if other.keys else other.what for other in cards]
        if len(set(calls)) == 1:
            return fallback, cards
        texts = "; ".join(f"rank {self._first + index}: {call}" for index, call in enumerate(calls))
        return f"workers that sum together must make the same calls in the same order, but {texts}", cards
