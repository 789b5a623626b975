"""Memory of a server for payloads that come as messages, so much and no more however many pushes are under way.

Beside weights and optimizer state, pushes keep at a server at most one copy of the model in sums that wait for other
contributors, and a second one in payloads: what workers send without being asked, which each of them limits to its
share of a copy or to two messages (`Window`), and blocks that the server asks for while there is room (`Buffers`). A
block whose turn in the sum it is may be asked for at any rate where no other such block is on its way: it comes, is
added and gone, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT = 16  # buffers kept for the next block
FRAME_COST = 2048  # bytes that a small payload costs beside itself

Bytes = NDArray[np.uint8]
Place = tuple[int, int]
"""Round, and first element in the key."""


class Buffers:
    """Buffers for blocks of a server; `limit`: bytes that they may fill, those of all units together."""

    def __init__(self) -> None:
        self.limit = self.held = 0
        self._due = 0
        self._spare: list[Bytes] = []

    def take(self, nbytes: int, due: bool, sent: bool = False) -> Bytes | None:
        """A buffer, or None where there is no room. `due`: it is this block's turn; `sent`: it comes in any case."""
        room = self.limit if due else self.limit // 2
        if self.held + nbytes > room and not sent and (not due or self._due):
            return None
        self.held += nbytes
        self._due += due and not sent
        for index, spare in enumerate(self._spare):
            if spare.size == nbytes:
                return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def give(self, buffer: Bytes, due: bool) -> None:
        """Give back what `take` gave; it keeps its bytes until the next `take`."""
        self.held -= buffer.size
        self._due -= due
        if len(self._spare) < KEPT:
            self._spare.append(buffer)


class _Sent(NamedTuple):
    """A payload on its way."""

    key: Hashable
    place: Place
    consumed: Callable[[], int]
    nbytes: int

    def read(self) -> bool:
        """Whether the server has read it."""
        return self.consumed() >= self.place[0]


class Window:
    """What a worker has sent to one server without being asked, and the server has not read yet.

    A payload has a place in its key: its round, and where in the key it begins. All workers send what a round of a key
    consists of, and a server reads what has come from everybody. So a worker may wait only for what comes before in
    the key: that can be read without what it holds back. Behind a later part, or another key, workers that go through
    them in different orders would wait for each other.
    """

    def __init__(self) -> None:
        self._open: list[_Sent] = []
        self._bytes = 0

    def admits(self, nbytes: int, limit: int) -> bool:
        """Whether so many bytes more may be sent now: `limit` bytes in all at most, or one payload."""
        if self._open and self._bytes + nbytes + FRAME_COST > limit:
            self._open = [sent for sent in self._open if not sent.read()]
            self._bytes = sum(sent.nbytes for sent in self._open)
        return not self._open or self._bytes + nbytes + FRAME_COST <= limit

    def holds(self, key: Hashable, before: Place) -> bool:
        """Whether a payload of the key is under way that comes before that place."""
        return any(sent.key == key and sent.place < before and not sent.read() for sent in self._open)

    def add(self, key: Hashable, place: Place, consumed: Callable[[], int], nbytes: int) -> None:
        """A payload is sent; it has been read when `consumed()` reaches its round."""
        self._open.append(_Sent(key, place, consumed, nbytes + FRAME_COST))
        self._bytes += nbytes + FRAME_COST
